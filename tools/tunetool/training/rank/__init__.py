"""What one rank runs and notes: the worker, its results, and curves of its node, its process and its GPU."""
