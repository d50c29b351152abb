"""How long a step will take: computation from cells that were measured, communication from the network. Pure."""

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
    """What every cell trains."""

    modules: Sequence[Module]
    settings: Mapping[int, Zero]
    """By stage."""
    element_bytes: int
    backend: Backend

    def events(self, cell: Cell) -> list[Event]:
        """Of one step of it."""
        return list(events(self.modules, self.settings[cell.stage], cell.layout.world, self.element_bytes))

    def traffic(self, cell: Cell) -> Traffic:
        """The collectives of one step of it."""
        return traffic(self.modules, self.settings[cell.stage], cell.layout.world, self.element_bytes, self.backend)


@dataclass(frozen=True)
class Layouts:
    """What was measured of each layout before any cell was run."""

    networks: Mapping[Layout, Network]
    """Not of one rank alone."""
    work: Mapping[Layout, float]
    """Seconds of the same small computation on each rank at once: ranks that share cores get in each other's way."""

    def contention(self, layout: Layout, against: Layout) -> float:
        """How many times as long computation takes there."""
        return self.work[layout] / self.work[against]


@dataclass(frozen=True)
class Timeline:
    """One step, in seconds."""

    seconds: float
    communication: float
    """While a collective is under way, whether anybody waits for it or not."""
    exposed: float
    """While the rank only waits."""


@dataclass(frozen=True)
class Prediction:
    """Made before the cell was run."""

    step: float
    compute: float
    exposed: float
    """Seconds of waiting for the network."""
    sent: float
    """Bytes that each rank sends."""
    collectives: int
    basis: str
    """Where the compute time is from."""


def replay(events: Sequence[Event], network: Network | None, compute: float) -> Timeline:
    """Run through a step: collectives one after another, each no earlier than asked; work as it comes.

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
    """What is missing from such a time."""
    if cell.stage != 3 or source.stage == 3:
        return ""
    return ", without what stage 3's own hooks cost: a cell `1x1:z3` before it would tell"


def _shared(source: Cell, cell: Cell, layouts: Layouts) -> str:
    ratio = layouts.contention(cell.layout, source.layout)
    less = "" if source.layout == ALONE else " less its communication"
    return f"{source}{less}, times {ratio:.2f} as ranks of {cell.layout} compute at once"
