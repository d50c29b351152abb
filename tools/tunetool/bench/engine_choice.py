"""Which engines of a benchmark are meant."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

from tunetool.errors import UsageProblem


def choose(names: Collection[str], patterns: Sequence[str]) -> list[str]:
    """The names that match any of the globs, in their order; all names without globs and for ``*`` alone. Raises
    ``UsageProblem`` for a glob that matches none."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UsageProblem(f"`{pattern}` is not an engine", f"known: {', '.join(names)}")
    return [name for name in names if not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)]
