"""Printed pages: fixed width, words instead of colours, remedies beside failures."""

from __future__ import annotations

import importlib
import io
from pathlib import Path

import pytest
from rich.console import Console

import builders
from builders import PROVEN, measurement
from shown_records import on_screen
from tunetool.record import CheckResult, Confidence, FleetHost, Measurement, Node, Record, Status, Verdict
from tunetool.report import kinds
from tunetool.report.page import WIDTH, new_table
from tunetool.report.progress import BarProgress, PlainProgress
from tunetool.report.table import print_fleet, print_fleet_verdict, slowest


def figure(direction: str, value: float) -> Measurement:
    return measurement(
        f"sequential.{direction}",
        value,
        medium="md RAID0 (8 x nvme)",
        samples=[value],
        confidence=Confidence(low=value * 0.99, high=value * 1.01, method="range of 3 samples"),
        parameters={"direction": direction, "sample_seconds": 10.0},
        evidence=PROVEN,
    )


def record(read: float = 51.2e9, status: Status = "fail", host: str = "n1") -> Record:
    balance = CheckResult(
        id="drives.balance",
        status="fail",
        expected="no member over 3x slower than the median of the others",
        found="`S3Z9NX0K` 8.3x slower to read than the median of the other 7",
        remedy="look at `/dev/nvme3n1`: `nvme smart-log`; replace it if it stays slow " + "and so on " * 9,
    )
    return builders.record(
        figure("read", read),
        figure("write", 26e9),
        node=Node(host=host),
        target="/mnt/scratch",
        expectations=builders.wanted_read(status),
        checks=[balance],
        verdict=Verdict(status=status, reasons=[f"drives.balance: {balance.found}", "it is slow: " + "because " * 30]),
    )


def text_of(page: Record, width: int = WIDTH) -> str:
    return on_screen(page, Path("/var/lib/tunetool/runs/x/record.json"), width)


def test_both_units_range_evidence_medium_and_which_is_judged() -> None:
    text = text_of(record())
    row = next(line for line in text.splitlines() if line.startswith("read"))
    for wanted in ("51.20", "47.68", "50.69", "51.71", "50.00", "block 1.0003", "FAIL"):
        assert wanted in row, text
    assert "not judged" in next(line for line in text.splitlines() if line.startswith("write"))
    assert "expectation (--expect): sequential read of at least 50 GB/s (46.57 GiB/s)" in text
    assert "(8 x nvme)" in text


def test_what_failed_with_its_remedy_and_the_word_last() -> None:
    text = text_of(record())
    assert "FAIL    drives.balance: `S3Z9NX0K` 8.3x slower" in text
    assert text.count("8.3x slower") == 1
    assert "- it is slow: because" in text
    assert "remedy: look at `/dev/nvme3n1`" in text
    assert text.rstrip().splitlines()[-2:] == ["record: /var/lib/tunetool/runs/x/record.json", "FAIL"]


def test_it_is_never_wider_than_a_hundred_columns() -> None:
    assert max(len(line.rstrip()) for line in text_of(record()).splitlines()) <= WIDTH


def test_no_escape_sequences_into_a_pipe() -> None:
    assert "\x1b" not in text_of(record())


def test_a_terminal_takes_no_command_from_a_record() -> None:
    """A record may be anybody's, and edited by hand."""
    made = record()
    checks = [
        made.checks[0].model_copy(update={"status": "fail", "found": "\x1b[2Jfound", "remedy": "\x1b]0;remedy\x07"})
    ]
    text = text_of(made.model_copy(update={"checks": checks}))
    assert "\\x1b[2Jfound" in text
    assert "remedy: \\x1b]0;remedy\\x07" in text
    assert "\x1b" not in text
    table = new_table()
    table.add_column("name\x1b[2J")
    table.add_row("a\x1b[2J\nb")
    console = Console(file=io.StringIO(), width=WIDTH)
    with console.capture() as shown:
        console.print(table)
    assert "\x1b" not in shown.get()


def test_without_a_manifest_it_says_so() -> None:
    skipped = "configuration checks: skipped, there is no manifest"
    assert skipped in text_of(record())
    lost = CheckResult(id="drives.errors", status="fail", expected="every drive", found="`S1` is gone")
    assert skipped in text_of(record().model_copy(update={"checks": [lost]}))
    built = CheckResult(id="array.members", status="pass", expected="8", found="8")
    assert skipped not in text_of(record().model_copy(update={"checks": [built]}))


def fleet() -> list[tuple[FleetHost, Record | None]]:
    return [
        (FleetHost(host="n1", record_id="1", status="pass"), record(51e9, "pass")),
        (FleetHost(host="n2", record_id="2", status="fail", reasons=["slow " * 40]), record(40e9)),
        (FleetHost(host="gone", status="error", reasons=["unreachable"]), None),
    ]


def test_fleet_table() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=WIDTH, highlight=False)
    hosts = fleet()
    print_fleet(hosts, console)
    page = record().model_copy(update={"kind": "fleet", "verdict": Verdict(status="fail", reasons=[])})
    print_fleet_verdict(page, Path("/runs/f/record.json"), console)
    lines = stream.getvalue().splitlines()
    assert any(line.startswith("gone") and "ERROR" in line and "unreachable" in line for line in lines)
    assert "slowest: n2, sequential read 40 GB/s (37.25 GiB/s)" in lines
    assert lines[-1] == "FAIL"
    assert max(map(len, lines)) <= WIDTH


def test_the_slowest_of_none() -> None:
    assert slowest(fleet()[2:]) is None


def test_progress_goes_to_stderr(capsys) -> None:  # type: ignore[no-untyped-def]
    for progress in (PlainProgress(), BarProgress()):
        progress.say("a [bold]line[/bold] as it is")
        with progress.step("/mnt/x: [read]-1", 5) as tick:
            tick()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("a [bold]line[/bold] as it is") == 2


def test_a_name_with_line_breaks_makes_no_line_of_progress(capsys: pytest.CaptureFixture[str]) -> None:
    for progress in (PlainProgress(), BarProgress()):
        progress.say("writes to `/mnt/a\nPASS\x1b[2J`")
    with PlainProgress().step("/mnt/a\nPASS", 0):
        pass
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 3
    assert "\x1b" not in err


def test_every_kind_s_view_is_there() -> None:
    for name in kinds.VIEWS.values():
        assert callable(importlib.import_module(name).view), name
