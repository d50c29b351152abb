"""The ladder of level full: from the bare drives up to a checkpoint, each rung against the one below."""
