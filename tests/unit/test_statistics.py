"""The figures' statistics: the coverage of the intervals is counted."""

from __future__ import annotations

import itertools
import random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunetool.measure.statistics import LOOKS, coverage, drift, estimate, kendall_probability, next_look
from tunetool.verdict import LEVEL

RATES = st.floats(min_value=1.0, max_value=1e12)


def test_all_looks_together_err_at_most_as_often_as_one_may() -> None:
    assert sum(1 - coverage(count, trimmed) for count, trimmed in LOOKS) <= 1 - LEVEL
    assert all(coverage(count, trimmed) >= LEVEL for count, trimmed in LOOKS)


@pytest.mark.parametrize(("count", "trimmed"), [(1, 0), (3, 0), (5, 0), (6, 0), (9, 1), (12, 1)])
def test_coverage_is_what_all_outcomes_say(count: int, trimmed: int) -> None:
    # Each sample lies above or below the true median: of all ways, those whose interval holds it.
    held = sum(trimmed < sum(above) < count - trimmed for above in itertools.product((0, 1), repeat=count))
    assert coverage(count, trimmed) == pytest.approx(max(0, held / 2**count))


def test_coverage_holds_for_skewed_samples() -> None:
    source = random.Random(7)
    truth = 1 / 2**0.5  # median of the square root's distribution below
    rounds = 4000
    held = 0
    for _ in range(rounds):
        interval = estimate([source.random() ** 0.5 for _ in range(6)])
        held += interval.low <= truth <= interval.high
    assert held / rounds == pytest.approx(coverage(6, 0), abs=0.01)


def test_too_few_samples_say_so() -> None:
    interval = estimate([3.0, 1.0, 2.0])
    assert (interval.value, interval.low, interval.high, interval.method) == (2.0, 1.0, 3.0, "range of 3 samples")
    assert interval.level == pytest.approx(0.75)
    assert estimate([5.0]).level == 0


def test_one_outlier_among_twelve_does_not_widen_the_interval() -> None:
    interval = estimate([1.0, *[10.0 + step / 10 for step in range(11)]])
    assert interval.low == 10.0
    assert interval.method == "order statistics 2 and 11 of 12 samples"
    assert interval.level >= LEVEL


@given(st.lists(RATES, min_size=1, max_size=20))
def test_the_interval_holds_the_median_and_is_made_of_samples(samples: list[float]) -> None:
    interval = estimate(samples)
    assert interval.low <= interval.value <= interval.high
    assert interval.value == median(samples)
    assert {interval.low, interval.high} <= set(samples)


def test_looks_come_to_an_end() -> None:
    looks, count = [], 0
    while (step := next_look(count)) is not None:
        looks.append(step)
        count = step
    assert looks == [count for count, _ in LOOKS]


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6])
def test_kendall_probability_is_what_all_orders_say(count: int) -> None:
    scores = []
    for order in itertools.permutations(range(count)):
        pairs = itertools.combinations(order, 2)
        scores.append(sum(1 if first < second else -1 for first, second in pairs))
    for score in set(scores):
        share = sum(abs(each) >= abs(score) for each in scores) / len(scores)
        assert kendall_probability(count, score) == pytest.approx(share)


def test_a_cache_that_fills_up_is_a_falling_trend() -> None:
    times = [5.0 * index for index in range(6)]
    trend = drift(times, [10e9, 9e9, 8e9, 7e9, 6e9, 5e9])
    assert trend.significant
    assert trend.slope_per_second == pytest.approx(-0.2e9)
    assert trend.change == pytest.approx(-5 / 7.5)


def test_noise_is_seldom_a_trend() -> None:
    source = random.Random(11)
    times = [float(index) for index in range(6)]
    rounds = 3000
    significant = sum(drift(times, [source.gauss(100, 5) for _ in times]).significant for _ in range(rounds))
    assert significant / rounds < 0.01


def test_one_sample_has_no_trend() -> None:
    assert not drift([0.0], [1.0]).significant
    assert drift([0.0, 1.0], [3.0, 3.0]).slope_per_second == 0
