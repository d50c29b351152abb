"""The node as a whole: against its manifest, and against what is asked before anything is changed. Imports every room
but ``play``.
"""
