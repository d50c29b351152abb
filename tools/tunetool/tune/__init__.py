"""The best settings of DeepSpeed's I/O for this storage, found by measuring, in a file that DeepSpeed accepts."""
