"""Reads the table at the end of a run."""

from __future__ import annotations

# One round trip costs a second and a half here, and on four hundred nodes as many connections: a task more is a choice.
TRIPS_TO_BUILD = 11
TRIPS_TO_LOOK = 9


def host_row(output: str, host: str) -> list[str]:
    """The cells of a host: its name, result, tasks, changed, trips, seconds."""
    table = output[output.rindex("\nhost  ") :].splitlines()
    return next(line.split() for line in table if line.split()[:1] == [host])
