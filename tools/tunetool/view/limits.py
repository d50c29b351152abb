"""What limits a figure, as far as its record shows it. Pure."""

from __future__ import annotations

from tunetool.record import Measurement, Record, chosen
from tunetool.verdict import tester_limit

_NEAR = 0.9
"""From this share of the links' ceiling on, the links are what limits."""


def ceiling_of(record: Record) -> float | None:
    """What the drives' links carry; None where the record does not say."""
    return next((each.value for each in chosen(record.measurements, "ceiling")), None)


def what_limits(figure: Measurement, ceiling: float | None) -> str | None:
    """The program that measured, or the drives' links; None where neither was near its limit.

    What exceeds the ceiling does not go through the links: virtual drives state some that nothing uses.
    """
    slow_tester = tester_limit(figure)
    if slow_tester is None and ceiling is not None and _NEAR * ceiling <= figure.value <= ceiling:
        return f"the drives' links, {figure.value / ceiling:.0%} of what they carry"
    return slow_tester
