"""Removing a volume: what would be lost, who still uses it, unmounting, wiping drives, and replacing one. Imports
``plan``, ``ephemeral``, ``volume``, ``array``, ``machine`` and ``common``.
"""
