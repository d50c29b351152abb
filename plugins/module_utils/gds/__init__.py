"""GPUDirect Storage: which path a node can take, what each path needs, cufile.json, and setting it up. Imports
``machine`` and ``common``.
"""
