"""Which experts each step wants: traces by seed, and what a cache is expected to hold of them. Pure."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from tunetool.bench.experts.cache import ExpertCache

Pattern = Literal["uniform", "zipf"]
PATTERNS: tuple[Pattern, ...] = ("uniform", "zipf")

_TRIES = 4
"""Draws for each expert of a step, before the rest is drawn by a race, which takes longer and always ends."""
_WARM_PASSES, _LONG_PASSES = 8, 100
"""How often each expert is wanted, on average, before a cache counts as warm, and in the trace of an expected rate."""


@dataclass(frozen=True)
class Demand:
    """How the router chooses ``top_k`` different ones of ``experts``, step by step, each step by itself.

    ``uniform``: every set is equally likely. ``zipf``: one after the other without putting back, the expert of rank r
    with a weight of 1 / r to the power of ``exponent``; ``seed`` decides which expert has which rank.
    """

    pattern: Pattern
    experts: int
    top_k: int
    seed: int = 0
    exponent: float = 1.0

    def steps(self, *key: object) -> Iterator[list[int]]:
        """The trace of ``key``, such as the number of a round, without an end."""
        drawn = self._random(self.pattern, *key)
        if self.pattern == "uniform":
            while True:
                yield drawn.sample(range(self.experts), self.top_k)
        weights = self.weights()
        bounds = list(itertools.accumulate(weights))
        while True:
            yield _without_putting_back(drawn, weights, bounds, self.top_k)

    def weights(self) -> list[float]:
        """By expert."""
        ranks = list(range(1, self.experts + 1))
        self._random("ranks").shuffle(ranks)
        return [rank**-self.exponent for rank in ranks]

    def warm_cache(self, slots: int, *key: object) -> ExpertCache:
        """A cache as a long run leaves it: filled, and in the order of use."""
        cache = ExpertCache(slots)
        for wanted in itertools.islice(self.steps("warm", *key), self._passes(_WARM_PASSES)):
            cache.take(wanted)
        rest = list(range(self.experts))
        self._random("rest", *key).shuffle(rest)
        cache.fill(rest)
        return cache

    def expected_hit_rate(self, slots: int) -> float:
        """The share of wanted experts that a warm LRU cache of so many slots holds.

        Uniform: exactly ``slots`` / ``experts``, whatever ``top_k`` is. The set that a step wants does not depend on
        what the cache holds, and by symmetry it is equally likely to hold any ``slots`` experts. Zipf: counted over a
        long trace, which is not one of the measured ones.
        """
        if not slots or self.pattern == "uniform":
            return slots / self.experts
        cache, hits = self.warm_cache(slots, "expected"), 0
        count = self._passes(_LONG_PASSES)
        for wanted in itertools.islice(self.steps("expected"), count):
            hits += sum(access.is_hit for access in cache.take(wanted))
        return hits / (count * self.top_k)

    def _passes(self, passes: int) -> int:
        return math.ceil(passes * self.experts / self.top_k)

    def _random(self, *key: object) -> random.Random:
        return random.Random("/".join(map(str, (self.seed, *key))))  # noqa: S311  (a trace, no secret)


def _without_putting_back(
    drawn: random.Random, weights: Sequence[float], bounds: Sequence[float], count: int
) -> list[int]:
    """``count`` different numbers, each drawn by its weight among those that are left.

    Drawing again what was drawn already changes nothing about the next one. Where that takes too long, a race decides:
    exponential times with the weights as rates end in the same order (Efraimidis and Spirakis, Information Processing
    Letters 97, 2006).
    """
    chosen: dict[int, None] = {}
    for number in drawn.choices(range(len(weights)), cum_weights=bounds, k=_TRIES * count):
        chosen.setdefault(number)
        if len(chosen) == count:
            return list(chosen)
    rest = [number for number in range(len(weights)) if number not in chosen]
    times = {number: drawn.expovariate(weights[number]) for number in rest}
    return [*chosen, *sorted(rest, key=times.__getitem__)[: count - len(chosen)]]
