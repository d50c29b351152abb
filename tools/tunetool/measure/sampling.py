"""Samples: work between two readings of the drives' counters, and the rules for repeating and stopping.

Only the counters decide about a sample, never its speed. If something else used the drives meanwhile, the sample is
repeated, a few times, with a message. If bytes are missing, no further sample can prove the figure.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

from tunetool.errors import CannotJudge
from tunetool.measure import Direction
from tunetool.measure.busy import Others
from tunetool.measure.evidence import REPEATS, Counted, Judgement, took_longer
from tunetool.measure.residency import resident_bytes
from tunetool.node.machine.block_stack import BlockStack, Counters, CountersChanged, difference, snapshot

T = TypeVar("T")


class Sample(Protocol):
    """A program's claim, and the drives' counts."""

    @property
    def claimed_bytes(self) -> int:
        """By the program."""

    @property
    def counted(self) -> Counted | None:
        """None where no block device counts."""

    @property
    def moment(self) -> float:
        """Middle of the sample, in seconds of a clock that never jumps."""


@dataclass(frozen=True)
class _Look:
    """The counters at some time between two readings of the clock."""

    after: float
    before: float
    counters: Mapping[str, Counters]


class Counting:
    """A context around the work of one sample. Raises ``CannotJudge`` where the drives change meanwhile.

    ``what`` is the work's name, for that message. ``direct``: a directory whose files the work opens for direct I/O; of
    bytes that the drives did not count as claimed, those in the page cache are then looked for there.
    """

    def __init__(
        self,
        stack: BlockStack,
        what: str,
        clock: Callable[[], float] = time.monotonic,
        direct: Path | None = None,
    ) -> None:
        self._stack, self._what, self._clock, self._direct = stack, what, clock, direct
        self._looks: list[_Look] = []
        self._devices: Mapping[str, Counters] = {}
        self._others: Others | None = None
        self.moment = 0.0

    def __enter__(self) -> Counting:
        if _disturbed.get():
            self._others = Others(self._stack)
        try:
            self._look()
        except CountersChanged as error:
            raise self._changed(error) from None
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            return
        try:
            self._look()
            first, last = self._looks[0], self._looks[-1]
            self._devices = difference(dict(last.counters), dict(first.counters))
        except CountersChanged as error:
            raise self._changed(error) from None
        self.moment = (first.before + last.after) / 2
        if self._others is not None:
            self._others.end()

    def ticking(self, tick: Callable[[], None]) -> Callable[[], None]:
        """``tick``, and a look at the counters: several in a sample tell when the bytes moved."""

        def both() -> None:
            tick()
            # The look at the end says what is wrong.
            with contextlib.suppress(CountersChanged):
                self._look()

        return both

    def count(
        self, direction: Direction, claimed: int, stack: BlockStack | None = None, slack: int = 0
    ) -> Counted | None:
        """A claim compared with the devices of ``stack``, by default all of them; None if none counts.

        ``slack``: bytes above the claim that do not count as other I/O.
        """
        names = (self._stack if stack is None else stack).counts
        if not names or not claimed:
            return None
        counted = sum(self._devices[name].moved_bytes(direction) for name in names)
        sample = Counted(claimed, counted, self._devices, slack, self._moving(direction, names))
        if sample.judgement == "proven":
            return sample
        sample = replace(sample, cached_bytes=self._cached())
        if sample.judgement != "other-io" or self._others is None:
            return sample
        return replace(sample, others=self._others.in_words(counted - claimed, direction))

    def _cached(self) -> int:
        """Direct I/O leaves nothing in the page cache; a few pages may be somebody's look at the files."""
        if self._direct is None:
            return 0
        resident, total = resident_bytes(self._direct)
        return resident if resident > EDGE * total else 0

    def _look(self) -> None:
        after = self._clock()
        counters = snapshot(self._stack)
        self._looks.append(_Look(after, self._clock(), counters))

    def _moving(self, direction: Direction, names: Sequence[str]) -> float:
        """Seconds for which the middle nine tenths of the bytes took, at least: the looks lie a little apart."""
        sums = [sum(look.counters[name].moved_bytes(direction) for name in names) for look in self._looks]
        total = sums[-1] - sums[0]
        begun = [look.before for look, moved in zip(self._looks, sums, strict=True) if moved - sums[0] >= EDGE * total]
        going = [look.after for look, moved in zip(self._looks, sums, strict=True) if sums[-1] - moved >= EDGE * total]
        return max(0.0, going[-1] - begun[0]) if total and begun and going else 0.0

    def _changed(self, error: CountersChanged) -> CannotJudge:
        return CannotJudge(f"the drives changed during {self._what}: {error}", "see `dmesg | tail`")


EDGE = 0.05
"""Share of a sample's bytes at either end that is ignored: more than the other I/O in a proven sample."""


@dataclass
class Repeats:
    """Counts repeated samples."""

    taken: int = 0

    @property
    def left(self) -> bool:
        """Whether one more may be."""
        return self.taken < REPEATS


_disturbed: ContextVar[bool] = ContextVar("disturbed", default=False)
"""Whether an earlier sample of the figure was disturbed, so that ``Counting`` is to look who does it. It is made within
``take``, in a dozen places that know nothing of repeats."""

_WORTH_REPEATING: Mapping[Judgement, str] = {
    "other-io": "something else used the drives meanwhile",
    "other-time": "the drives moved its bytes for longer than fio says",
}


def again(
    name: str,
    take: Callable[[str], T],
    judge: Callable[[T], Iterable[Judgement | None]],
    repeats: Repeats,
    say: Callable[[str], None],
) -> T:
    """One sample by ``take``, which gets its label; the last one where something else uses the drives, or the CPUs, all
    the time."""
    label, tries = name, 0
    while True:
        # The last repeat is the one that is reported.
        before = _disturbed.set(repeats.taken > 0)
        try:
            sample = take(label)
        finally:
            _disturbed.reset(before)
        judgements = set(judge(sample))
        if not judgements & set(_WORTH_REPEATING) or not repeats.left:
            return sample
        repeats.taken += 1
        tries += 1
        why = next(text for each, text in _WORTH_REPEATING.items() if each in judgements)
        say(f"{label}: {why}: repeated")
        label = f"{name}-repeat-{tries}"


def collect(
    kept: list[T],
    name: str,
    count: int,
    take: Callable[[str], T],
    judge: Callable[[T], Iterable[Judgement | None]],
    repeats: Repeats,
    say: Callable[[str], None],
    more: Callable[[Sequence[T]], int | None] = lambda _: None,
) -> None:
    """``count`` samples into ``kept``, which keeps those that were taken before one fails.

    ``more`` says how many it takes in all where those do not decide yet.
    """
    while True:
        while len(kept) < count:
            sample = again(f"{name}-{len(kept) + 1}", take, judge, repeats, say)
            kept.append(sample)
            if "missing" in judge(sample):
                return
        further = more(kept)
        if further is None:
            return
        count = further


def judgement(sample: Sample) -> tuple[Judgement | None]:
    """Of a sample, for ``again`` and ``collect``."""
    return (sample.counted.judgement if sample.counted is not None else None,)


class Timed(Protocol):
    """What fio says of a sample."""

    @property
    def seconds(self) -> float:
        """How long its requests took."""


class TimedSample(Sample, Protocol):
    """A sample by fio."""

    @property
    def outcome(self) -> Timed:
        """What fio says."""


def judgement_of_fio(sample: TimedSample) -> tuple[Judgement | None]:
    """``judgement``, and whether fio's time agrees with that of the drives' counters."""
    counted = sample.counted
    if counted is not None and counted.judgement == "proven" and took_longer(counted, sample.outcome.seconds):
        return ("other-time",)
    return judgement(sample)
