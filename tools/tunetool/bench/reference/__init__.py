"""``tunetool bench reference``: the whole chain, from the storage's verdict to the advice where data should be."""
