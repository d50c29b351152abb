"""Lists the steps of several directories, with what a job that starts now would make of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tunetool.checkpoint import bulk, markers
from tunetool.checkpoint.agreement import StepCopy, agree
from tunetool.checkpoint.resume import copy_at, replicas_in, survey
from tunetool.checkpoint.steps import number_or_none
from tunetool.errors import CannotJudge, UsageProblem


@dataclass(frozen=True)
class Entry:
    """One copy of a step, or a checkpoint in a directory of another name, which no job finds by itself."""

    path: str
    step: int | None
    """None for another name."""
    problem: str | None
    """Why it cannot be read whole here; None if it can."""
    bytes: int
    """Of all files in its directory."""
    saved_ns: int
    """When it was saved, in nanoseconds since 1970."""
    world: int | None
    drained: bool
    """Whether this save is whole on shared storage, or was."""
    resumed: bool
    """Whether a job of this node would resume from it."""
    replica_of: str | None = None
    """The node whose part it is, if it is a replica that this node keeps."""


@dataclass(frozen=True)
class Catalogue:
    """All entries in the order of the directories, and why no job could resume, if there are steps."""

    entries: tuple[Entry, ...]
    obstacle: str | None = None


def need_directories(directories: Sequence[Path]) -> None:
    """Raises ``UsageProblem`` unless all of them exist."""
    for directory in directories:
        if not directory.is_dir():
            what = "is not a directory" if directory.exists() else "does not exist"
            raise UsageProblem(f"`{directory}` {what}", "name directories with steps, or a step")


def catalogue(directories: Sequence[Path]) -> Catalogue:
    """The steps in ``directories``, the nearest tier first; each is a directory of steps, or one step.

    Raises ``UsageProblem`` if one does not exist, or has two directories with the same step number.
    """
    need_directories(directories)
    named = [_named(directory) for directory in directories]
    single = {directory for directory in named if number_or_none(directory.name) is not None}
    tiers = dict.fromkeys(directory.parent if directory in single else directory for directory in named)
    # All tiers at once, as a job does it: what was drained to one says what was overwritten in another.
    surveyed = survey([*tiers])
    asked = {*named} - single
    copies = {
        copy.path: copy for copy in surveyed.copies if Path(copy.path) in single or Path(copy.path).parent in asked
    }
    others = {
        str(path): copy_at(0, path, {})
        for directory in dict.fromkeys(named)
        if directory in asked
        for path in _other_names(directory)
    }
    steps = replace(surveyed, copies=tuple(copies.values()))
    resumed, obstacle = None, None
    try:
        agreement = agree([steps])
        resumed = agreement.paths[steps.rank] if agreement is not None else None
    except CannotJudge as error:
        obstacle = error.message
    listed = [_entry(copy, copy.step, copy.path == resumed) for copy in copies.values()]
    listed += [_entry(copy, None, False) for copy in others.values()]
    kept = [copy for directory in dict.fromkeys(named) if directory in asked for copy in replicas_in(directory)]
    return Catalogue((*listed, *(_entry(copy, copy.step, False) for copy in kept)), obstacle)


def _named(directory: Path) -> Path:
    """``.`` in a step is that step."""
    return directory if directory.name else directory.resolve()


def _other_names(directory: Path) -> Iterator[Path]:
    """``directory`` itself and what is in it, where that is a checkpoint."""
    inside = sorted(path for path in directory.iterdir() if not path.name.startswith("."))
    for path in (directory, *inside):
        if number_or_none(path.name) is None and os.path.lexists(path / markers.METADATA):
            yield path


def _entry(copy: StepCopy, step: int | None, resumed: bool) -> Entry:
    path = Path(copy.path)
    if not path.exists() and copy.digest is not None:  # its drain did not end
        path = bulk.partial_of(path.parent, path.name, copy.digest)
    saved_ns = copy.recorded.time_ns if copy.recorded is not None else copy.written_ns
    bytes_there = _bytes_in(path)
    return Entry(
        copy.path, step, copy.problem, bytes_there, saved_ns, copy.world, copy.drained, resumed, copy.replica_of
    )


def _bytes_in(directory: Path) -> int:
    """Of all files below, but not behind links that lead out."""
    total = 0
    for below, _, names in os.walk(directory):
        for name in names:
            try:
                total += (Path(below) / name).lstat().st_size
            except OSError:  # deleted meanwhile
                continue
    return total
