"""Copies of a tree in memory or on a local disk: whole or not at all, with checksums, verified, evicted. It may import
``measure``, ``node`` and ``record``."""
