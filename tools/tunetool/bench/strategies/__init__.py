"""``tunetool bench strategies``: which ZeRO stage on how many GPUs and nodes, predicted and then measured."""
