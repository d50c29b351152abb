"""The program of one rank and its records: the worker, its results, and curves of its node, process and GPU."""
