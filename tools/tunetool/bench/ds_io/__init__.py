"""``tunetool bench ds-io``: DeepSpeed's I/O handle over one file, as in its own ``ds_io``, with proof."""
