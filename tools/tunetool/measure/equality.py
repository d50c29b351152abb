"""The verdict of benchmarks that compare engines: whether each gave the right bytes is judged, not its speed. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tunetool.record import CheckResult, Measurement
from tunetool.verdict import Case


@dataclass(frozen=True)
class Compared:
    """The check of one engine, with the verdict's sentence where its bytes differ or it could not be measured."""

    check: CheckResult
    differs: str | None = None
    failed: str | None = None


@dataclass(frozen=True)
class Part:
    """All engines on one medium, or in one state of the files."""

    measurements: Sequence[Measurement]
    engines: Sequence[Compared]
    doubts: Sequence[str]
    """Why its figures prove nothing."""
    errors: Sequence[str] = ()


def case(parts: Sequence[Part], doubts: Sequence[str]) -> Case:
    """The case for the verdict; ``doubts`` are those of every part."""
    engines = [engine for part in parts for engine in part.engines]
    return Case(
        measurements=[measurement for part in parts for measurement in part.measurements],
        checks=[engine.check for engine in engines],
        words={engine.check.id: [engine.differs] for engine in engines if engine.differs},
        failed={engine.check.id: engine.failed for engine in engines if engine.failed},
        errors=[error for part in parts for error in part.errors],
        doubts=[*doubts, *(line for part in parts for line in part.doubts)],
        judged="checks",
    )
