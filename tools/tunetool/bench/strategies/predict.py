"""Predicts the time of a step: computation from measured cells, communication from the network. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tunetool.advise.communication import Backend, Module, Traffic, Zero
from tunetool.advise.zero_steps import Event, Wait, Work, events, traffic
from tunetool.bench.strategies.link import Network
from tunetool.bench.strategies.matrix import ALONE, Cell, Layout

_HALVINGS = 60


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


@dataclass(frozen=True)
class Layouts:
    """The measurements of each layout before any cell was run."""

    networks: Mapping[Layout, Network]
    """Networks by layout, without that of one rank."""
    work: Mapping[Layout, float]
    """Seconds of the same small computation on all ranks at the same time: ranks that share cores slow each other."""

    def contention(self, layout: Layout, against: Layout) -> float:
        """Factor by which computation takes longer on that layout."""
        return self.work[layout] / self.work[against]


@dataclass(frozen=True)
class Timeline:
    """One step, in seconds."""

    seconds: float
    communication: float
    """Seconds with a collective in progress, whether a rank waits for it or not."""
    exposed: float
    """Seconds in which the rank only waits."""


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


def replay(events: Sequence[Event], network: Network | None, compute: float) -> Timeline:
    """Replay a step: collectives run one after another, each not before it is requested; work in its order.

    ``compute`` seconds are shared out by the work's elements. ``network`` is None for one rank, which asks for nothing.
    """
    elements = sum(event.elements for event in events if isinstance(event, Work)) or 1
    now = busy_until = waited = busy = 0.0
    done: dict[int, float] = {}
    for event in events:
        if isinstance(event, Work):
            now += compute * event.elements / elements
        elif isinstance(event, Wait):
            waited += max(0.0, done[event.number] - now)
            now = max(now, done[event.number])
        elif network is not None:
            took = network.behind(event.call) if busy_until > now else network.seconds(event.call)
            busy += took
            busy_until = max(now, busy_until) + took
            done[event.number] = busy_until
    return Timeline(now, busy, waited)


def compute_of(events: Sequence[Event], network: Network | None, step: float) -> float:
    """The compute time with which ``replay`` gives ``step``; 0 where the network alone takes longer."""
    low, high = 0.0, step
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if replay(events, network, middle).seconds > step:
            high = middle
        else:
            low = middle
    return low


def predict(cell: Cell, job: Job, layouts: Layouts, measured: Mapping[Cell, float]) -> Prediction | None:
    """The step of ``cell`` from steps of other cells; None before any was measured."""
    computes = {
        each: compute_of(job.events(each), layouts.networks.get(each.layout), step) for each, step in measured.items()
    }
    estimate = _compute(cell, layouts, computes)
    if estimate is None:
        return None
    compute, basis = estimate
    line = replay(job.events(cell), layouts.networks.get(cell.layout), compute)
    moved = job.traffic(cell)
    return Prediction(line.seconds, compute, line.exposed, moved.sent, len(moved.calls), basis)


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
