"""What a machine is, read from /proc, /sys and its tools: drives and what they hold, their health, PCIe, GPUs, mounts,
memory, containers, jobs. Nothing here changes a machine. Imports ``common``.
"""
