"""Step directories: their names, and how they go.

A step is `step_<N>` or `step-<N>`, and nothing else is.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
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


def steps_in(root: Path, *, ambiguous: bool = False) -> dict[int, Path]:
    """The step directories by number; none where ``root`` is missing.

    Raises ``UsageProblem`` when two names mean one step: which of them is meant cannot be known. With ``ambiguous``
    both are left out instead.
    """
    by_number: dict[int, Path] = {}
    twice: set[int] = set()
    try:
        entries = sorted(root.iterdir())
    except FileNotFoundError:
        return by_number
    for path in entries:
        number = number_or_none(path.name)
        if number is None or not path.is_dir():
            continue
        if number in by_number:
            if not ambiguous:
                raise two_names(by_number[number], path)
            twice.add(number)
        by_number[number] = path
    return {number: path for number, path in by_number.items() if number not in twice}


def same_step(path: Path) -> Path | None:
    """Another directory beside ``path`` (which need not exist) whose name means the same step."""
    number = step_number(path.name)
    try:
        entries = sorted(path.parent.iterdir())
    except FileNotFoundError:
        return None
    others = (entry for entry in entries if entry.name != path.name)
    return next((entry for entry in others if number_or_none(entry.name) == number and entry.is_dir()), None)


def number_or_none(name: str) -> int | None:
    """The number in a step directory's name; None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match["number"]) if match else None


def two_names(first: Path, second: Path) -> UsageProblem:
    """What is said of two names of one step."""
    return UsageProblem(f"`{first}` and `{second.name}` are the same step", "rename or remove one of them")


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
