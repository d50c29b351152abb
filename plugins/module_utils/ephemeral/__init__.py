"""Cloud drives that may come back blank: what a boot decides about them, and the systemd unit that asks. Imports
``volume``, ``array``, ``machine`` and ``common``.
"""
