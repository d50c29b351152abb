"""Figures as CSV and Markdown, several baselines, and one figure over many records."""

from __future__ import annotations

import csv
import io
import json
import re
from datetime import timedelta
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

import builders
from builders import NOW, sampled
from parsed_page import Parsed
from shown_records import hostile, over_time
from tunetool.cli.main import cli
from tunetool.errors import UsageProblem
from tunetool.record import Record, Verdict, write
from tunetool.report import trend_page
from tunetool.report.compare import compare_with_all
from tunetool.report.flat import csv_text, markdown_table, plain, record_csv
from tunetool.report.kinds import markdown_of
from tunetool.report.runs import Kept
from tunetool.report.trend import points

SAMPLES = (50e9, 51e9, 52e9, 53e9, 54e9, 55e9)


def record(factor: float = 1.0, hours: int = 0, host: str = "n1", **fields: object) -> Record:
    started = NOW + timedelta(hours=hours)
    return builders.record(
        sampled("sequential.read", *(factor * value for value in SAMPLES)),
        sampled("drive.read", *SAMPLES, parameters={"serial": "=S1"}),
        node={"host": host},
        started=started,
        finished=started,
        **{"verdict": Verdict(status="fail", reasons=["`x` | <b>"]), **fields},
    )


def call(*arguments: object, code: int = 0) -> Result:
    done = CliRunner().invoke(cli, ["report", *map(str, arguments)], standalone_mode=False)
    assert (done.exception is None) == (code == 0), done.exception
    assert code == 0 or isinstance(done.exception, UsageProblem)
    return done


def test_csv_has_every_figure_in_full_and_no_formula() -> None:
    first, second = csv.DictReader(io.StringIO(record_csv(record(1.1))))
    assert float(first["value"]) == 1.1 * 52.5e9
    assert (first["name"], first["figure"], first["samples"]) == ("sequential.read", "bandwidth", "6")
    assert (first["direction"], first["drive"]) == ("read", "")
    assert second["drive"] == "'=S1"


@given(st.lists(st.text(max_size=8), min_size=1, max_size=4))
def test_any_text_comes_back_from_csv_and_stays_in_its_cell(texts: list[str]) -> None:
    (read,) = list(csv.reader(io.StringIO(csv_text(["x"] * len(texts), [texts]), newline="")))[1:] or [[]]
    assert [cell.removeprefix("'") for cell in read] == [text.removeprefix("'") for text in texts]
    lines = markdown_table(["x"] * len(texts), [texts]).split("\n")
    assert len(lines) == 4
    bars = [at for at, letter in enumerate(lines[2]) if letter == "|" and lines[2][at - 1] != "\\"]
    assert len(bars) == len(texts) + 1
    assert "<" not in lines[2]


def test_markdown_says_the_verdict_first() -> None:
    text = markdown_of(record(command=["tunetool", "verify"]).model_copy(update={"kind": "other"}), None)
    assert (
        text.index("**FAIL**") < text.index("\\`x\\` \\| &lt;b&gt;") < text.index("| figure |") < text.index("Command:")
    )
    assert plain("a*b\nc_d") == "a\\*b c\\_d"


def test_a_change_counts_only_against_every_baseline() -> None:
    old, equal, now = record(0.8), record(1.0, 1), record(1.0, 2)
    (drive, read) = compare_with_all([old, old], now)
    assert (drive.word, read.word, read.reason) == ("no significant difference", "faster", "")
    (_, read) = compare_with_all([old, equal], now)
    assert (read.word, read.reason) == ("no significant difference", "faster than 1 of 2 baselines")
    lonely = old.model_copy(update={"measurements": old.measurements[:1]})
    rows = {row.name: row for row in compare_with_all([lonely, old], now)}
    assert rows["drive.read =S1"].reason == "of 1 baselines"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for hours, (factor, host) in enumerate(((1.0, "n1"), (1.01, "n1"), (0.7, "n1"), (0.2, "n2"))):
        write(record(factor, hours, host), tmp_path)
    return tmp_path


def test_a_trend_is_in_order_of_time_and_tells_noise(runs: Path) -> None:
    text = call("trend", "sequential.read", "--host", "n1", "--runs-dir", runs).stdout
    rows = [line for line in text.splitlines() if "verify-n1" in line]
    ends = (("within the noise", "FAIL"), ("slower", "FAIL"))
    assert all(
        re.search(rf"{change} +{verdict}$", line.rstrip())
        for line, (change, verdict) in zip(rows[1:], ends, strict=True)
    )
    assert "slower" not in rows[0] + rows[1]
    filled = [line.count("█") for line in rows]
    assert filled[2] < filled[0] <= filled[1]
    shown = call("trend", "sequential.read", "--format", "csv", "--runs-dir", runs).stdout
    read = list(csv.DictReader(io.StringIO(shown)))
    assert [row["since the one before"] for row in read] == ["", "within the noise", "slower", ""]
    assert [float(row["value"]) for row in read] == pytest.approx([factor * 52.5e9 for factor in (1, 1.01, 0.7, 0.2)])
    assert call("trend", "drive.read =S1", "--format", "markdown", "--runs-dir", runs).stdout.count("\n") == 6


def test_a_figure_that_is_nowhere_is_named_with_those_that_are(runs: Path, tmp_path: Path) -> None:
    done = call("trend", "sequentail.read", "--runs-dir", runs, code=2)
    assert "no record has a figure `sequentail.read`" in str(done.exception)
    assert "sequential.read" in getattr(done.exception, "hint", "")
    call("trend", "x", "--runs-dir", tmp_path / "none", code=2)


def test_compare_takes_baselines_and_formats(runs: Path) -> None:
    names = sorted(path.name for path in runs.iterdir())[:3]
    text = call("compare", *names, "--runs-dir", runs).stdout
    assert next(line for line in text.splitlines() if line.startswith("sequential.read")).rstrip().endswith("slower")
    shown = list(csv.DictReader(io.StringIO(call("compare", *names, "--format", "csv", "--runs-dir", runs).stdout)))
    assert [row["second is"] for row in shown] == ["no significant difference", "slower"]
    assert "| slower |" in call("compare", *names, "--format", "markdown", "--runs-dir", runs).stdout
    assert json.loads(call("compare", *names, "--json", "-", "--runs-dir", runs).stdout)["measurements"]
    call("compare", names[0], "--runs-dir", runs, code=2)


def test_a_trend_has_a_page_with_a_plot(tmp_path: Path) -> None:
    for each in [*over_time(), *over_time(1, "node2")]:
        write(each, tmp_path)
    out = tmp_path / "trend.html"
    call("trend", "sequential.read", "--runs-dir", tmp_path, "--page", out)
    text = out.read_text()
    titles = re.findall("<h2>(.*?)</h2>", text)
    assert titles == ["What changed", "Figures", "Evidence", "How to repeat", "Provenance"]
    first, second = (ElementTree.fromstring(svg) for svg in re.findall("<svg.*?</svg>", text, re.DOTALL))
    dots = [each for each in first if each.tag.endswith("circle")]
    assert [float(each.attrib["r"]) > 4 for each in dots] == [number == 6 for number in range(12)]
    across = [float(each.attrib["cx"]) for each in dots]
    assert across == sorted(across)
    assert len([each for each in first if each.attrib.get("class") == "whisker"]) == 12
    assert "(43." in first.attrib["aria-label"]
    assert "2026-01-02" in "".join(first.itertext())
    assert len([each for each in second if each.tag.endswith("circle")]) == 1
    changes = text[text.index("What changed") : text.index("<h2>Figures")]
    assert changes.count("<li>") == 1
    assert "2026-02-13 03:04: sequential.read node1: slower" in changes
    assert "there is no record before it" in text
    call("trend", "sequential.read", "--runs-dir", tmp_path, "--page", tmp_path / "no/x.html", code=2)


@pytest.mark.parametrize(("status", "words"), [("fail", "FAIL: sequential.read n1"), ("pass", "within the noise")])
def test_the_banner_of_a_trend_says_that_the_newest_failed(tmp_path: Path, status: str, words: str) -> None:
    for hours, factor in enumerate((1.0, 1.01)):
        write(record(factor, hours, verdict=Verdict(status=status, reasons=[])), tmp_path)
    out = tmp_path / "trend.html"
    call("trend", "sequential.read", "--runs-dir", tmp_path, "--page", out)
    banner = out.read_text().partition("<header>")[2].partition("</header>")[0]
    assert words in banner
    assert f'class="verdict {status}"' in banner
    assert ("within the noise" in banner) == (status == "pass")


def test_a_trend_names_a_newer_failed_record_without_the_figure(runs: Path, tmp_path: Path) -> None:
    gone = record(1.0, 9).model_copy(
        update={"measurements": [], "verdict": Verdict(status="error", reasons=["no fio"])}
    )
    name = write(gone, runs).parent.name
    out = tmp_path / "trend.html"
    shown = call("trend", "sequential.read", "--runs-dir", runs, "--page", out).stdout
    said = f"ERROR: {name} has no such figure: no fio"
    assert said in " ".join(shown.split())
    assert out.read_text().index(said) < out.read_text().index("FAIL: sequential.read"), "it is the newest"
    assert "no such figure" not in call("trend", "sequential.read", "--host", "n2", "--runs-dir", runs).stdout


def test_no_text_of_a_record_becomes_markup_in_a_trend() -> None:
    text = "\"'><svg onload=alert(1)>"

    def page(added: str) -> Parsed:
        kept = [Kept(f"{each.id}{added}", hostile(each, added)) for each in over_time(3)]
        return Parsed(trend_page.page(points(kept, "sequential.read"), f"x{added}", ["tunetool", added]))

    assert page(text).shape() == page(" x").shape()
    assert text in page(text).words


def test_a_trend_over_many_records_and_hosts_stays_small() -> None:
    kept = [Kept(f"{each.id}-{host}", each) for host in range(40) for each in over_time(40, f"node{host}")]
    text = trend_page.page(points(kept, "sequential.read"), "sequential.read", [])
    assert text.count("<svg") == 12
    assert "28 series more have no plot here" in text
    assert "1350 older figures are left out" in text
    assert len(text.encode()) < 300_000
    one = trend_page.page(points([Kept(each.id, each) for each in over_time(900)], "sequential.read"), "x", [])
    assert one.count("<circle") == 600
    assert len(one.encode()) < 300_000
