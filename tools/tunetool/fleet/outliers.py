"""The slow nodes of a fleet, by median and MAD, which a few bad nodes cannot move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

OUTLIER = "outlier: "
"""Prefix of a reason that does not count for a host's verdict."""

FEWEST = 5
"""Nodes below which a median of deviations says nothing about one of them."""

THRESHOLD = 3.5
"""Modified z-score beyond which a value is an outlier (Iglewicz and Hoaglin, Detect and Handle Outliers, 1993)."""

_TO_SIGMA = 0.6745
"""MAD of a normal distribution in standard deviations: its 75th percentile."""

LEAST_SPREAD = 0.01
"""Least spread, as a share of the median: smaller differences are jitter."""


@dataclass(frozen=True)
class Outlier:
    """A node that is significantly below the others."""

    host: str
    value: float
    middle: float
    """Median over all nodes."""
    score: float
    """Modified z-score: its distance below the median in standard deviations, estimated from the MAD."""


def outliers(values: Mapping[str, float]) -> list[Outlier]:
    """The hosts whose value is too low for their fleet, the worst first; none among fewer than five."""
    if len(values) < FEWEST:
        return []
    middle = median(values.values())
    spread = median(abs(value - middle) for value in values.values())
    sigma = max(spread / _TO_SIGMA, LEAST_SPREAD * abs(middle))
    if not sigma:
        return []
    scored = [Outlier(host, value, middle, (middle - value) / sigma) for host, value in values.items()]
    return sorted((each for each in scored if each.score > THRESHOLD), key=lambda each: (-each.score, each.host))
