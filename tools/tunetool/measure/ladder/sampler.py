"""Taking samples of a rung: one fio process each, with the drives' counters around it, again where something disturbed.

Drives that are read one after the other in one process make one round; each is a figure of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tunetool.measure import Direction, tester
from tunetool.measure.fio import Fio, FioFailed, Outcome, execute, shares
from tunetool.measure.ladder.budget import SAMPLES
from tunetool.measure.progress import Progress
from tunetool.measure.sampling import Counting, Repeats, collect, judgement_of_fio
from tunetool.measure.sequential import FEWEST, Sample, more_where_open
from tunetool.node.machine.block_stack import BlockStack


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


def of_one_part(argv: Sequence[str], direction: Direction, seconds: float, part: Part) -> Callable[[str], Call]:
    """The processes of a rung with a single figure, for ``Sampler.rounds``."""
    return lambda label: Call(label, argv, direction, seconds, [part])


@dataclass
class Sampler:
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
        rounds: list[dict[str, Sample]] = []
        repeats = Repeats()

        def more(taken: Sequence[dict[str, Sample]]) -> int | None:
            first = [next(iter(samples.values())) for samples in taken]
            return more_where_open(name, first, limit, self.progress.say, value)

        collect(
            rounds,
            name,
            SAMPLES if limit is None else FEWEST,
            lambda label: self.sample(call(label)),
            lambda samples: [each for sample in samples.values() for each in judgement_of_fio(sample)],
            repeats,
            self.progress.say,
            more,
        )
        return {part: [samples[part] for samples in rounds] for part in rounds[0]}, repeats.taken

    def without_storage(self, name: str, argv: Sequence[str], direction: Direction, seconds: float) -> list[Outcome]:
        """What fio itself reaches by ``argv``, whose samples take ``seconds``; none where that failed."""
        load = tester.Load(self.fio, argv, direction, seconds, self.directory, self.environment)
        return tester.measure_ceiling(load, name, self.progress, self.raw)

    def sample(self, call: Call) -> dict[str, Sample]:
        """One process. Raises ``CannotJudge`` (``FioFailed`` among it)."""
        step = self.progress.step(f"{self.stack.directory}: {call.name}", call.seconds)
        with step as tick, Counting(self.stack, f"`{call.name}`", direct=self.directory) as counting:
            outcomes = self._outcomes(call, counting.ticking(tick))
        samples = {}
        for part in call.parts:
            outcome = outcomes[part.name if len(call.parts) > 1 else ""]
            counted = counting.count(call.direction, outcome.claimed_bytes, part.stack)
            samples[part.name] = Sample(outcome, counted, counting.moment)
        return samples

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
