"""Virtual nodes with NVMe drives: rehearse a change before a real node sees it (docs/guides/lab.md)."""
