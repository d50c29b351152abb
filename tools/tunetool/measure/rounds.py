"""Measuring in rounds: each round measures everything once, in an order drawn anew, and what is compared with a base is
compared in pairs of the same round. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from tunetool.measure.evidence import Counted, Judgement
from tunetool.measure.figure import What, computed
from tunetool.measure.statistics import Estimate, estimate, excludes_one
from tunetool.record import Measurement, Scalar

ItemT = TypeVar("ItemT")


def drawn_order(items: Iterable[ItemT], *key: object) -> list[ItemT]:
    """The order within a round: nothing always finds the machine as the same other left it. The same for the same
    ``key``, such as seed and number of the round."""
    drawn = list(items)
    random.Random("/".join(map(str, key))).shuffle(drawn)  # noqa: S311  (an order, no secret)
    return drawn


@dataclass(frozen=True)
class Transfer:
    """Bytes that an engine moved in one direction in a round, and what the drives counted meanwhile."""

    seconds: float
    """Until the last process was done."""
    bytes: int
    """Of the files or of the tensors, each once."""
    counted: Counted | None = field(default=None, kw_only=True)
    """None where no block device counts, or where none was to be used."""

    @property
    def judgements(self) -> list[Judgement]:
        """``other-io``: something else used the drives, or the engine moves more than its files hold."""
        return [self.counted.judgement] if self.counted is not None else []


@dataclass(frozen=True)
class Ratio:
    """How many times as fast as its base something is, per pair."""

    against: str
    interval: Estimate
    pairs: int

    @property
    def value(self) -> float:
        """Median over the pairs."""
        return self.interval.value

    @property
    def decided(self) -> bool:
        """Whether there are enough pairs and their interval does not contain 1."""
        return excludes_one(self.interval, self.pairs)


def ratio(against: str, theirs: Mapping[int, float], ours: Mapping[int, float]) -> Ratio | None:
    """Ratio from seconds by round: theirs divided by ours. None if no round has both."""
    shared = sorted(theirs.keys() & ours.keys())
    if not shared:
        return None
    return Ratio(against, estimate([theirs[number] / ours[number] for number in shared]), len(shared))


def compared(what: What, to_base: Ratio | None) -> list[Measurement]:
    """The figure of a ratio, which says to what and whether it is decided; none where no round has both."""
    if to_base is None:
        return []
    decision: dict[str, Scalar] = {"against": to_base.against, "decided": to_base.decided, "pairs": to_base.pairs}
    about = replace(what, parameters={**what.parameters, **decision})
    return [computed(about, to_base.value, to_base.interval)]


_CEILINGS = ("fio", "pinned")
"""Of what an engine may reach. How near it comes is a figure; that it is below is no question."""


def undecided(figures: Iterable[Measurement]) -> list[str]:
    """What comparisons of a record do not decide, in words; of two that are compared both ways, once."""
    words: dict[object, str] = {}
    for each in figures:
        against, engine = each.parameters.get("against"), each.labels.get("engine")
        if each.parameters.get("decided") is not False or against in _CEILINGS:
            continue
        others = sorted((key, value) for key, value in each.labels.items() if key != "engine")
        words.setdefault((*others, frozenset((against, engine))), f"{each.name} against `{against}`")
    return list(words.values())
