"""Slow nodes among equal ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tunetool.fleet.outliers import outliers

FLEET = {f"node{number}": 52e9 + number * 1e8 for number in range(16)}


def test_a_slow_node_is_found_though_several_are() -> None:
    slow_nodes = outliers({**FLEET, "slow": 31e9, "slower": 20e9, "slowest": 10e9})
    assert [each.host for each in slow_nodes] == ["slowest", "slower", "slow"]
    assert 52e9 < slow_nodes[0].middle < 54e9


def test_alike_is_alike() -> None:
    assert outliers(FLEET) == []
    assert outliers(dict.fromkeys(FLEET, 50e9)) == []
    # Half a per cent below others that agree to the byte is jitter.
    assert outliers({**dict.fromkeys(FLEET, 50e9), "other": 49.75e9}) == []


def test_a_fast_node_and_a_small_fleet_are_no_matter() -> None:
    assert outliers({**FLEET, "fast": 90e9}) == []
    assert outliers({"a": 50e9, "b": 50e9, "c": 50e9, "d": 1e9}) == []


@given(st.dictionaries(st.text(min_size=1, max_size=3), st.floats(0, 1e12), min_size=5, max_size=30))
def test_never_half_of_a_fleet_and_never_above_the_median(values: dict[str, float]) -> None:
    slow_nodes = outliers(values)
    assert len(slow_nodes) <= len(values) / 2
    assert all(each.value < each.middle for each in slow_nodes)
