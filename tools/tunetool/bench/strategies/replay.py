"""Replays the events of a step: how long it takes with a network, and how much of it is computation. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tunetool.advise.zero_steps import Ask, Event, Wait, Work
from tunetool.bench.strategies.link import Network

_HALVINGS = 60


@dataclass(frozen=True)
class Timeline:
    """One step, in seconds."""

    seconds: float
    communication: float
    """Seconds with a collective in progress, whether a rank waits for it or not."""
    exposed: float
    """Seconds in which the rank only waits."""


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


def gathers(events_of_step: Sequence[Event]) -> int:
    """Number of all-gathers among the events of a step."""
    return sum(isinstance(event, Ask) and event.call.kind == "all_gather" for event in events_of_step)
