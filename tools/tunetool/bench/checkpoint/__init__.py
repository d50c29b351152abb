"""Checkpoints saved and restored by every engine, over the same state."""
