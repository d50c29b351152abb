"""``tunetool bench inference``: generation by a model whose weights stay on drives, in host memory or on the device."""
