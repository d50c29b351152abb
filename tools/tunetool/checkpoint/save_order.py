"""The order in which checkpoints were saved, independent of step numbers: a job may go back to an older step.

The time of a save is the mtime of its `.metadata`, which every writer writes last. A drain records it in the step's
marker, so it survives copies. Clocks can be set back and differ between hosts, so an epoch is recorded with the time: a
new epoch begins when a drained step was saved by a clock that is behind the time of a known step.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tunetool.errors import UsageProblem

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
