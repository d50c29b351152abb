"""Turn a GPU node into one whose storage is provably fast, and keep proving it."""

__version__ = "0.1.0"
