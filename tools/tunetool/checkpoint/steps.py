"""Step directories: their names, the order in which they were saved, and how they are deleted.

The name of a step directory is `step_<N>` or `step-<N>`; all other names are ignored.

The order is independent of step numbers, since a job may go back to an older step. The time of a save is the mtime of
its `.metadata`, which every writer writes last. A drain records it in the step's marker, so it survives copies. Clocks
can be set back and differ between hosts, so an epoch is recorded with the time: a new epoch begins when a drained step
was saved by a clock that is behind the time of a known step.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tunetool.errors import UsageProblem
from tunetool.stage.system import exchange, rename_to_new

_STEP = re.compile(r"step[_-](?P<number>[0-9]{1,18})")
_DELETED = ".deleted-"
_REPLACED = ".replaced-"


def step_number(name: str) -> int:
    """The step number in the name of a step directory. Raises ``UsageProblem`` for any other name."""
    match = _STEP.fullmatch(name)
    if match is None:
        raise UsageProblem(f"`{name}` is not a step directory", "name it `step_<N>`, for example `step_1000`")
    return int(match["number"])


def steps_in(root: Path, *, ambiguous: bool = False) -> dict[int, Path]:
    """The step directories below ``root`` by step number; empty if ``root`` does not exist.

    Raises ``UsageProblem`` if two directories have the same number. With ``ambiguous`` both are left out instead.
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
                raise same_step_error(by_number[number], path)
            twice.add(number)
        by_number[number] = path
    return {number: path for number, path in by_number.items() if number not in twice}


def same_step(path: Path) -> Path | None:
    """Another directory beside ``path`` (which need not exist) with the same step number; None if there is none."""
    number = step_number(path.name)
    try:
        entries = sorted(path.parent.iterdir())
    except FileNotFoundError:
        return None
    siblings = (entry for entry in entries if entry.name != path.name)
    return next((entry for entry in siblings if number_or_none(entry.name) == number and entry.is_dir()), None)


def number_or_none(name: str) -> int | None:
    """The step number in the name of a step directory; None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match["number"]) if match else None


def need_checkpoint(path: Path) -> None:
    """Raises ``UsageProblem`` unless ``path`` is a directory with `.metadata` or data files of a checkpoint."""
    if not path.exists():
        raise UsageProblem(
            f"`{path}` does not exist", "name the directory of one step: `tunetool checkpoint ls` lists them"
        )
    if not path.is_dir():
        raise UsageProblem(f"`{path}` is not a directory", "name the directory that was saved to")
    if not os.path.lexists(path / ".metadata") and next(path.glob("*.distcp"), None) is None:
        step = next(iter(steps_in(path, ambiguous=True).values()), path / "step_<N>")
        raise UsageProblem(f"`{path}` is not a checkpoint: it has no `.metadata`", f"name one step, such as `{step}`")


def same_step_error(first: Path, second: Path) -> UsageProblem:
    """The error for two directories with the same step number."""
    return UsageProblem(f"`{first}` and `{second.name}` are the same step", "rename or remove one of them")


def remove_step(path: Path) -> None:
    """Delete a step directory. It is renamed first, so an interruption leaves either the complete step or none."""
    hidden = path.with_name(f"{_DELETED}{path.name}-{secrets.token_hex(4)}")
    try:
        path.rename(hidden)
    except FileNotFoundError:
        return
    fsync_directory(path.parent)
    shutil.rmtree(hidden, ignore_errors=True)


def put_new_step(built: Path, final: Path) -> None:
    """Give the complete step ``built`` the name ``final``, durably. Raises ``FileExistsError`` if something has that
    name, which stays as it is; ``OSError``."""
    rename_to_new(built, final)
    fsync_directory(final.parent)


def put_step(built: Path, final: Path) -> None:
    """Give the complete step ``built`` the name ``final``, durably. A step that has the name keeps it until then, and
    is deleted after that. Raises ``OSError``: one of the two has the name then, the new one if only the sync failed.

    Where the file system cannot exchange two names, no step has the name for a moment. If the process dies then, both
    are there under other names, and ``sweep`` restores the old one.
    """
    token = secrets.token_hex(4)
    old = final.with_name(f"{_DELETED}{final.name}-{token}")
    if not final.exists():
        built.rename(final)
    elif not _exchange(built, final, old):
        old = final.with_name(f"{_REPLACED}{final.name}-{token}")
        final.rename(old)
        try:
            built.rename(final)
        except OSError:
            old.rename(final)
            raise
    fsync_directory(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _exchange(built: Path, final: Path, old: Path) -> bool:
    """Exchange the names; the step that had the name ``final`` is ``old`` then. False if the file system cannot."""
    # What ``sweep`` deletes must be the old one whenever the process dies after the exchange, and the new one can be
    # made again.
    built.rename(old)
    exchanged = False
    try:
        exchanged = exchange(old, final)
    finally:
        if not exchanged:
            old.rename(built)
    return exchanged


def replaced_steps(root: Path) -> dict[int, Path]:
    """The old steps whose names an interrupted ``put_step`` took, by step number. Their paths hold until ``sweep``."""
    replaced = {}
    for path in root.glob(f"{_REPLACED}*"):
        name = _name_before(path)
        number = number_or_none(name)
        if number is not None and not (root / name).exists():
            replaced[number] = path
    return replaced


def _name_before(replaced: Path) -> str:
    return replaced.name[len(_REPLACED) :].rpartition("-")[0]


def fsync_directory(path: Path) -> None:
    """Sync the directory, so that the names in it survive a power cut. Raises ``OSError``."""
    fsync(path, os.O_DIRECTORY)


def fsync(path: Path, flags: int = 0) -> None:
    """Sync what a file holds to its medium. Raises ``OSError``."""
    handle = os.open(path, os.O_RDONLY | flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sweep(root: Path) -> None:
    """Finish interrupted deletions of step directories in ``root``, and restore steps that lost their names."""
    for path in replaced_steps(root).values():
        with contextlib.suppress(OSError):
            path.rename(root / _name_before(path))
    with contextlib.suppress(FileNotFoundError):
        for path in root.iterdir():
            if path.name.startswith((_DELETED, _REPLACED)):
                shutil.rmtree(path, ignore_errors=True)


Key = TypeVar("Key", bound=Hashable)
_SKEW_NS = 2 * 10**9
"""Nanoseconds by which a file server's clock may be ahead of this host's without counting as a clock set back."""


@dataclass(frozen=True, order=True)
class Stamp:
    """When a step was saved. A later epoch is newer, whatever the time; times are nanoseconds since 1970."""

    epoch: int
    time_ns: int

    @classmethod
    def parse(cls, document: Any) -> Stamp | None:
        """The inverse of ``row``; None for anything else, as in markers of earlier versions."""
        try:
            return cls(int(document["epoch"]), int(document["time_ns"]))
        except (KeyError, TypeError, ValueError):
            return None

    def row(self) -> dict[str, int]:
        """As a dict for JSON."""
        return {"epoch": self.epoch, "time_ns": self.time_ns}


def now_ns() -> int:
    """The time of this host's clock in nanoseconds since 1970."""
    return time.time_ns()


def stamp(time_ns: int, known: Collection[Stamp], unstamped: Collection[int], now: int) -> Stamp:
    """The stamp of a save at ``time_ns`` that has none yet. Pure.

    ``known``: recorded stamps; ``unstamped``: times of further saves without a stamp; ``now``: the current time. A time
    ahead of ``now`` comes from a clock that was set back since, or from another clock: such a save is older than all
    saves with times before ``now``.
    """
    ahead = now + _SKEW_NS
    newest = max((save.epoch for save in known), default=0)
    before = max((save.epoch for save in known if save.time_ns > ahead), default=max(newest - 1, 0))
    if time_ns > ahead:
        return Stamp(before, time_ns)
    went_back = any(save.time_ns > ahead for save in known) or any(save > ahead for save in unstamped)
    return Stamp(max(newest, before + 1) if went_back else newest, time_ns)


def stamps(recorded: Mapping[Key, Stamp], times: Mapping[Key, int], now: int) -> dict[Key, Stamp]:
    """The stamps of all saves: as recorded, otherwise computed from their times. Pure."""
    known, unstamped = list(recorded.values()), list(times.values())
    return {**{key: stamp(time_ns, known, unstamped, now) for key, time_ns in times.items()}, **recorded}


def surplus(
    steps: Mapping[int, Stamp], deletable: Collection[int], spared: Collection[int], keep: int
) -> Sequence[int]:
    """The steps of one tier to delete, oldest first, so that the ``keep`` steps that were saved last remain. Pure.

    Only steps in ``deletable`` and not in ``spared`` are deleted, so more than ``keep`` may remain.
    """
    if keep < 1:
        raise UsageProblem(f"`max_to_keep={keep}` would keep nothing", "1 at least, or None to keep all")
    ordered = sorted(steps, key=lambda step: (steps[step], step))
    return [step for step in ordered[:-keep] if step in deletable and step not in spared]
