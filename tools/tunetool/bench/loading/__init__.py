"""``tunetool bench loading``: a model into a GPU or host memory by every loader, from every medium."""
