"""The samples, by cell and round. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, median_low
from typing import TypeVar

from tunetool.bench.finetune.figures import STARTS
from tunetool.bench.strategies.link import Network, fit
from tunetool.bench.strategies.matrix import Cell, Fitted, Layout
from tunetool.bench.strategies.network import RankFigures
from tunetool.bench.strategies.predict import Hooks, Layouts, Prediction
from tunetool.bench.strategies.request import WARM_UP
from tunetool.errors import CannotJudge
from tunetool.training.workload import RankResult


@dataclass(frozen=True)
class Sample:
    """One run of a cell, in seconds."""

    step: float
    """Median over the steps, of the slowest rank in each."""
    data: float
    """Median wait for a batch, of the slowest rank."""
    start: Mapping[str, float]
    """By phase, of the slowest rank: rendezvous, imports, communicator, model_load, engine."""
    losses: Sequence[float]
    """Mean loss over the ranks at each step."""
    excused: frozenset[int] = frozenset()
    """Steps whose loss may be no number (``RankResult.excused_steps``)."""
    notes: Sequence[str] = ()
    """Deviations from the request, on any rank."""


@dataclass
class Row:
    """The samples of one cell."""

    cell: Cell
    predictions: list[Prediction | None] = field(default_factory=list)
    """Of each round, made before the cell ran in it."""
    samples: list[Sample] = field(default_factory=list)
    failed: str | None = None

    @property
    def prediction(self) -> Prediction | None:
        """The one in the middle of those that were made from warm cells, in the second round and later; of the first
        round where there is no other. None where nothing could be predicted from."""
        made = [each for each in _warm(self.predictions) if each is not None] or [
            each for each in self.predictions if each is not None
        ]
        middle = median_low([each.step for each in made]) if made else None
        return next((each for each in made if each.step == middle), None)

    @property
    def prediction_errors(self) -> list[float]:
        """Of each round, how far the prediction made before it was from the measured step, as a share of the step.

        Without the first round, where there are more: its predictions come from cells that were never run.
        """
        rounds = _warm(list(zip(self.predictions, self.samples, strict=False)))
        return [abs(prediction.step / sample.step - 1) for prediction, sample in rounds if prediction is not None]

    @property
    def warm_step(self) -> float:
        """Median over the rounds without the first, where there are more: what other cells are predicted from."""
        return median(sample.step for sample in _warm(self.samples))

    @property
    def step(self) -> float:
        """Median over the rounds."""
        return median(sample.step for sample in self.samples)


Each = TypeVar("Each")


def _warm(rounds: Sequence[Each]) -> Sequence[Each]:
    """Without the first, where there are more."""
    return rounds[1:] or rounds


@dataclass
class Study:
    """What was measured: networks, cells, errors."""

    fitted: Fitted
    rows: dict[Cell, Row]
    """Cells in the order in which they run."""
    rank_figures: dict[Layout, list[RankFigures]] = field(default_factory=dict)
    """Answers of all ranks, by layout."""
    hooks: dict[Layout, Hooks] = field(default_factory=dict)
    """Of the layouts of stage 3, by a probe."""
    unprobed: dict[Layout, str] = field(default_factory=dict)
    """Where the probe could not run, with the reason."""
    errors: list[str] = field(default_factory=list)
    first: RankResult | None = None
    """A result for what is the same in all cells: parameters, versions, device."""

    @property
    def measured(self) -> dict[Cell, float]:
        """Steps of the cells that were run, as predictions take them."""
        return {cell: row.warm_step for cell, row in self.rows.items() if row.samples}

    def layouts(self) -> Layouts:
        """What predictions need of the layouts: their networks and computation times."""
        networks = {layout: network(ranks) for layout, ranks in self.rank_figures.items() if layout.world > 1}
        work = {layout: max(median(each.work) for each in ranks) for layout, ranks in self.rank_figures.items()}
        return Layouts(networks, work, self.hooks)


def sample(results: Sequence[RankResult]) -> Sample:
    """The sample of one run. Raises ``CannotJudge`` if a rank made too few steps."""
    if min(len(result.step_seconds) for result in results) <= WARM_UP:
        raise CannotJudge(f"a rank made no more than {WARM_UP} steps", "look at the ranks' logs beside the record")
    # An update that was skipped is skipped on all ranks.
    skipped = set(results[0].skipped_steps)
    times = enumerate(zip(*(result.step_seconds for result in results), strict=True))
    steps = [max(each) for step, each in times if step >= WARM_UP and step not in skipped]
    if not steps:
        raise CannotJudge(
            f"no step after the first {WARM_UP} made an update: gradients overflowed in {results[0].precision}",
            "give the loss scale more `--steps`",
        )
    waits = [max(each) for each in zip(*(result.data_seconds[WARM_UP:] for result in results), strict=True)]
    losses = [fmean(each) for each in zip(*(result.losses for result in results), strict=True)]
    start = {name: max(result.seconds.get(name, 0.0) for result in results) for name in STARTS}
    notes = tuple(dict.fromkeys(note for result in results for note in result.notes))
    return Sample(median(steps), median(waits), start, losses, results[0].excused_steps, notes)


def network(ranks: Sequence[RankFigures]) -> Network:
    """The network of a layout, fitted to its ranks' figures; every rank has the slowest one's times."""
    first = ranks[0]
    fits = {kind: fit([(size, median(taken)) for size, taken in points]) for kind, points in first.points.items()}
    return Network(fits, median(first.queued))  # type: ignore[arg-type]
