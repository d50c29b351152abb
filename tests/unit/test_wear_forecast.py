"""The forecast of drives' wear, by what they count: honest about what it does not know, and believing no odd answer."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from machines import RECORDED, lay_out
from tunetool.health import results, wear
from tunetool.node.audit.manifest_checks import run_checks
from tunetool.node.common.check_result import Check
from tunetool.node.health import health_units, wear_forecast
from tunetool.node.health.wear_forecast import Sample, Series, add, foretold, in_words, of_spare, of_wear, restored
from tunetool.node.machine.drive_health import Health, parse_health
from tunetool.node.machine.drives import read_drives
from tunetool.node.machine.nvme_admin import Silent

TB = 10**12
MANIFEST = json.loads((RECORDED / "built-manifest.json").read_text())
SERIALS = [member["serial"] for member in MANIFEST["array"]["members"]]
NOW = 1.8e9


def worn(days: int, percent_bytes: float, a_day: float, start: float = 3.0, every: int = 1) -> Series:
    """A drive that wears evenly: ``percent_bytes`` cost a percent, and ``a_day`` are written."""
    series = Series()
    for day in range(0, days + 1, every):
        written = int(start * percent_bytes + day * a_day)
        used = min(255, int(start + day * a_day / percent_bytes))
        series = add(series, Sample(24 * day, written, used, 100, 10))
    return series


RATES = st.floats(0.05, 3.0)
"""Percents a day."""


@given(st.integers(0, 500), RATES, st.floats(1 * TB, 100 * TB), st.floats(0, 90), st.integers(1, 9))
def test_the_true_end_lies_within_the_interval(
    days: int, percents: float, percent: float, start: float, every: int
) -> None:
    series = worn(days, percent, percents * percent, start, every)
    forecast = of_wear(series)
    assume(forecast is not None)
    assert forecast is not None
    assert 0 <= forecast.low <= forecast.months <= forecast.high
    true = max(0.0, 100 - start - days // every * every * percents) / percents / (365.25 / 12)
    assert forecast.low - 0.01 <= true <= forecast.high + 0.01


@given(RATES, st.floats(1.1, 5.0), st.integers(60, 360))
def test_faster_writes_end_a_drive_sooner(percents: float, factor: float, days: int) -> None:
    slow, fast = (of_wear(worn(days, TB, rate * TB)) for rate in (percents, percents * factor))
    assume(slow is not None and fast is not None)
    assert slow is not None
    assert fast is not None
    assert fast.low <= slow.high


SAMPLES = st.builds(
    Sample, st.integers(0, 9999), st.integers(0, 9 * TB), st.integers(0, 255), st.integers(0, 100), st.integers(0, 100)
)


@example([Sample(0, 0, 0, 0, 0), Sample(50, 0, 9, 0, 0), Sample(10, 0, 0, 0, 0), Sample(40, 0, 0, 0, 0)])
@given(st.lists(SAMPLES, max_size=40))
def test_whatever_drives_say_no_forecast_is_negative(said: list[Sample]) -> None:
    series = Series()
    for sample in said:
        series = add(series, sample)
    for earlier, later in zip(series.samples, series.samples[1:], strict=False):
        assert later.hours - earlier.hours >= 24
        assert later.written >= earlier.written
        assert later.used >= earlier.used
    for forecast in (of_wear(series), of_spare(series)):
        assert forecast is None or 0 <= forecast.low <= forecast.high
    assert restored(json.loads(json.dumps({"drives": wear_forecast.as_kept({"S": series})}))) == {"S": series}


@pytest.mark.parametrize(
    "series",
    [
        Series(),
        worn(0, TB, TB),
        worn(6, TB, 0.9 * TB),
        worn(300, 400 * TB, TB),
        worn(300, 250 * TB, TB),
        # Many percents in one gap: any of them may have come at once.
        Series((Sample(0, 0, 3, 100, 10), Sample(900, TB, 9, 100, 10))),
    ],
    ids=["none", "one", "days", "no step", "one step", "one gap"],
)
def test_too_little_data_gives_no_forecast(series: Series) -> None:
    assert of_wear(series) is None
    assert of_spare(series) is None
    (check,) = foretold([Check("drives.wear", "pass", "", "at most 9 % used")], {"S": series})
    assert check.found == "at most 9 % used; how long that will last is not yet known"


def test_the_order_of_drives_changes_nothing() -> None:
    drives = {"S1": worn(90, TB, 0.3 * TB), "S2": worn(90, TB, 0.1 * TB), "S3": worn(9, TB, 0.1 * TB)}
    checks = [Check("drives.wear", "pass", "", "x"), Check("drives.spare", "pass", "", "y")]
    assert foretold(checks, drives) == foretold(checks, dict(reversed(drives.items())))
    assert list(wear.figures(drives)) == list(wear.figures(dict(reversed(drives.items()))))


@pytest.mark.parametrize(
    ("series", "words"),
    [
        # 0.2 % a day, 21 % used after 90 days: 395 days.
        (worn(90, TB, 0.2 * TB), "x; `S`: at this rate 100 % in 13 months"),
        # 0.5 % a day: 104 days.
        (worn(90, TB, 0.5 * TB), "x; `S`: at this rate 100 % in 3 months, below 6: plan to replace it"),
        (worn(24, TB, 0.09 * TB, every=3), "x; `S`: at this rate 100 % in 28 to 47 months"),
        (worn(360, 20 * TB, 0.2 * TB), "x; `S`: at this rate 100 % in more than 10 years"),
    ],
)
def test_a_forecast_in_words(series: Series, words: str) -> None:
    (check,) = foretold([Check("drives.wear", "pass", "", "x")], {"S": series})
    assert (check.status, check.found) == ("pass", words)


def test_a_drive_that_stands_idle_has_no_end() -> None:
    series = worn(90, TB, 0.3 * TB)
    last = series.samples[-1]
    for day in range(40):
        series = add(series, replace(last, hours=last.hours + 24 * (day + 1)))
    forecast = of_wear(series)
    assert forecast is not None
    assert math.isinf(forecast.months)
    assert in_words(forecast) == "in more than 10 years"
    assert [name for name, *_ in wear.figures({"S": series})] == ["drive_samples"]


def test_spare_blocks_end_at_the_drives_own_threshold() -> None:
    series = Series()
    for day in range(60):
        series = add(series, Sample(24 * day, day * TB, 3, 90 - day // 3, 10))
    forecast = of_spare(series)
    assert forecast is not None
    # 71 % after 57 days and 3 days a percent: 61 more.
    assert forecast.low <= 61 * 3 / (365.25 / 12) <= forecast.high
    (check,) = foretold([Check("drives.spare", "pass", "", "8 drives")], {"S": series})
    assert check.found == (
        "8 drives; `S`: at this rate its spare is at the threshold in 6 months, below 6: plan to replace it"
    )


def test_one_odd_answer_is_not_believed() -> None:
    series = worn(90, TB, 0.2 * TB)
    last = series.samples[-1]
    after = replace(last, hours=last.hours + 24)
    for odd in (
        replace(after, written=0),
        replace(after, used=0),
        replace(after, hours=1),
        replace(after, written=1 << 61),
        replace(after, written=1 << 70),
    ):
        assert add(series, odd).samples == series.samples, odd
        assert add(add(series, odd), after).samples == (*series.samples, after), odd


def test_counters_that_were_reset_begin_anew() -> None:
    series = worn(90, TB, 0.2 * TB)
    anew = [Sample(5, 0, 0, 100, 10), Sample(29, TB, 0, 100, 10), Sample(53, 2 * TB, 0, 100, 10)]
    for sample in anew:
        series = add(series, sample)
    assert tuple(series.samples) == tuple(anew)
    # One that ran ahead is taken back by the second one that does not follow it.
    series = worn(90, TB, 0.2 * TB)
    last = series.samples[-1]
    ahead = add(series, replace(last, hours=last.hours + 24, used=255))
    for day in (2, 3):
        ahead = add(ahead, replace(last, hours=last.hours + 24 * day))
    assert [each.used for each in ahead.samples[-3:]] == [last.used] * 3


def test_a_year_is_kept_and_a_sample_a_day() -> None:
    series = worn(500, TB, 0.01 * TB)
    assert len(series.samples) == wear_forecast.KEPT
    assert series.samples[-1].hours == 24 * 500
    assert add(series, replace(series.samples[-1], hours=24 * 500 + 23)) == series


@pytest.mark.parametrize(
    "text",
    ["{", "3", '{"drives": 3}', '{"drives": {"S": {"samples": [[1]], "doubted": null}}}', '{"drives": {"S": 1}}'],
)
def test_a_file_that_somebody_edited_is_none(tmp_path: Path, text: str) -> None:
    path = results.Files(tmp_path).wear
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert wear_forecast.read(str(tmp_path)) == {}


def test_the_counters_stand_where_the_specification_puts_them() -> None:
    log = bytearray(512)
    log[48:64] = (7).to_bytes(16, "little")
    log[128:144] = (2**33).to_bytes(16, "little")
    assert parse_health(bytes(log)).written_bytes == 7 * 512_000
    assert parse_health(bytes(log)).power_on_hours == 2**33


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> results.Files:
    """A recorded node whose drives write 1 TB a day, which costs them 0.2 %; LAB1NV2 is silent."""
    lay_out("built", tmp_path)
    names = {drive.controller: drive.serial for drive in read_drives(str(tmp_path))}

    def said(controller: str) -> Health:
        if names[controller] == "LAB1NV2":
            raise Silent("controller state `resetting`")
        day = int((tmp_path / "day").read_text())
        return Health(0, 40, 100, 10, day // 5, 0, 0, 0, 0, 70, day * TB, 24 * day)

    monkeypatch.setattr(wear, "read_health", said)
    return results.Files(tmp_path)


def kept(node: results.Files, day: int, clock: float, manifest: dict[str, Any] | None = MANIFEST) -> dict[str, Series]:
    (node.root / "day").write_text(str(day))
    return dict(wear.keep(node, manifest, [Check("drives.wear", "pass", "", "")], NOW + 86400 * clock))


def test_the_check_keeps_a_sample_a_day_whatever_the_clock(node: results.Files) -> None:
    for day in range(60):
        # The node's clock is a year ahead for a while.
        clock = day + 365 if 20 <= day < 40 else day
        kept(node, day, clock)
        drives = kept(node, day, clock + 0.5)
    assert set(drives) == set(SERIALS) - {"LAB1NV2"}
    assert {len(series.samples) for series in drives.values()} == {60}
    assert wear_forecast.read(str(node.root)) == drives
    forecast = of_wear(drives[SERIALS[-1]])
    assert forecast is not None
    assert forecast.low <= (500 - 59) / (365.25 / 12) <= forecast.high
    assert not kept(node, 60, 60, {**MANIFEST, "array": None})


def test_a_drive_that_was_replaced_is_forgotten(node: results.Files) -> None:
    kept(node, 1, 1)
    members = [
        {**each, "serial": "NEW" if each["serial"] == "LAB1NV3" else each["serial"]}
        for each in MANIFEST["array"]["members"]
    ]
    drives = kept(node, 2, 2, {**MANIFEST, "array": {**MANIFEST["array"], "members": members}})
    assert "LAB1NV3" not in drives
    assert "LAB1NV3" not in node.wear.read_text()
    assert len(drives["LAB1NV4"].samples) == 2


def test_verify_and_the_check_tell_the_forecast(node: results.Files) -> None:
    for day in range(60):
        kept(node, day, day)
    well = Health(0, 40, 100, 10, 3, 0, 0, 0, 0, 70)
    checks = {each.id: each for each in run_checks(MANIFEST, str(node.root), health=lambda _: well)}
    first = min(set(SERIALS) - {"LAB1NV2"})
    assert checks["drives.wear"].found == f"at most 3 % used; `{first}`: at this rate 100 % in 14 months"
    # The words of a failure stay.
    ended = replace(well, used_percent=100)
    checks = {each.id: each for each in run_checks(MANIFEST, str(node.root), health=lambda _: ended)}
    assert checks["drives.wear"].found.startswith("`LAB1NV")
    assert "rate" not in checks["drives.wear"].found
    node.checked.parent.mkdir(parents=True)
    assert str(node.wear) in health_units.stale_results(False, True, str(node.root))


def test_the_months_are_in_the_metrics() -> None:
    figures = list(wear.figures({"S": worn(90, TB, 0.2 * TB)}))
    months = {name: value for name, _, labels, value in figures if labels.get("end") == "wear"}
    assert [value for name, _, _, value in figures if name == "drive_samples"] == [91]
    assert months["drive_months_left_low"] <= months["drive_months_left"] <= months["drive_months_left_high"]
