"""What ``--expect`` can name: the measurement, and the unit of what is expected of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from tunetool.errors import UsageProblem
from tunetool.node.units import UnitError, parse_bandwidth, parse_rate

Unit = Literal["B/s", "1/s"]

EXPECTABLE: Mapping[str, tuple[str, Unit]] = {
    "read": ("sequential.read", "B/s"),
    "write": ("sequential.write", "B/s"),
    "randread-4k": ("random.read.4k", "1/s"),
    "randread-64k": ("random.read.64k", "1/s"),
    "randread-1m": ("random.read.1m", "1/s"),
}
"""Requests per second are measured by level full alone."""


def parse_expectations(texts: Sequence[str]) -> dict[str, float]:
    """By key of ``--expect``: bytes per second, or requests per second for random reads. A bare rate means `read`.

    Raises ``UsageProblem``.
    """
    expected: dict[str, float] = {}
    for part in (part.strip() for text in texts for part in text.split(",")):
        name, separator, rate = part.partition("=")
        if not separator:
            name, rate = "read", part
        if name not in EXPECTABLE:
            raise UsageProblem(
                f"`{name}` is not a direction", "expect `read=50GBps`, `write=25GBps` or `randread-4k=5MIOPS`"
            )
        if name in expected:
            raise UsageProblem(
                f"`--expect {part}` gives the {name} twice", "give each once: `read=50GBps,write=25GBps`"
            )
        expected[name] = _rate(rate, EXPECTABLE[name][1])
    return expected


def _rate(text: str, unit: str) -> float:
    try:
        value = parse_rate(text) if unit == "1/s" else parse_bandwidth(text)
    except UnitError as error:
        raise UsageProblem(error.message, error.hint) from None
    if not math.isfinite(value):
        raise UsageProblem(f"`{text[:20]}` is too large", "expect a bandwidth such as `50GBps`")
    return value
