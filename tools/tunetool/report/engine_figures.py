"""One engine of a benchmark, as a record has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tunetool.record import CheckResult, Measurement


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

    @property
    def is_equal(self) -> bool:
        """Whether everything that it gave was equal to what it was to give."""
        return self.check is not None and self.check.status == "pass"
