"""Taking samples of a rung: one fio process each, with the drives' counters around it, again where something disturbed.

Drives that are read one after the other in one process make one round; each is a figure of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tunetool.errors import CannotJudge
from tunetool.measure.direction import Direction
from tunetool.measure.evidence import REPEATS, count
from tunetool.measure.fio import Fio, FioFailed, Outcome, execute, shares
from tunetool.measure.ladder.budget import SAMPLES
from tunetool.measure.progress import Progress
from tunetool.measure.sequential import FEWEST, Sample
from tunetool.measure.statistics import estimate, next_look
from tunetool.node.machine.block_stack import BlockStack, Counters, CountersChanged, difference, snapshot


@dataclass(frozen=True)
class Part:
    """One figure of a round: the jobs of this name, and the drives that count for them."""

    name: str
    stack: BlockStack
    """Of what is counted: the whole one, or a single drive's."""


@dataclass(frozen=True)
class Call:
    """One fio process."""

    name: str
    """For people and for the file with its output."""
    argv: Sequence[str]
    direction: Direction
    seconds: float
    """That it should take."""
    parts: Sequence[Part]
    """One: all jobs together. Several: by the jobs' names."""


@dataclass
class Shooter:
    """Takes samples in the run's directory."""

    stack: BlockStack
    fio: Fio
    directory: Path
    environment: Mapping[str, str]
    progress: Progress
    raw: dict[str, str] = field(default_factory=dict)

    def rounds(
        self,
        call: Callable[[str], Call],
        name: str,
        limit: float | None = None,
        value: Callable[[Outcome], float] = lambda outcome: outcome.bandwidth,
    ) -> tuple[dict[str, list[Sample]], int]:
        """Samples by part, and how many rounds were taken again. With a ``limit``: until it is clear, as in quick."""
        kept: dict[str, list[Sample]] = {}
        taken = repeats = 0
        goal = SAMPLES if limit is None else FEWEST
        while taken < goal:
            label = f"{name}-{taken + 1}" + (f"-repeat-{repeats}" if repeats else "")
            samples = self.shoot(call(label))
            judgements = {sample.counted.judgement for sample in samples.values() if sample.counted is not None}
            if "other-io" in judgements and repeats < REPEATS:
                repeats += 1
                self.progress.say(f"{label}: something else used the drives meanwhile, taken again")
                continue
            taken += 1
            for part, sample in samples.items():
                kept.setdefault(part, []).append(sample)
            if "missing" in judgements:
                break
            if taken == goal and limit is not None:
                goal = _more([value(sample.outcome) for sample in next(iter(kept.values()))], limit) or goal
        return kept, repeats

    def shoot(self, call: Call) -> dict[str, Sample]:
        """One process. Raises ``CannotJudge`` (``FioFailed`` among it)."""
        with self.progress.step(f"{self.stack.directory}: {call.name}", call.seconds) as tick:
            try:
                began = time.monotonic()
                before = snapshot(self.stack)
                outcomes = self._outcomes(call, tick)
                devices = difference(snapshot(self.stack), before)
            except CountersChanged as error:
                raise CannotJudge(f"the drives changed during `{call.name}`: {error}", "see `dmesg | tail`") from None
        moment = (began + time.monotonic()) / 2
        return {
            part.name: _sample(
                part, call.direction, outcomes[part.name if len(call.parts) > 1 else ""], devices, moment
            )
            for part in call.parts
        }

    def _outcomes(self, call: Call, tick: Callable[[], None]) -> dict[str, Outcome]:
        timeout = 2 * call.seconds + 60
        try:
            stdout, stderr = execute(self.fio, list(call.argv), self.directory, self.environment, timeout, tick)
            outcomes = shares(self.fio, call.direction, stdout, stderr, by_name=len(call.parts) > 1)
        except FioFailed as error:
            self.raw[f"fio-{call.name}.txt"] = error.raw
            raise
        self.raw[f"fio-{call.name}.json"] = stdout
        return outcomes


def _sample(
    part: Part, direction: Direction, outcome: Outcome, devices: Mapping[str, Counters], moment: float
) -> Sample:
    if not part.stack.counts:
        return Sample(outcome, None, moment)
    return Sample(outcome, count(part.stack, direction, outcome.claimed_bytes, devices), moment)


def _more(values: Sequence[float], limit: float) -> int | None:
    """How many samples the next look needs where the limit lies inside the interval."""
    found = estimate(values)
    return next_look(len(values)) if found.low < limit <= found.high else None
