"""The page of a fine-tune: its plots and its layout."""

from __future__ import annotations

import json
import math
import os
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from builders import measurement, record
from damaged import no_hang
from tunetool import record as records
from tunetool.errors import UsageProblem
from tunetool.node.common import documents
from tunetool.record import CheckResult, Record, Series
from tunetool.report.kinds import page_text, write_page
from tunetool.view.curves import Line, colour, dashes, plot, thinned, ticks
from tunetool.view.text import format_value, scale

SVG = "{http://www.w3.org/2000/svg}"
CONDITIONS = {
    **{"model": "/m", "dataset": "/d", "trainer": "deepspeed", "launcher": "local", "compute": "cpu"},
    **{"nodes": 2, "ranks": 2, "zero_stage": 2, "batch_size": 2, "steps": 2},
    **{"tuning": "LoRA, rank 8", "parameters": 10**9, "trainable": 10**6},
}


def lines_of(text: str) -> list[list[tuple[float, float]]]:
    return [
        [(float(x), float(y)) for x, y in (pair.split(",") for pair in line.attrib["points"].split())]
        for line in ET.fromstring(text).iter(SVG + "polyline")
    ]


def test_a_line_lies_where_its_values_are() -> None:
    drawn = plot("CPU", "%", [Line("rank 0", [(0.0, 0.0), (5.0, 100.0), (10.0, 50.0)])], until=10.0)
    ((first, top, last),) = lines_of(drawn)
    assert first[0] < top[0] < last[0]
    assert top[0] - first[0] == pytest.approx(last[0] - top[0], abs=0.2)
    # SVG counts from the top.
    assert top[1] < last[1] < first[1]
    assert first[1] - last[1] == pytest.approx(last[1] - top[1], abs=0.2)
    labels = [text.text for text in ET.fromstring(drawn).iter(SVG + "text")]
    assert labels[0] == "CPU, %"
    assert {"0", "100"} <= set(labels)


def test_every_worker_has_its_own_line_and_name() -> None:
    drawn = plot("Loss", "1", [Line(f"rank {rank}", [(0.0, rank), (1.0, 1.0)]) for rank in range(12)], until=1.0)
    lines = list(ET.fromstring(drawn).iter(SVG + "polyline"))
    assert [line[0].text for line in lines] == [f"rank {rank}" for rank in range(12)]
    assert len({(line.attrib["stroke"], line.attrib["stroke-dasharray"]) for line in lines}) == 12
    assert (colour(0), dashes(0)) != (colour(8), dashes(8))


def test_one_point_is_seen_and_no_number_is_left_out() -> None:
    drawn = plot("Loss", "1", [Line("one", [(1.0, 2.0)]), Line("two", [(0.0, math.nan), (1.0, math.inf)])], until=1.0)
    root = ET.fromstring(drawn)
    assert [dot[0].text for dot in root.iter(SVG + "circle")] == ["one"]
    assert "nan" not in drawn
    assert "inf" not in drawn


@pytest.mark.parametrize("value", [0.0, -3.0, 7.0, 1e-5])
def test_a_flat_curve_lies_inside_its_plot(value: float) -> None:
    ((first, last),) = lines_of(plot("x", "1", [Line("a", [(0.0, value), (1.0, value)])], until=1.0))
    assert first[1] == last[1]
    assert 29 < first[1] < 167


def test_names_are_escaped() -> None:
    assert ET.fromstring(plot("a < b", "s", [Line("<&>", [(0.0, 1.0), (1.0, 2.0)])], 1.0)) is not None


def test_peaks_outlive_thinning() -> None:
    points = [(second / 10, 1.0) for second in range(10_000)]
    points[4321] = (432.1, 99.0)
    points[77] = (7.7, -5.0)
    kept = thinned(points, until=1000.0)
    assert len(kept) <= 602
    assert {(432.1, 99.0), (7.7, -5.0)} <= set(kept)
    assert kept == sorted(kept)
    assert thinned(points[:100], 10.0) == points[:100]


@pytest.mark.parametrize(
    ("low", "high", "values"),
    [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (0, 7.3, [0, 2, 4, 6, 8]), (-3, 3, [-4, -2, 0, 2, 4]), (0, 0.3, [0, 0.1, 0.2, 0.3])],
)  # fmt: skip
def test_ticks_are_round(low: float, high: float, values: list[float]) -> None:
    assert ticks(low, high) == values


def test_units() -> None:
    assert scale("B/s", 2.5e9) == (1e9, "GB/s")
    assert scale("%", 50) == (1.0, "%")
    assert scale("1", 1e12) == (1.0, "")
    assert (format_value(0.0125, "s"), format_value(16.6e9, "B"), format_value(0.5, "1")) == (
        "12.50 ms",
        "16.60 GB",
        "0.5",
    )


@pytest.fixture
def run(tmp_path: Path) -> tuple[Record, Path]:
    series = []
    for prefix in ("1x2-z2", "1x2-z3"):
        for rank in (0, 1):
            directory = tmp_path / "series" / prefix / f"rank-{rank}"
            directory.mkdir(parents=True)
            (directory / "about.json").write_text(json.dumps({"host": f"host<{rank}>"}))
            (directory / "loss.csv").write_text("seconds,value (1),step\n0.5,3,0\n4,1.5,1\n")
            names = ["loss"]
            if rank == 0:
                (directory / "node.disk_read.csv").write_text("seconds,value (B/s)\n1,2e9\n2,3e9\n")
                names.append("node.disk_read")
            for name in names:
                file = f"series/{prefix}/rank-{rank}/{name}.csv"
                unit = "B/s" if name.startswith("node") else "1"
                series.append(Series(name=f"{prefix}/{name}", unit=unit, rank=rank, file=file))
    named = {"engine": "torch 2.13", "medium": "tmpfs", "rank": 1, "host": "b", "parameters": CONDITIONS}
    figure = measurement("finetune.model_load", 6.77, "duration", **named)
    skipped = CheckResult(id="curves.1x2-z2/gpu", status="skip", expected="a curve", found="ranks 0, 1: none <here>")
    drawn = record(figure, kind="bench.finetune", command=["tunetool", "bench"], series=series, checks=[skipped])
    return drawn, tmp_path


def test_the_page_of_two_runs(run: tuple[Record, Path]) -> None:
    path = write_page(run[0], run[1] / records.FILE)
    assert path == run[1] / "report.html"
    text = path.read_text()
    assert re.findall("<h2>(.*)</h2>", text) == [
        *("phases", "Figures"),
        *(f"{run}: {title}" for run in ("1x2-z2", "1x2-z3") for title in ("Training", "Nodes")),
        *("Evidence", "How to repeat", "Provenance"),
    ]
    plots = re.findall("<svg xmlns.*?</svg>", text, re.DOTALL)
    said = [ET.fromstring(drawn).attrib["aria-label"] for drawn in plots]
    loss = "Loss: rank 0 on host<0> from 3.00 to 1.50; rank 1 on host<1> from 3.00 to 1.50"
    assert said == [loss, "Read from drives, GB/s: rank 0 on host<0> from 2.00 to 3.00"] * 2
    assert len(lines_of(plots[0])) == 2
    # The node's curve has the colour that its rank has everywhere.
    assert ET.fromstring(plots[1]).find(SVG + "polyline").attrib["stroke"] == colour(0)  # type: ignore[union-attr]
    assert text.count("rank 1 on host&lt;1&gt;</span>") == 4, "each section has its legend"
    assert '<td>finetune.model_load</td><td class="number" data-value="6.77">6.77 s</td><td>rank 1 on b</td>' in text
    assert "curves.1x2-z2/gpu: ranks 0, 1: none &lt;here&gt;" in text
    # Nothing is fetched from anywhere.
    assert not re.search(r"(src|href)=", text)


def test_without_curves_and_figures_there_is_no_page(run: tuple[Record, Path]) -> None:
    drawn, directory = run
    for text in (
        page_text(drawn.model_copy(update={"series": []}), directory / records.FILE),
        page_text(drawn, directory / "elsewhere" / records.FILE),
    ):
        assert "finetune.model_load" in text
        assert 'class="plot"' not in text
    nothing = drawn.model_copy(update={"series": [], "measurements": [], "checks": []})
    assert write_page(nothing, directory / records.FILE) is None
    assert not (directory / "report.html").exists()


@pytest.mark.parametrize(
    "file", ["../secret.csv", "/etc/passwd", "series/../../secret.csv", "", ".", "series//a.csv", "a\0b"]
)
def test_a_record_whose_curve_lies_elsewhere_is_refused(file: str, run: tuple[Record, Path]) -> None:
    document = records.to_document(run[0])
    document["series"][0]["file"] = file
    document["sha256"] = documents.checksum(document)
    with pytest.raises(
        UsageProblem, match=r"is not a record: series\.0\.file: .*below the record's directory"
    ) as caught:
        records.parse(json.dumps(document), "record.json")
    assert caught.value.message.isprintable()


@pytest.mark.parametrize(
    "linked", ["series/1x2-z2/rank-0/loss.csv", "series/1x2-z2/rank-1", "series/1x2-z3/rank-1/about.json"]
)
def test_a_link_out_of_the_records_directory_is_refused(linked: str, run: tuple[Record, Path], tmp_path: Path) -> None:
    record, made = run
    kept = made / "kept"
    kept.mkdir()
    (made / "series").rename(kept / "series")
    there = made / "elsewhere"
    (kept / linked).rename(there)
    (kept / linked).symlink_to(there)
    with pytest.raises(UsageProblem, match="leads out of") as caught:
        write_page(record, kept / records.FILE)
    assert linked in caught.value.message
    assert not (kept / "report.html").exists()


def test_a_fifo_in_place_of_a_curve_is_a_curve_that_is_missing(run: tuple[Record, Path]) -> None:
    path = run[1] / "series/1x2-z2/rank-0/loss.csv"
    path.unlink()
    os.mkfifo(path)
    with no_hang():
        assert "1x2-z2: Training" in page_text(run[0], run[1] / records.FILE)
