"""``tunetool bench dataset``: training data as frameworks read it."""
