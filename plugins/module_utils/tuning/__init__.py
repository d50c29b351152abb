"""I/O settings of the kernel and DeepSpeed's aio block: what may be asked for, who else sets it, set and given back.
Imports ``array``, ``machine`` and ``common``.
"""
