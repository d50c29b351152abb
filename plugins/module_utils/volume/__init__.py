"""The XFS file system on the array, its mount point and the systemd units that wait for it. Imports ``array``,
``machine`` and ``common``.
"""
