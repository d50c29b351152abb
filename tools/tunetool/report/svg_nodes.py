"""One figure of many nodes as a picture: a dot for each, the slowest on the left, and the median. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from tunetool.view.points import Level, Point, points
from tunetool.view.text import number

_GOOD, _BAD = "#1f6feb", "#cf222e"
_NAMED = 5


@dataclass(frozen=True)
class Dot:
    """One node's figure; a node that is bad in any way has another colour and a larger dot."""

    name: str
    value: float
    bad: bool


def dots(title: str, given: Sequence[Dot]) -> str:
    """The picture; ``given`` is not empty, and its values are in the unit of ``title``."""
    ordered = sorted(given, key=lambda dot: (dot.value, dot.name))
    middle = median(dot.value for dot in ordered)
    bad = [dot for dot in ordered if dot.bad]
    named = "; ".join(f"{dot.name} {number(dot.value)}" for dot in ordered[:_NAMED])
    said = f"{title}: {len(ordered)} nodes, median {number(middle)}, the slowest: {named}; {len(bad)} marked"
    drawn = [
        Point(dot.name, dot.value, dot.value, dot.value, _BAD if dot.bad else _GOOD, 4 if dot.bad else 2.5)
        for dot in ordered
    ]
    return points(title, said, drawn, [Level("", middle)], f"the slowest node first; dashed: median {number(middle)}")
