"""I/O settings of the kernel and DeepSpeed's aio block: valid values, conflicts, setting and resetting them.
Imports ``array``, ``machine`` and ``common``.
"""
