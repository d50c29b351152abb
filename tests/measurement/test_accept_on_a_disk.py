"""`tunetool accept` by real runs on a disk: measured, judged, interrupted and gone on with, here and on two hosts."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from calls import TUNETOOL, call
from tunetool import record as records
from tunetool.record import Record
from waiting import PATIENCE, until

pytest_plugins = ["disks"]

SMALL = "bench experts --target {target} --expert-bytes 1MiB --experts 16 --top-k 2"
GOALS = f"""
schema = "tunetool.goals/1"
title = "A disk"
[values]
target = "/"
[[goal]]
run = "{SMALL} --rounds 3"
figure = {{figure = "bandwidth", place = "target", mode = "direct"}}
at_least = "1kB/s"
[[goal]]
run = "{SMALL} --rounds 6 --seed 1"
figure = {{figure = "p99", place = "target", mode = "direct"}}
of = {{figure = "p99", place = "target", mode = "buffered"}}
at_most = 1000000
[[goal]]
run = "{SMALL} --rounds 3"
figure = {{figure = "p50", place = "target", mode = "direct"}}
at_least = "1h"
needs = ["gpus:4096"]
"""


@pytest.fixture
def goals(tmp_path: Path) -> Path:
    path = tmp_path / "disk.toml"
    path.write_text(GOALS)
    return path


def command(goals: Path, disk: Path, runs: Path, *more: object) -> list[str]:
    settings = ["--set", f"target={disk}", "--runs-dir", runs, "--allow-busy", *more]
    return [*TUNETOOL, "accept", *map(str, (goals, *settings))]


def acceptance(runs: Path) -> tuple[Path, Record]:
    (path,) = runs.glob("*-acceptance-*/record.json")
    return path, records.read(path)


def undecided_by_others(record: Record) -> bool:
    """Whether other work used the disk, so that its counters prove nothing."""
    return any(each.reason.startswith("unproven") for each in record.goals or [])


def test_goals_are_measured_judged_and_kept(disk: Path, goals: Path, tmp_path: Path) -> None:
    done = call(*command(goals, disk, tmp_path / "runs"))
    path, record = acceptance(tmp_path / "runs")
    held, share, skipped = record.goals or []
    assert skipped.verdict == "skipped"
    if not undecided_by_others(record):
        assert (done.returncode, held.verdict, held.rounds, share.verdict) == (0, "held", 6, "held"), done.stdout
    kept = {path.parent.name for path in (tmp_path / "runs").glob("*-bench.experts-*/record.json")}
    assert {each.run for each in record.parts or []} == kept
    page = path.with_name("report.html").read_text()
    assert f'href="../{(record.parts or [])[0].run}/report.html"' in page
    assert list(disk.iterdir()) == []
    assert list((tmp_path / "runs").glob(".accept-*")) == []


def test_after_ctrl_c_it_goes_on_where_it_was(disk: Path, goals: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    process = subprocess.Popen(
        command(goals, disk, runs), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    until(lambda: list(runs.glob(".accept-*")) and list(disk.glob(".tunetool-*")), "the second run", process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, errors
    assert "the same call goes on from there" in errors
    assert list(disk.iterdir()) == []
    again = call(*command(goals, disk, runs))
    assert "goes on: 1 run of 2 measured before" in again.stderr
    _, record = acceptance(runs)
    assert all(each.value is not None for each in (record.goals or [])[:2])


def test_an_expectation_of_a_benchmark_is_in_its_record(disk: Path, tmp_path: Path) -> None:
    words = [
        *SMALL.replace("{target}", str(disk)).split(),
        "--rounds",
        6,
        "--runs-dir",
        tmp_path / "runs",
        "--allow-busy",
    ]
    wanted = ("--expect", "bandwidth,place=target,mode=direct>=1PB/s", "--expect", "p99,place=target,mode=direct<=1h")
    done = call(*TUNETOOL, *words, *wanted)
    (path,) = (tmp_path / "runs").glob("*/record.json")
    record = records.read(path)
    if not undecided_by_others(record):
        assert [each.verdict for each in record.goals or []] == ["missed", "held"]
        assert done.returncode == 1

    assert "at most 3600.0 s" in path.with_name("report.html").read_text()
    assert "`p98` is not a figure" in call(*TUNETOOL, *words, "--expect", "p98<=1s").stderr


@pytest.mark.slow  # two plays, each with two runs
def test_two_hosts_are_one_record_and_one_page(disk: Path, goals: Path, tmp_path: Path) -> None:
    pytest.importorskip("ansible_runner")
    program = tmp_path / "prefix/bin/tunetool"
    program.parent.mkdir(parents=True)
    # A node's own copy of its record goes where the test's files go.
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m tunetool "$@" --runs-dir {tmp_path}/node-runs\n')
    program.chmod(0o755)
    here = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    common = {"ansible_become": False, "tunetool_prefix": str(program.parents[1])}
    inventory = tmp_path / "hosts.json"
    inventory.write_text(json.dumps({"all": {"vars": common, "hosts": {"n1": here, "n2": here}}}))
    runs = tmp_path / "runs"
    done = call(*command(goals, disk, runs, "-i", inventory, "--forks", 1))
    path, record = acceptance(runs)
    assert [each.host for each in record.hosts or []] == ["n1", "n2"]
    assert [each.host for each in record.goals or []] == ["n1"] * 3 + ["n2"] * 3, done.stderr
    if not undecided_by_others(record):
        assert done.returncode == 0, done.stdout
    page = path.with_name("report.html").read_text()
    assert 'href="hosts/n1.html"' in page
    assert "Acceptance of 2 nodes" in page
