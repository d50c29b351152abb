"""GPUDirect Storage, proven: bytes moved through cuFile in a process of its own, and cuFile's own counters read."""
