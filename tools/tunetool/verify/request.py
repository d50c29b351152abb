"""The request of a verification, and the expectations that it or a manifest names."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tunetool.measure.gds.spec import Mode
from tunetool.measure.metrics import EXPECTABLE
from tunetool.measure.session import Run
from tunetool.record import Expectation
from tunetool.training_python import TrainingPython

Level = Literal["config", "quick", "full"]

FIGURES = {
    "B/s": ("bandwidth", "ceiling"),
    "s": ("service_time",),
    "1/s": ("rate",),
}
"""Figures of its records, by unit."""


@dataclass(frozen=True, kw_only=True)
class Demands:
    """What is demanded of a node, and how it is measured: the same here and on many hosts."""

    expect: Mapping[str, float] = field(default_factory=dict)
    """By word of ``--expect``, bytes or requests per second; empty: the manifest's."""
    duration: float = 4.0
    """Seconds of one sample."""
    tolerance: float = 0.0
    """Fraction of an expectation that may be missing."""
    level: Level = "quick"
    require: Sequence[str] = ()
    """Rungs that a pass needs."""
    gds: Mode | None = None
    """Whether GPUDirect Storage is to be proven; None: where the manifest says that it was set up."""


@dataclass(frozen=True)
class Request(Demands):
    """The options of the call."""

    target: Path | None = None
    manifest: Path | None = None
    """None: the node's own, if there is one."""
    python: Path = Path(sys.executable)
    """Whose torch and DeepSpeed the upper rungs use."""
    chosen: TrainingPython | None = None
    """How that Python was chosen, or why there is none."""
    run: Run = field(default_factory=Run)


def expectations_of(wanted: Mapping[str, float | str], source: str) -> list[Expectation]:
    """What is ``wanted``, by word of ``--expect``, of each measurement that is to be judged."""
    return [
        Expectation(name=metric.name, value=float(wanted[word]), unit=metric.unit, source=source)
        for word, metric in EXPECTABLE.items()
        if word in wanted
    ]
