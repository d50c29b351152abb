"""Numbers and intervals for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tunetool.record import Confidence, Measurement

_SCALES = {
    "B": ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")),
    "B/s": ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "B/s")),
    "MHz": ((1e3, "GHz"), (1.0, "MHz")),
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")),
}


def number(value: float) -> str:
    """At least three significant digits, without an exponent for common sizes: 1234.5, 12.34, 0.123."""
    if value >= 100:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 1 else f"{value:.3g}"


def shown(value: float | None, unit: float = 1.0) -> str:
    """As ``number``, in units of ``unit``; a dash for None."""
    return "-" if value is None else number(value / unit)


def counted(names: Sequence[str]) -> str:
    """As ``8 x NVIDIA H200``."""
    return ", ".join(f"{count} x {name}" for name, count in Counter(names).items())


def quoted(target: str) -> str:
    """What was measured, in backticks; `bench staging` names several paths, and has set its own."""
    return target if "`" in target else f"`{target}`"


def scale(unit: str, greatest: float) -> tuple[float, str]:
    """The factor to divide values by, and the unit to show; an empty unit for plain numbers."""
    for factor, name in _SCALES.get(unit, ()):
        if greatest >= factor:
            return factor, name
    return 1.0, "" if unit == "1" else unit


def format_value(value: float, unit: str) -> str:
    """A figure for people, such as ``1.25 GB/s``."""
    factor, name = scale(unit, abs(value))
    return f"{number(value / factor)} {name}".strip()


def interval_of(figure: Measurement) -> Confidence | None:
    """Its interval; None where it has one sample. Records of earlier versions have that sample at both ends."""
    interval = figure.confidence
    return interval if interval is not None and interval.level != 0 else None


def interval_words(figure: Measurement) -> str:
    """Its interval for people; a dash where it has one sample."""
    interval = interval_of(figure)
    if interval is None:
        return "-"
    factor, shown = scale(figure.unit, max(abs(interval.low), abs(interval.high)))
    return f"{number(interval.low / factor)} to {number(interval.high / factor)} {shown}".strip()
