"""The benchmarks, timed with proof; `cli/bench.py` lists them. It may import ``training``, ``launch``, ``fleet`` and
what lies under them, but no page and no command."""
