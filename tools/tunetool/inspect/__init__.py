"""One screen of a node: drives, PCIe paths, volume, memory, GPUs, ceilings, and what to mend. It reads and never
writes. It may import ``node`` and ``errors``."""
