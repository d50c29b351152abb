"""``tunetool bench staging``: the same fine-tune with its files in memory and on bulk storage."""
