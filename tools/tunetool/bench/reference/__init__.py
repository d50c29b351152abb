"""``tunetool bench reference``: the whole chain, from the storage's verdict to where data should live."""
