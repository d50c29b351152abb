"""``tunetool bench strategies``: ZeRO stages on different numbers of GPUs and nodes, predicted and then measured."""
