"""In which order checkpoints were saved, whatever the numbers of their steps: a job may go back and save on from there.

A save's time is that of its `.metadata`, which every writer writes last. A drain records it in the step's marker, so it
outlives copies. Clocks go back and differ between hosts, so beside the time an epoch is recorded: it begins anew when a
step is drained, saved by a clock that is behind the time of a step that is known already.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tunetool.errors import UsageProblem

Key = TypeVar("Key", bound=Hashable)
_SKEW_NS = 2 * 10**9
"""A file server's clock may be so far ahead of this host's without any clock having gone back."""


@dataclass(frozen=True, order=True)
class Stamp:
    """When a step was saved: those of a later epoch are newer, whatever their time."""

    epoch: int
    time_ns: int

    @classmethod
    def parse(cls, document: Any) -> Stamp | None:
        """Of ``row``; None for what is none, as in markers of earlier versions."""
        try:
            return cls(int(document["epoch"]), int(document["time_ns"]))
        except (KeyError, TypeError, ValueError):
            return None

    def row(self) -> dict[str, int]:
        """For JSON."""
        return {"epoch": self.epoch, "time_ns": self.time_ns}


def now_ns() -> int:
    """This host's clock."""
    return time.time_ns()


def stamp(time_ns: int, known: Collection[Stamp], others: Collection[int], now: int) -> Stamp:
    """The stamp of a save that has none yet. Pure.

    ``known`` are the stamps that were recorded, ``others`` the times of further saves without one, ``now`` what the
    clock says. A time ahead of ``now`` was written by a clock that went back since, or by another one. Who was saved
    at such a time was saved before everybody who was not.
    """
    ahead = now + _SKEW_NS
    newest = max((save.epoch for save in known), default=0)
    before = max((save.epoch for save in known if save.time_ns > ahead), default=max(newest - 1, 0))
    if time_ns > ahead:
        return Stamp(before, time_ns)
    went_back = any(save.time_ns > ahead for save in known) or any(save > ahead for save in others)
    return Stamp(max(newest, before + 1) if went_back else newest, time_ns)


def stamps(recorded: Mapping[Key, Stamp], times: Mapping[Key, int], now: int) -> dict[Key, Stamp]:
    """Of every save: what was recorded, else by its time. Pure."""
    known, others = list(recorded.values()), list(times.values())
    return {**{key: stamp(time_ns, known, others, now) for key, time_ns in times.items()}, **recorded}


def surplus(
    steps: Mapping[int, Stamp], deletable: Collection[int], spared: Collection[int], keep: int
) -> Sequence[int]:
    """Which of ``steps``, those of one tier, are deleted to keep the ``keep`` that were saved last. Pure.

    Only what is ``deletable`` goes, and nothing that is ``spared``: so more than ``keep`` may stay. The oldest first.
    """
    if keep < 1:
        raise UsageProblem(f"`max_to_keep={keep}` would keep nothing", "1 at least, or None to keep all")
    ordered = sorted(steps, key=lambda step: (steps[step], step))
    return [step for step in ordered[:-keep] if step in deletable and step not in spared]
