"""``tunetool bench experts``: experts of a mixture-of-experts model streamed from drives, with and without a cache."""
