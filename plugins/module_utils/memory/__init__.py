"""Huge pages, /dev/shm and locked memory: checked, set now, and kept over a reboot. Imports ``machine`` and
``common``.
"""
