"""The facts of one node: drives, PCIe paths, volume, memory, GPUs, ceilings, and findings with remedies. It only
reads. It may import ``node`` and ``errors``."""
