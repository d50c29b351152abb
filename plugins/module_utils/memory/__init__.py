"""Huge pages, /dev/shm and locked memory: judged, set now, and made to last over a reboot. Imports ``machine`` and
``common``.
"""
