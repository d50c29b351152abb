"""What every room rests on: reading and replacing small files, running programs, one change at a time, the manifest,
the differences between what is asked and what is, and the way to refuse. Imports only ``units``.
"""
