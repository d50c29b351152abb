"""DeepNVMe's documented calls, each made and checked bit for bit."""
