"""Reading the table at the end of a run."""

from __future__ import annotations


def host_row(output: str, host: str) -> list[str]:
    """The cells of a host: its name, result, tasks, changed, trips, seconds."""
    table = output[output.rindex("\nhost  ") :].splitlines()
    return next(line.split() for line in table if line.split()[:1] == [host])
