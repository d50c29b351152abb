"""The benchmark of the reference fine-tune: what was asked, the run, its figures and its verdict."""
