"""Parsing and formatting of sizes and bandwidths."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunetool.node.units import UnitError, format_bandwidth, format_figure, format_size, parse_bandwidth, parse_size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("50GBps", 50e9),
        ("50GB/s", 50e9),
        ("46.6GiB/s", 46.6 * 2**30),
        ("1.5TBps", 1.5e12),
        ("100MBps", 1e8),
        ("7B/s", 7),
    ],
)
def test_bandwidth(text: str, expected: float) -> None:
    assert parse_bandwidth(text) == pytest.approx(expected)


@pytest.mark.parametrize(
    "text", ["banana", "50", "50Gbps", "50Gb/s", "50gbps", "-5GBps", "0GBps", "", "50GB", "5 0GBps", "nanGBps"]
)
def test_bandwidth_refused(text: str) -> None:
    with pytest.raises(UnitError) as caught:
        parse_bandwidth(text)
    assert caught.value.hint


def test_bits_are_named_with_both_readings() -> None:
    with pytest.raises(UnitError) as caught:
        parse_bandwidth("50Gbps")
    assert caught.value.hint == "bits; did you mean `6.25GBps` or `50GBps`?"


@pytest.mark.parametrize(
    ("text", "expected"), [("3.84TB", 3_840_000_000_000), ("4GiB", 2**32), ("512B", 512), ("0", 0), ("1 MiB", 2**20)]
)
def test_size(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["4096", "-4GiB", "4Gb", "4gib", "", "TB"])
def test_size_refused(text: str) -> None:
    with pytest.raises(UnitError):
        parse_size(text)


@given(st.integers(min_value=1, max_value=10**17), st.sampled_from(["B", "kB", "MB", "GB", "KiB", "MiB", "GiB"]))
def test_a_size_and_its_bandwidth_agree(number: int, unit: str) -> None:
    assert parse_bandwidth(f"{number}{unit}/s") == pytest.approx(parse_size(f"{number}{unit}"))


def test_formats() -> None:
    assert format_size(3_840_755_982_336) == "3.841 TB"
    assert format_bandwidth(50e9) == "50 GB/s (46.57 GiB/s)"


def test_a_figure_is_shown_in_its_own_unit() -> None:
    assert format_figure(7.5369, "1") == "7.54"
    assert format_figure(2e9, "B/s") == format_bandwidth(2e9)
