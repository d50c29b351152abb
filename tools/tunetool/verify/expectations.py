"""Reads ``--expect``."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tunetool.errors import UsageProblem
from tunetool.measure.metrics import EXPECTABLE
from tunetool.node.units import UnitError, parse_bandwidth, parse_rate


def parse_expectations(texts: Sequence[str]) -> dict[str, float]:
    """By word of ``--expect``, bytes or requests per second. A bare rate means `read`.

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
        expected[name] = _rate(rate, EXPECTABLE[name].unit)
    return expected


def _rate(text: str, unit: str) -> float:
    try:
        value = parse_rate(text) if unit == "1/s" else parse_bandwidth(text)
    except UnitError as error:
        raise UsageProblem(error.message, error.hint) from None
    if not math.isfinite(value):
        raise UsageProblem(f"`{text[:20]}` is too large", "expect a bandwidth such as `50GBps`")
    return value
