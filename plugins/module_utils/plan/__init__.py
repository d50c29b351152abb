"""The plan file, in which an owner agrees to a loss before it happens. Imports ``array``, ``machine`` and
``common``.
"""
