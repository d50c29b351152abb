"""Advice whether to stage: one sentence, from sizes, limits and measurements. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tunetool.bench.staging.published import Pair
from tunetool.node.units import format_bandwidth, format_size
from tunetool.stage.room import Limit

NEAR = 0.95
"""Share of the time from bulk storage: if reading from memory takes more, bulk storage counts as equally fast."""
LaterFrom = Literal["measured", "page cache", "as the first"]


@dataclass(frozen=True)
class Room:
    """Bytes that staging needs and that each limit leaves, the tightest limit first."""

    needed: int
    """Bytes of model and data."""
    limits: Sequence[Limit]

    @property
    def fits(self) -> bool:
        """Whether model and data fit into memory."""
        return not self.limits or self.needed <= self.limits[0].left

    def describe_limits(self) -> str:
        """How many bytes each limit leaves, in words."""
        return ", ".join(f"{limit.what} {format_size(limit.left)}" for limit in self.limits)


@dataclass(frozen=True)
class Times:
    """Measured seconds: model load and epochs, on the slowest rank."""

    stage: float
    load: Pair
    first: Pair
    """The first epoch, from a cold cache."""
    later: Pair
    """Each epoch after it."""
    later_from: LaterFrom
    epochs: int
    """Number of epochs that the advice is for."""
    bulk_rate: float | None = None
    """Bytes per second at which bulk storage was read."""
    rounds: int = 1
    apart: bool = True
    """Whether model load and first epoch took longer from bulk storage, or shorter, in every round."""

    def total(self, epochs: int) -> Pair:
        """Seconds of load and epochs; from memory with the staging."""
        more = epochs - 1
        return Pair(
            self.stage + self.load.staged + self.first.staged + more * self.later.staged,
            self.load.bulk + self.first.bulk + more * self.later.bulk,
        )

    def break_even(self) -> int | None:
        """The first epoch at whose end staging has paid off; None: there is none."""
        once = self.total(1)
        missing = once.staged - once.bulk
        if missing <= 0:
            return 1
        gained = self.later.bulk - self.later.staged
        if gained <= (1 - NEAR) * self.later.bulk:
            return None
        return 1 + math.ceil(missing / gained)


@dataclass(frozen=True)
class Advice:
    """``stage``: None if the measurements do not decide."""

    stage: bool | None
    sentence: str
    break_even: int | None = None


def refusal(room: Room) -> str:
    """Why it cannot be staged: how much is needed, what is free, what the control group allows."""
    return f"{format_size(room.needed)} are needed, {room.describe_limits()}"


def advise(room: Room, times: Times | None) -> Advice:
    """Whether to stage, with the reason. ``times`` is None if a path could not be measured."""
    if not room.fits:
        return Advice(
            False,
            f"do not stage: {refusal(room)}; a larger /dev/shm (`mount -o remount,size=`), a higher memory limit or a "
            "smaller data set would make it possible",
        )
    fits = (
        f"{format_size(room.needed)} fit ({room.describe_limits()})"
        if room.limits
        else f"{format_size(room.needed)} fit"
    )
    if times is None:
        return Advice(None, f"whether to stage is undecided: {fits}, but not both paths were measured")
    if times.bulk_rate is not None:
        fits += f", bulk storage was read at {format_bandwidth(times.bulk_rate)}"
    read = Pair(times.load.staged + times.first.staged, times.load.bulk + times.first.bulk)
    took = f"model load and first epoch take {read.bulk:.1f} s from bulk storage and {read.staged:.1f} s from memory"
    if read.staged >= NEAR * read.bulk:
        return Advice(False, f"do not stage: {fits}; {took}, so bulk storage is as fast here{_chance(times)}")
    if not times.apart:
        return Advice(
            None,
            f"whether to stage is undecided: {fits}; {took}, but the rounds disagree: use more `--rounds`",
        )
    return _by_epochs(times, fits)


def _by_epochs(times: Times, fits: str) -> Advice:
    """The advice if memory is faster: in which epoch staging pays off."""
    epochs = f"{times.epochs} epoch{'s' if times.epochs != 1 else ''}"
    even, total = times.break_even(), times.total(times.epochs)
    if even is None:
        once = times.total(1)
        back = once.bulk - once.staged + times.stage
        return Advice(
            False,
            f"do not stage: {fits}; staging takes {times.stage:.1f} s and the first epoch gives back {back:.1f} s of "
            f"them, a later one nothing ({_later(times)})",
        )
    if even > times.epochs:
        return Advice(
            False,
            f"do not stage for {epochs}: {fits}; staging takes {times.stage:.1f} s, which come back in epoch {even} "
            f"({_later(times)})",
            even,
        )
    saved = (total.bulk - total.staged) / total.bulk
    return Advice(
        True,
        f"stage: {fits}; the {times.stage:.1f} s of staging come back in epoch {even}, and {epochs} take "
        f"{total.staged:.1f} s instead of {total.bulk:.1f} s ({saved:.0%} less; {_later(times)})",
        even,
    )


def _later(times: Times) -> str:
    sentence = {
        "measured": "later epochs as measured",
        "page cache": "later epochs assumed to be as fast from bulk storage, since the page cache can hold the data",
        "as the first": "later epochs assumed to be as the first, since the page cache cannot hold the data",
    }[times.later_from]
    return sentence + _chance(times)


def _chance(times: Times) -> str:
    return "; one round, so chance is not excluded" if times.rounds < 2 else ""
