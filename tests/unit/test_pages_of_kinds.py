"""The pages of `tune`, `stage` and `bench ds-io`: what limits, the pictures, and what is held against what."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

import staged
from parsed_page import Parsed, limits_of, pictures
from shown_records import FEW, GB, handled, node, tuned, verified
from shown_records import staged as copied
from tunetool import record as records
from tunetool.record import Record, chosen
from tunetool.report.kinds import page_text, write_any_page, write_page
from tunetool.tune.outcome import GAIN
from tunetool.tune.settings import DEFAULTS, SWEEP, AioSettings, settings_of
from tunetool.verdict import TESTER_CPU_SHARE
from tunetool.view.points import Level, Point, points


def circles(picture: ElementTree.Element) -> list[ElementTree.Element]:
    return [each for each in picture if each.tag.endswith("circle")]


def test_the_search_is_a_picture_of_every_setting() -> None:
    text = page_text(tuned(), None)
    gains, read, write = pictures(text)
    assert gains.attrib["aria-label"].startswith("times the speed of DeepSpeed's default")
    for picture in (read, write):
        dots = circles(picture)
        assert len(dots) == len(settings_of(SWEEP))
        heights = [float(each.attrib["cy"]) for each in dots]
        assert heights == sorted(heights), "the fastest first"
        assert len({each.attrib["fill"] for each in dots}) == 3
        large = [each for each in dots if float(each.attrib["r"]) > 4]
        assert len(large) == 2, "the chosen one and the default"
        for words in (
            "65 settings tried: fastest 8 MiB x 128 x 8",
            "chosen: 8 MiB x 128 x 8",
            "links' ceiling 63.00",
        ):
            assert words in picture.attrib["aria-label"]
    texts = "".join(read.itertext())
    assert "chosen: 8 MiB x 128 x 8" in texts
    assert "default 12" in texts
    assert "DeepSpeed&#39;s default settings: 8 MiB x 128 x 8" in limits_of(text)
    assert [row.split()[:2] for row in Parsed(text).rows if " chosen " in row and "GB/s" in row] == [["8", "MiB"]]
    assert len(text) < 200_000


def test_a_kept_default_is_no_limit() -> None:
    text = page_text(tuned(DEFAULTS, AioSettings(2**20, 8, 1, single_submit=True, overlap_events=True)), None)
    assert "not the settings for the goal mix: of 2 that were tried, none is faster" in limits_of(text)
    assert "DeepSpeed's default, kept" in pictures(text)[1].attrib["aria-label"]


def test_a_default_kept_for_one_goal_says_nothing_of_others() -> None:
    record = tuned()
    *others, written = chosen(record.measurements, GAIN)
    assert all(each.parameters["significant"] for each in others)
    kept = written.model_copy(update={"parameters": {**written.parameters, "significant": False}})
    changed = [kept if each is written else each for each in record.measurements]
    text = limits_of(page_text(record.model_copy(update={"measurements": changed}), None))
    goal = written.parameters["goal"]
    assert f"not the settings for the goal {goal}: of 65 that were tried, none is faster" in text


def test_a_busy_program_or_full_links_limit_the_chosen_settings() -> None:
    record = tuned(DEFAULTS, *FEW)
    busy = [
        each.model_copy(update={"parameters": {**each.parameters, TESTER_CPU_SHARE: 0.97}})
        if each.name.startswith("tune.read.")
        else each.model_copy(update={"value": 25 * GB})
        if each.name == "ceiling.link"
        else each
        for each in record.measurements
    ]
    limits = limits_of(page_text(record.model_copy(update={"measurements": busy}), None))
    assert "read: " in limits
    assert "kept 97% of the cores busy" in limits
    assert "write: the drives&#39; links, 9" in limits


def test_a_search_that_did_not_end_shows_what_it_tried() -> None:
    record = tuned(DEFAULTS, *FEW)
    half = [each for each in record.measurements if each.name.startswith("tune.read.")]
    text = page_text(record.model_copy(update={"measurements": half}), None)
    assert len(pictures(text)) == 1
    assert "What limits" not in text
    assert "The block" not in text
    assert "<svg" not in page_text(record.model_copy(update={"measurements": []}), None)


def test_a_large_space_is_cut_where_nothing_is_lost() -> None:
    record = tuned(DEFAULTS, *FEW)
    first = {each.parameters["direction"]: each for each in record.measurements if "direction" in each.parameters}
    many = [AioSettings(2**20, depth, 1, False, True) for depth in range(1, 602)]
    tried = [
        side.model_copy(update={"value": each.queue_depth * 1e8, "parameters": {**side.parameters, **each.block()}})
        for each in many
        for side in first.values()
    ]
    text = page_text(record.model_copy(update={"measurements": tried}), None)
    for picture in pictures(text):
        assert len(circles(picture)) == 201, "the fastest, and the default"
        assert "400 slower ones are not drawn" in picture.attrib["aria-label"]
    assert "401 slower ones are in the record" in text
    assert len(text.encode()) < 300_000


def test_a_copy_beside_its_source_and_its_destination() -> None:
    text = page_text(copied(), None)
    assert "binds: source (reading the source took most of the time)" in limits_of(text)
    (picture,) = pictures(text)
    boxes = [float(each.attrib["width"]) for each in picture if each.tag.endswith("rect")][1:]
    # The copy's speed by the share of the threads' time that the part took.
    assert boxes[1] / boxes[0] == pytest.approx((261.3 + 1.9 + 8.4) / 261.3, rel=0.1)
    assert boxes[2] / boxes[0] == pytest.approx((261.3 + 1.9 + 8.4) / 8.4, rel=0.1)
    assert "source, reading: binds 1.81; destination, writing 56.2" in picture.attrib["aria-label"]
    assert "16,381,516,776 bytes" in text
    assert "<code>/srv/models/qwen</code> (nfs4) to tmpfs" in text


def test_what_rclone_fetched_has_no_parts() -> None:
    text = page_text(copied(source="s3:models", source_medium="remote"), None)
    assert "binds: source (rclone fetched it)" in text
    assert pictures(text)[0].attrib["aria-label"].endswith("the copy 1.74")
    assert "alone, GB/s" not in text


def test_a_real_copy_its_verification_and_its_removal_have_pages(tmp_path: Path) -> None:
    source, runs = tmp_path / "source", tmp_path / "runs"
    (source / "inner").mkdir(parents=True)
    (source / "inner/a").write_bytes(bytes(3 * 2**20))
    (source / "b").write_text("b")
    done = [staged.stage(source, tmp_path / "copy", runs), staged.verify(tmp_path / "copy", runs)]
    done.append(staged.evict(tmp_path / "copy", runs))
    texts = []
    for each in done:
        assert each.record is not None
        assert each.path is not None
        assert write_page(each.record, each.path) is None, "a copy may take less time than its page"
        texts.append(write_any_page(each.record, each.path).read_text())
    copy, verification, removal = texts
    assert "What limits" in copy
    assert "in 2 files" in copy
    assert "reads the copy again" in copy
    assert "stage.content" in verification
    assert "destination, writing" not in verification
    assert "<svg" not in removal
    assert "stage.evicted" in removal


def test_the_handle_is_held_against_fio_and_its_other_runs(tmp_path: Path) -> None:
    elsewhere = handled(2, 1, 99).model_copy(update={"node": node("other")})
    other_storage = [each.model_copy(update={"medium": "disk"}) for each in handled(4, 1).measurements]
    kept: list[Record] = [handled(128, 8, 24.0), handled(64, 4, 30.0, "read"), verified(slow=7.0), elsewhere]
    for each in [*kept, handled(4, 1, 88).model_copy(update={"measurements": other_storage})]:
        records.write(each, tmp_path)
    without = [each.model_copy(update={"parameters": {"direction": "read"}}) for each in handled(6, 1).measurements]
    records.write(handled(6, 1).model_copy(update={"measurements": without}), tmp_path)
    damaged = tmp_path / "20270101T000000Z-bench.ds-io-node1"
    damaged.mkdir()
    (damaged / "record.json").write_text("{")
    shown = handled()
    text = write_any_page(shown, records.write(shown, tmp_path)).read_text()
    read, write = (each.attrib["aria-label"] for each in pictures(text))
    assert re.findall(r"(?:: |; )(\S+)", write.partition("interval)")[2]) == ["fio,", "this", "1", "this", "1", "1"]
    assert "fio, in `verify` 53.9" in read
    assert "1 MiB x 64 x 4 29." in read
    assert len([row for row in Parsed(text).rows if "MiB" in row]) == 2 + 2 + 1
    assert "write: the settings of the handle: fio moved 3.08 times as much on this storage" in limits_of(text)
    fast = handled(16, 16, 29.0)
    assert "the storage, as far as fio shows it" in page_text(fast, tmp_path / "run/record.json")


def test_a_run_of_the_handle_alone_says_what_is_not_known(tmp_path: Path) -> None:
    text = page_text(handled(), tmp_path / "none/run/record.json")
    assert "write: not known: no record of <code>tunetool verify</code> for" in limits_of(text)
    assert len(pictures(text)) == 1
    empty = handled().model_copy(update={"measurements": []})
    assert "<svg" not in page_text(empty, tmp_path / "run/record.json")


def test_points_below_zero_are_below_its_line() -> None:
    given = [Point("a", -0.2, -0.3, -0.1, "#000"), Point("b", 0.0, 0.0, 0.0, "#000")]
    below, on_it = (float(each.attrib["cy"]) for each in circles(ElementTree.fromstring(points("t", "said", given))))
    assert below > on_it
    assert points("t", "said", given[1:]).count("<circle") == 1


def test_points_levels_and_dates_do_not_meet() -> None:
    given = [Point(f"p{n}", 10.0 - n, 9.5 - n, 10.5 - n, "#000", below=f"2026-01-{n:02d}") for n in range(8)]
    root = ElementTree.fromstring(points("t", "said", given, [Level("a", 9.0), Level("b", 8.9), Level("far", 50.0)]))
    texts = {each.text: each for each in root if each.tag.endswith("text")}
    assert float(texts["b 8.90"].attrib["y"]) - float(texts["a 9.00"].attrib["y"]) >= 14
    assert "far 50.00, far above" in texts
    dates = [float(each.attrib["x"]) for text, each in texts.items() if text and text.startswith("2026")]
    assert len(dates) > 3
    assert all(right - left >= 70 for left, right in pairwise(dates))
    assert max(float(each.attrib["cx"]) for each in circles(root)) < float(texts["a 9.00"].attrib["x"])
