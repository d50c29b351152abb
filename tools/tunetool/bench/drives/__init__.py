"""``bench drives``: bandwidth over 1, 2, 4, 8 drives, by layout and file system."""
