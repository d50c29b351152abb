"""The benchmark of the reference fine-tune: request, run, figures and verdict."""
