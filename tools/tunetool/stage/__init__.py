"""Staging: a tree of files copied to memory or a local disk, whole or not at all, with the proof beside it."""
