"""The engines of a benchmark, as a record has them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from tunetool.record import CheckResult, Measurement, Record
from tunetool.view.model import Cell
from tunetool.view.text import shown


@dataclass(frozen=True)
class EngineFigures:
    """Its figures by the last part of their names, and its check that all bytes are equal."""

    name: str
    figures: Mapping[str, Measurement]
    check: CheckResult | None = None

    def value(self, figure: str) -> float | None:
        """The median of a figure; None where it was not measured."""
        measurement = self.figures.get(figure)
        return measurement.value if measurement else None

    def shown(self, figure: str, unit: float = 1.0) -> str:
        """The median in units of ``unit``; a dash where it was not measured."""
        return shown(self.value(figure), unit)

    @property
    def is_equal(self) -> bool:
        """Whether everything that it gave was equal to what it was to give."""
        return self.check is not None and self.check.status == "pass"


def engine_checks(record: Record, **labels: str | None) -> dict[str, CheckResult]:
    """The checks of engines that have each of ``labels``, by engine; None: that have no such label."""
    return {
        check.labels["engine"]: check
        for check in record.checks
        if "engine" in check.labels and all(check.labels.get(key) == value for key, value in labels.items())
    }


def without_figures(engines: Iterable[EngineFigures], left_out: Iterable[CheckResult]) -> Iterator[str]:
    """A line for each engine that failed or did not run; ``left_out``: the checks of those without any figure."""
    for engine in engines:
        if engine.check is not None and engine.check.status == "unknown":
            yield f"{engine.name}: failed, {engine.check.found}"
    for check in left_out:
        word = "left out" if check.status == "skip" else "failed"
        yield f"{check.labels['engine']}: {word}, {check.found}"


def counted_by_drives(engines: Iterable[EngineFigures], figure: str, word: str) -> Iterator[str]:
    """A line with the range of what the drives counted for ``figure``; none where no drive counted."""
    proofs = [measurement.evidence for engine in engines if (measurement := engine.figures.get(figure))]
    ratios = [proof.ratio for proof in proofs if proof is not None and proof.ratio is not None]
    if ratios:
        yield f"evidence: block, {word} {min(ratios):.4f} to {max(ratios):.4f} of what the files hold"


def equality(engine: EngineFigures) -> Cell:
    """The cell that says whether everything was equal."""
    return Cell("yes") if engine.is_equal else Cell("NO", mark="fail")
