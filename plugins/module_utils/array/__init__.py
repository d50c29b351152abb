"""The md array: which drives become its members and why one is refused, creating it, and whether it is still as asked.
Imports ``machine`` and ``common``.
"""
