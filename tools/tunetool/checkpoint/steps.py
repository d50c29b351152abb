"""Step directories: their names, which of them may go, and how they go.

A step is `step_<N>` or `step-<N>`, and nothing else is.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Collection
from pathlib import Path

from tunetool.errors import UsageProblem

_STEP = re.compile(r"step[_-](?P<number>[0-9]{1,18})")
_GOING = ".deleted-"


def step_number(name: str) -> int:
    """The number in a step directory's name. Raises ``UsageProblem`` for any other name."""
    match = _STEP.fullmatch(name)
    if match is None:
        raise UsageProblem(f"`{name}` is no step directory", "call it `step_<N>`, such as `step_1000`")
    return int(match["number"])


def steps_in(root: Path) -> dict[int, Path]:
    """The step directories by number; none where ``root`` is missing.

    Raises ``UsageProblem`` when two names mean one step: which of them is meant cannot be known.
    """
    found: dict[int, Path] = {}
    try:
        entries = sorted(root.iterdir())
    except FileNotFoundError:
        return found
    for path in entries:
        match = _STEP.fullmatch(path.name)
        if match is None or not path.is_dir():
            continue
        number = int(match["number"])
        if number in found:
            raise UsageProblem(f"`{found[number]}` and `{path.name}` are the same step", "rename or remove one of them")
        found[number] = path
    return found


def surplus(steps: Collection[int], drained: Collection[int], keep: int) -> list[int]:
    """Which of ``steps``, those of one tier, may be deleted to keep the ``keep`` newest. Pure.

    ``drained`` are the steps that lie complete on shared storage. The newest of them stays, and so does everything
    newer: until a newer one has left the nodes it is all there is to go back to.
    """
    if keep < 1:
        raise UsageProblem(f"`max_to_keep={keep}` would keep nothing", "1 at least, or None to keep all")
    if not drained:
        return []
    kept = set(sorted(steps)[-keep:])
    return sorted(step for step in steps if step not in kept and step < max(drained))


def remove_step(path: Path) -> None:
    """Delete a step directory so that it is there whole or not at all, whenever this is interrupted."""
    hidden = path.with_name(f"{_GOING}{path.name}-{secrets.token_hex(4)}")
    try:
        path.rename(hidden)
    except FileNotFoundError:
        return
    fsync_directory(path.parent)
    shutil.rmtree(hidden, ignore_errors=True)


def fsync_directory(path: Path) -> None:
    """Make the names in it durable. Raises ``OSError``."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sweep(root: Path) -> None:
    """Finish deletions that were interrupted."""
    with contextlib.suppress(FileNotFoundError):
        for path in root.iterdir():
            if path.name.startswith(_GOING):
                shutil.rmtree(path, ignore_errors=True)
