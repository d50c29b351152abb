"""Predicts the time of a step: computation from measured cells, communication from the network. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from tunetool.advise.communication import Backend, Module, Traffic, Zero
from tunetool.advise.zero_steps import Event, events, traffic, uses
from tunetool.bench.strategies.link import Network
from tunetool.bench.strategies.matrix import ALONE, Cell, Layout
from tunetool.bench.strategies.replay import compute_of, gathers, replay

_MOST_TIMES = 10.0
"""A cell that takes more beyond the probe than this is held up by something else."""
LEFT_OUT = (
    "computation and collectives that compete for cores or SMs; GPU kernels that run while the CPU runs hooks, which "
    "are added to the step; the optimizer's time, which is not divided by the ranks; other users of the network"
)
"""Of every prediction."""


@dataclass(frozen=True)
class Job:
    """The job of every cell."""

    modules: Sequence[Module]
    settings: Mapping[int, Zero]
    """By stage."""
    element_bytes: int
    backend: Backend

    def events(self, cell: Cell) -> list[Event]:
        """Operations of one step of the stage."""
        return list(events(self.modules, self.settings[cell.stage], cell.layout.world, self.element_bytes))

    def traffic(self, cell: Cell) -> Traffic:
        """The collectives of one step of the stage."""
        return traffic(self.modules, self.settings[cell.stage], cell.layout.world, self.element_bytes, self.backend)

    def counts(self, cell: Cell) -> tuple[int, int]:
        """Uses of modules and gathers in one step. One rank alone goes through the motions of a gather too."""
        zero = self.settings[cell.stage]
        step = list(events(self.modules, zero, max(2, cell.layout.world), self.element_bytes))
        return len(uses(self.modules, zero.recompute)), gathers(step)


@dataclass(frozen=True)
class Hooks:
    """What DeepSpeed's own code costs around modules in stage 3, in seconds."""

    per_use: float
    """Of one run of a module, forward or backward."""
    per_gather: float
    """Of starting one gather, without the communication itself."""

    def seconds(self, used: int, gathered: int) -> float:
        """Of a step."""
        return used * self.per_use + gathered * self.per_gather


@dataclass(frozen=True)
class Layouts:
    """The measurements of each layout before any cell was run."""

    networks: Mapping[Layout, Network]
    """Networks by layout, without that of one rank."""
    work: Mapping[Layout, float]
    """Seconds of the same small computation on all ranks at the same time: ranks that share cores slow each other."""
    hooks: Mapping[Layout, Hooks] = field(default_factory=dict)
    """Of layouts with a cell of stage 3, where the probe could run."""

    def contention(self, layout: Layout, against: Layout) -> float:
        """Factor by which computation takes longer on that layout."""
        return self.work[layout] / self.work[against]


@dataclass(frozen=True)
class Prediction:
    """The prediction for a cell, made before it was run."""

    step: float
    compute: float
    exposed: float
    """Seconds of waiting for the network."""
    sent: float
    """Bytes that each rank sends."""
    collectives: int
    basis: str
    """The source of the compute time."""


def predict(cell: Cell, job: Job, layouts: Layouts, measured: Mapping[Cell, float]) -> Prediction | None:
    """The step of ``cell`` from steps of other cells; None before any was measured. Its own step is not looked at."""
    computes = {
        each: compute_of(job.events(each), layouts.networks.get(each.layout), step)
        for each, step in measured.items()
        if each != cell
    }
    estimate = _with_hooks(cell, job, layouts, computes) or _compute(cell, layouts, computes)
    if estimate is None:
        return None
    compute, basis = estimate
    line = replay(job.events(cell), layouts.networks.get(cell.layout), compute)
    moved = job.traffic(cell)
    return Prediction(line.seconds, compute, line.exposed, moved.sent, len(moved.calls), basis)


def _with_hooks(cell: Cell, job: Job, layouts: Layouts, computes: Mapping[Cell, float]) -> tuple[float, str] | None:
    """The time that ``cell`` computes, where the probe tells what hooks cost; None where it does not matter or tell."""
    probed = {
        each: layouts.hooks[each.layout].seconds(*job.counts(each))
        for each in {cell, *computes}
        if each.stage == 3 and each.layout in layouts.hooks
    }
    plain = {each: seconds for each, seconds in computes.items() if each.stage < 3}
    if cell.stage < 3 and plain:
        return _compute(cell, layouts, plain)
    # Stage 3 without its hooks is as good as stage 2, where that was not measured.
    bare = plain or {
        Cell(each.layout, 2): max(0.0, seconds - probed[each]) for each, seconds in computes.items() if each in probed
    }
    if not bare or (cell.stage == 3 and cell not in probed):
        return None
    estimate = _of_stage_2(cell, layouts, bare)
    if estimate is None:
        return None
    compute, basis = estimate
    if not plain:
        sources = " and ".join(str(each) for each in sorted(computes) if each in probed)
        basis = f"{sources} less communication and less hooks by a probe"
    if cell.stage < 3:
        return compute, basis
    times, witnesses = _times(cell, layouts, computes, plain, probed)
    hooks = times * probed[cell]
    return compute + hooks, f"{basis}, plus {hooks:.3g} s of ZeRO-3's hooks by a probe{witnesses}"


def _of_stage_2(cell: Cell, layouts: Layouts, bare: Mapping[Cell, float]) -> tuple[float, str] | None:
    """What the layout of ``cell`` computes without hooks: measured there, else elsewhere."""
    same_layout = sorted(each for each in bare if each.layout == cell.layout and bare[each] > 0)
    if same_layout:
        less = "" if same_layout[-1].layout == ALONE else " less its communication"
        return bare[same_layout[-1]], f"{same_layout[-1]}{less}"
    return _compute(Cell(cell.layout, 2), layouts, bare)


def _times(
    cell: Cell,
    layouts: Layouts,
    computes: Mapping[Cell, float],
    plain: Mapping[Cell, float],
    probed: Mapping[Cell, float],
) -> tuple[float, str]:
    """How many times the probe's figure other cells of stage 3 really took, and who says so; 1 where none did."""
    ratios = {}
    for each, hooks in probed.items():
        base = _of_stage_2(each, layouts, plain) if each != cell and each in computes and plain else None
        if base is not None and hooks > 0:
            ratios[each] = min(_MOST_TIMES, max(0.0, (computes[each] - base[0]) / hooks))
    if not ratios:
        return 1.0, ""
    times = median(ratios.values())
    return times, f", times {times:.2f} as {' and '.join(map(str, sorted(ratios)))} took of it"


def _compute(cell: Cell, layouts: Layouts, computes: Mapping[Cell, float]) -> tuple[float, str] | None:
    """The best estimate of the time that ``cell`` computes, and what it is based on.

    The same layout tells how ranks share cores, one rank alone under the same stage what that stage costs by itself
    (stage 3 runs hooks around every module); with both, and the pair that links them, nothing has to be assumed.
    """
    alone = Cell(ALONE, cell.stage)
    beside = [each for each in computes if each.layout == cell.layout and computes[each] > 0]
    for each in beside:
        link = Cell(ALONE, each.stage)
        if alone in computes and computes.get(link, 0.0) > 0:
            ratio = computes[alone] / computes[link]
            if cell.stage == 3 and each.stage < 3:
                ratio = max(1.0, ratio)  # hooks only add: less is a disturbed measurement
            return computes[each] * ratio, f"{each} less its communication, times {alone} / {link}"
    if alone in computes:
        return computes[alone] * layouts.contention(cell.layout, ALONE), _shared(alone, cell, layouts)
    if beside:
        return computes[beside[0]], f"{beside[0]} less its communication{_hooks(beside[0], cell)}"
    smallest = min(
        computes, key=lambda each: (each.layout.world, each.layout.nodes, abs(each.stage - cell.stage)), default=None
    )
    if smallest is None:
        return None
    basis = _shared(smallest, cell, layouts) + _hooks(smallest, cell)
    return computes[smallest] * layouts.contention(cell.layout, smallest.layout), basis


def _hooks(source: Cell, cell: Cell) -> str:
    """Text: what such a time leaves out."""
    if cell.stage != 3 or source.stage == 3:
        return ""
    return ", without the cost of stage 3's own hooks (a cell `1x1:z3` before it would measure that)"


def _shared(source: Cell, cell: Cell, layouts: Layouts) -> str:
    ratio = layouts.contention(cell.layout, source.layout)
    less = "" if source.layout == ALONE else " less its communication"
    return f"{source}{less}, times {ratio:.2f} as ranks of {cell.layout} compute at the same time"
