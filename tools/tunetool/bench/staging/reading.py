"""Decides from the bytes read whether sharding or the shared page cache narrows the gap. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tunetool.bench.staging.published import EXPLANATION
from tunetool.node.units import format_size

_WHOLE = 0.9
"""Share of the model: a rank that reads more counts as reading all of it (tied embeddings are stored once)."""
_COUNTED = 0.5
"""Share of one rank's bytes that storage must at least have delivered to its node for the count to mean anything."""
_SHARE = 1.25
"""Times an equal share: a rank that reads no more reads its shard (layers do not divide evenly)."""
Finding = Literal["confirmed", "refuted", "partly", "undecided"]


@dataclass(frozen=True)
class Read:
    """Bytes that one rank asked for, and those that storage delivered to it."""

    rank: int
    host: str
    model: int
    model_storage: int
    data: int
    data_storage: int


@dataclass(frozen=True)
class Explanation:
    """The result for the published explanation, and for ours."""

    finding: Finding
    sentence: str
    shared: float | None = None
    """Bytes of the model that storage delivered to a node, for each that its ranks asked for; of the worst node."""


def explain(model_bytes: int, ranks: Sequence[Read]) -> Explanation:
    """Compare ``EXPLANATION`` with what each rank read of a model of ``model_bytes`` from bulk storage."""
    if len(ranks) < 2 or model_bytes <= 0:
        return Explanation("undecided", f'"{EXPLANATION}" is undecided: that needs two ranks')
    most, least = max(read.model for read in ranks), min(read.model for read in ranks)
    share = model_bytes / len(ranks)
    reads = f"each of {len(ranks)} ranks read {_span(least, most)} of the model's {format_size(model_bytes)}"
    finding: Finding
    if least >= _WHOLE * model_bytes:
        finding, verdict = "refuted", "is refuted here: no card reads less"
    elif most <= _SHARE * share:
        finding, verdict = "confirmed", "is confirmed here"
    else:
        finding, verdict = "partly", f"is only partly confirmed here: an equal share would be {format_size(share)}"
    shared = _shared(ranks)
    return Explanation(finding, f'"{EXPLANATION}" {verdict} ({reads}); {_cache(ranks, shared)}', shared)


def _span(least: int, most: int) -> str:
    return format_size(most) if most - least <= 0.01 * most else f"{format_size(least)} to {format_size(most)}"


def _shared(ranks: Sequence[Read]) -> float:
    ratios = []
    for host in {read.host for read in ranks}:
        local_reads = [read for read in ranks if read.host == host]
        asked = sum(read.model for read in local_reads)
        ratios.append(sum(read.model_storage for read in local_reads) / asked if asked else 0.0)
    return max(ratios)


def _cache(ranks: Sequence[Read], shared: float) -> str:
    per_node = {host: [read for read in ranks if read.host == host] for host in {read.host for read in ranks}}
    fullest = max(per_node.values(), key=len)
    asked = sum(read.model for read in fullest)
    delivered = sum(read.model_storage for read in fullest)
    delivery = (
        f"storage delivered {format_size(delivered)} for the {format_size(asked)} that the {len(fullest)} ranks of a "
        "node asked for"
    )
    if delivered < _COUNTED * max(read.model for read in fullest):
        return f"{delivery}: less than one of them read, so the cache was warm or this kernel does not count"
    if len(fullest) < 2:
        return f"{delivery}: no rank shares a page cache with another"
    if shared <= 1.25 / len(fullest):
        return f"{delivery}: each byte came once and the ranks share the page cache, which is what narrows the gap"
    if shared >= _WHOLE:
        return f"{delivery}: the page cache that they share saved nothing"
    return f"{delivery}: the page cache that they share saved {1 - shared:.0%}"
