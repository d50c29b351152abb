"""From samples to a figure: the values that follow from samples, and its description."""

from __future__ import annotations

import pytest

from tunetool.measure.evidence import Counted
from tunetool.measure.figure import Quantity, What, computed, figure, measured, spread_of
from tunetool.measure.fio import Outcome
from tunetool.measure.sequential import Sample
from tunetool.measure.statistics import estimate
from tunetool.node.machine.block_stack import BlockStack, Leaf

RISING = [1.0, 2.0, 3.0, 4.0, 5.0, 9.0]


@pytest.mark.parametrize(
    ("quantity", "unit", "better"),
    [
        ("bandwidth", "B/s", "higher"),
        ("duration", "s", "lower"),
        ("rate", "1/s", "higher"),
        ("latency", "s", "lower"),
        ("memory", "B", "lower"),
        ("ratio", "1", "higher"),
    ],
)
def test_a_quantity_has_a_unit_and_a_direction(quantity: Quantity, unit: str, better: str) -> None:
    made = figure(What("x", quantity, "fio", "disk", "x"), [1.0])
    assert (made.quantity, made.unit, made.better) == (quantity, unit, better)
    assert computed(What("x", quantity, "fio", "disk", "x", better="lower"), 1.0).better == "lower"


def test_samples_decide_value_interval_and_percentiles() -> None:
    latencies = [{"p50": value} for value in RISING]
    made = figure(What("x", "bandwidth", "fio", "disk", "x"), RISING, percentiles=latencies)
    assert (made.value, made.samples) == (3.5, RISING)
    assert made.confidence is not None
    assert (made.confidence.low, made.confidence.high) == (1.0, 9.0)
    assert made.confidence.level == pytest.approx(0.96875)
    assert made.percentiles == {"p50": 3.0}
    assert figure(What("x", "bandwidth", "fio", "disk", "x"), [1.0], percentiles=[{}]).percentiles is None


def test_one_sample_has_no_interval() -> None:
    (single, pair) = (figure(What("x", "bandwidth", "fio", "disk", "x"), values) for values in ([1.25], [1.25, 1.5]))
    assert (single.value, single.samples, single.confidence) == (1.25, [1.25], None)
    assert pair.confidence is not None
    assert (pair.confidence.low, pair.confidence.high, pair.confidence.level) == (1.25, 1.5, 0.5)
    assert computed(What("x", "ratio", "fio", "disk", "x"), 1.25, estimate([1.25])).confidence is None


def test_only_samples_with_a_moment_have_a_trend() -> None:
    assert figure(What("x", "bandwidth", "fio", "disk", "x"), RISING).trend is None
    trend = spread_of(RISING, range(6))["trend"]
    assert (trend.slope_per_second, trend.significant) == (1.0, True)


def test_one_value_has_its_interval_and_no_samples() -> None:
    made = computed(What("x", "ratio", "us", "disk", "x", rank=3, host="n1"), 1.5, estimate([1.0, 2.0]))
    assert made.samples is None
    assert (made.rank, made.host) == (3, "n1")
    assert made.confidence is not None
    assert (made.confidence.low, made.confidence.high) == (1.0, 2.0)
    assert computed(What("x", "ratio", "us", "disk", "x"), 1.5).confidence is None


def test_the_evidence_is_that_of_all_samples() -> None:
    leaf = Leaf("nvme0n1", "nvme", "SER0", True, ("nvme0n1",))
    stack = BlockStack("/m", None, "xfs", "nvme0n1", "9:0", "disk", (leaf,), redundant=False, in_memory=False)
    samples = [Sample(Outcome(100, 1.0, {}, ""), Counted(100, counted, {}), 1.0 * counted) for counted in (90, 100)]
    made = measured(What("x", "bandwidth", "fio", "disk", "x"), stack, samples, [100.0, 100.0])
    assert made.evidence is not None
    assert (made.evidence.kind, made.evidence.device) == ("block", "nvme0n1")
    assert (made.evidence.claimed_bytes, made.evidence.counted_bytes, made.evidence.ratio) == (200, 190, 0.95)
    assert made.trend is not None


def test_a_name_is_made_from_the_figure_and_its_labels() -> None:
    labels = {"state": "cold", "engine": "direct", "drive": "S1"}
    made = computed(What("loading.{state}.{engine}.{figure}", "ratio", "us", "disk", "first", labels), 1.5)
    assert made.name == "loading.cold.direct.first"
    assert (made.figure, made.labels) == ("first", {"subject": "loading", **labels})
