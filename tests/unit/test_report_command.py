"""`tunetool report` shows records in every form, lists and compares them."""

from __future__ import annotations

import itertools
import json
import random
from datetime import timedelta
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

import builders
from builders import NOW, PROVEN, sampled
from tunetool.cli.main import cli
from tunetool.errors import UsageProblem
from tunetool.measure.statistics import difference, significant
from tunetool.record import (
    CheckResult,
    FleetHost,
    Measurement,
    Node,
    Record,
    Status,
    Verdict,
    read,
    write,
)
from tunetool.report.compare import compare
from tunetool.report.junit import junit
from tunetool.report.prometheus import prometheus

SAMPLES = (50e9, 51e9, 52e9, 53e9, 54e9, 55e9)


def figure(direction: str, samples: tuple[float, ...], queue_depth: int = 32, host: str | None = None) -> Measurement:
    return sampled(
        f"sequential.{direction}",
        *samples,
        medium="md RAID0 (8 x nvme)",
        parameters={"direction": direction, "queue_depth": queue_depth, "sample_seconds": 4.0},
        evidence=PROVEN,
        host=host,
    )


def record(
    read_samples: tuple[float, ...] = SAMPLES,
    status: Status = "pass",
    queue_depth: int = 32,
    hours: int = 0,
    hosts: list[FleetHost] | None = None,
    check: str = "pass",
) -> Record:
    reasons = [] if status == "pass" else ['it is "slow" <because>\nof \\ & \x01']
    name = hosts[0].host if hosts else None
    return builders.record(
        figure("read", read_samples, queue_depth, name),
        figure("write", tuple(value / 2 for value in SAMPLES), queue_depth, name),
        kind="fleet" if hosts else "verify",
        id=f"{hours:032x}",
        started=NOW + timedelta(hours=hours),
        finished=NOW + timedelta(hours=hours, seconds=60),
        target="/mnt/scratch",
        expectations=builders.wanted_read(status),
        checks=[
            CheckResult.model_validate(
                {"id": "array.chunk", "status": check, "expected": "1 MiB", "found": "512 KiB", "remedy": "run it"}
            )
        ],
        hosts=hosts,
        verdict=Verdict(status=status, reasons=reasons),
    )


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    write(record(), folder)
    write(record(tuple(value * 0.8 for value in SAMPLES), "fail", hours=1, check="fail"), folder)
    return folder


def call(runs: Path, *arguments: str, code: int = 0) -> Result:
    done = CliRunner().invoke(cli, ["report", *arguments, "--runs-dir", str(runs)], standalone_mode=False)
    if code == 0:
        assert done.exception is None, done.exception
    else:
        assert isinstance(done.exception, UsageProblem)
    return done


OLD, NEW = "20260102T030405Z-verify-n1", "20260102T040405Z-verify-n1"


def test_show_prints_what_verify_printed(runs: Path) -> None:
    for name in (NEW, str(runs / NEW), str(runs / NEW / "record.json")):
        text = call(runs, "show", name).stdout
        assert "FAIL    array.chunk: 512 KiB" in text
        assert "falling" not in text
        assert "rising by" in text
        assert text.splitlines()[-1] == "FAIL"
        assert "\x1b" not in text


def test_a_fleet_s_record_has_its_hosts(tmp_path: Path) -> None:
    hosts = [FleetHost(host="n1", status="pass"), FleetHost(host="n2", status="error", reasons=["gone"])]
    path = write(record(status="error", hosts=hosts), tmp_path)
    text = call(tmp_path, "show", str(path)).stdout
    assert next(line for line in text.splitlines() if line.startswith("n1 ")).split() == [
        "n1",
        "PASS",
        "52.50",
        "26.25",
    ]
    assert "gone" in text
    assert text.splitlines()[-1] == "ERROR"


def test_a_record_that_is_not_there_or_damaged(runs: Path) -> None:
    call(runs, "show", "nothing", code=2)
    path = runs / OLD / "record.json"
    path.write_text(path.read_text().replace("52500000000", "92500000000"))
    call(runs, "show", OLD, code=2)
    call(runs, "compare", OLD, NEW, code=2)
    rows = call(runs, "list").stdout.splitlines()
    assert NEW in rows[2]
    assert "FAIL" in rows[2]
    assert OLD in rows[3]
    assert "DAMAGED" in rows[3]


def test_the_list_is_newest_first_and_can_be_empty(runs: Path, tmp_path: Path) -> None:
    assert [line.split()[0] for line in call(runs, "list").stdout.splitlines()[2:]] == [NEW, OLD]
    assert call(runs, "list", "--kind", "fleet").stdout == "no records\n"
    assert call(tmp_path / "none", "list").stdout == "no records\n"


def test_json_is_the_record_and_output_is_whole(runs: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy.json"
    assert call(runs, "show", OLD, "--format", "json", "-o", str(target)).stdout == ""
    assert read(target) == read(runs / OLD)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["copy.json"]
    call(runs, "show", OLD, "-o", str(tmp_path / "no/such"), code=2)


@pytest.mark.parametrize("status", ["pass", "fail", "unstable", "unproven", "error"])
@pytest.mark.parametrize("check", ["pass", "fail", "skip", "unknown"])
def test_junit_fails_where_tunetool_does(status: Status, check: str) -> None:
    root = ElementTree.fromstring(junit(record(status=status, check=check)))
    (suite,) = root
    cases = {(case.get("classname"), case.get("name")): [child.tag for child in case] for case in suite}
    marks = {"pass": [], "fail": ["failure"], "skip": ["skipped"], "unknown": ["error"]}
    assert cases["tunetool.checks", "array.chunk"] == marks[check]
    judged = {"pass": [], "fail": ["failure"]}.get(status, ["error"])
    assert cases["tunetool.expectations", "sequential.read"] == judged
    assert cases["tunetool.verdict", "/mnt/scratch"] == judged
    assert suite.get("tests") == "3"
    tags = [tag for tags_of_case in cases.values() for tag in tags_of_case]
    assert suite.get("failures") == str(tags.count("failure"))
    assert suite.get("errors") == str(tags.count("error"))


def test_prometheus_reads_it() -> None:
    families = {
        family.name: family.samples
        for family in text_string_to_metric_families(prometheus(record(status="fail", check="fail")))
    }
    bandwidth = {
        sample.labels["measurement"]: sample.value for sample in families["tunetool_bandwidth_bytes_per_second"]
    }
    assert bandwidth == {"sequential.read": 52.5e9, "sequential.write": 26.25e9}
    verdicts = {sample.labels["status"]: sample.value for sample in families["tunetool_verdict"]}
    assert verdicts == {"pass": 0, "fail": 1, "unstable": 0, "unproven": 0, "error": 0}
    assert families["tunetool_check"][0].value == 1
    assert families["tunetool_finished_timestamp_seconds"][0].value == (NOW + timedelta(seconds=60)).timestamp()


@given(st.text(max_size=40))
def test_any_text_survives_both_formats(text: str) -> None:
    odd = record().model_copy(update={"node": Node(host=text), "target": text})
    assert ElementTree.fromstring(junit(odd))[0].tag == "testsuite"
    assert all(line.startswith(("#", "tunetool_")) for line in prometheus(odd).split("\n") if line)


def test_slower_is_said_with_its_probability_and_its_test(runs: Path) -> None:
    text = call(runs, "compare", OLD, NEW).stdout
    row = next(line for line in text.splitlines() if line.startswith("sequential.read"))
    assert row.split()[-1] == "slower"
    assert "-20.0%" in row
    assert "0.002" in row  # 2 of 924 ways to part twelve samples
    assert "no significant difference" in next(
        line for line in text.splitlines() if line.startswith("sequential.write")
    )
    assert "rank-sum test" in text
    document = json.loads(call(runs, "compare", NEW, OLD, "--json", "-").stdout)
    words = {row["name"]: row["word"] for row in document["measurements"]}
    assert words == {"sequential.read": "faster", "sequential.write": "no significant difference"}


def test_what_cannot_be_compared_says_why() -> None:
    rows = compare(record(queue_depth=32), record(queue_depth=64))
    assert {row.word for row in rows} == {"not compared"}
    assert rows[0].reason == "measured differently: queue_depth 32 and 64"
    small, large = (
        builders.record(figure("read", SAMPLES, 32, None).model_copy(update={"parameters": {"state_bytes": size}}))
        for size in (2_000_000, 60_000_000)
    )
    (row,) = compare(small, large)
    assert row.reason == "measured differently: state_bytes 2000000 and 60000000", "less to write is no faster drive"
    assert "too few" in compare(record((1e9, 2e9)), record((3e9, 4e9)))[0].reason
    lonely = record().model_copy(update={"measurements": []})
    assert compare(record(), lonely)[0].reason == "only the first record has it"


def test_a_name_of_a_record_cannot_hide_what_a_comparison_says(runs: Path) -> None:
    known = record(hours=3)
    figures = [each.model_copy(update={"name": f"{each.name}\u202e\x9b"}) for each in known.measurements]
    spoiled = known.model_copy(update={"node": Node(host="n\u202e\x1b[2J"), "measurements": figures})
    path = write(spoiled, runs / "spoiled")
    for form in ("text", "markdown"):
        done = call(runs, "compare", OLD, str(path), "--format", form)
        assert not {"\u202e", "\x1b", "\x9b"} & {*done.stdout}
        assert "\\u202e" in done.stdout


@pytest.mark.parametrize("seed", range(20))
def test_the_probability_is_that_of_all_ways_to_part_the_samples(seed: int) -> None:
    source = random.Random(seed)
    first = [float(source.randrange(6)) for _ in range(source.randrange(1, 5))]
    second = [float(source.randrange(6)) for _ in range(source.randrange(1, 5))]
    everything = [*first, *second]
    ordered = sorted(everything)
    ranks = [ordered.index(value) + (ordered.count(value) + 1) / 2 for value in everything]
    middle = len(first) * (len(everything) + 1) / 2
    sums = [sum(chosen) for chosen in itertools.combinations(ranks, len(first))]
    extreme = [abs(value - middle) >= abs(sum(ranks[: len(first)]) - middle) - 1e-9 for value in sums]
    assert difference(first, second).probability == pytest.approx(sum(extreme) / len(sums))


def test_chance_is_seldom_called_a_difference() -> None:
    source = random.Random(3)
    rounds = 400
    called = sum(
        any(
            significant(
                [
                    difference([source.random() for _ in range(6)], [source.random() for _ in range(6)]).probability
                    for _ in range(4)
                ]
            )
        )
        for _ in range(rounds)
    )
    assert called / rounds < 0.05


@given(st.lists(st.floats(0, 1), max_size=6))
def test_holm_never_takes_more_than_each_by_itself(probabilities: list[float]) -> None:
    called = significant(probabilities)
    assert all(probability <= 0.05 for probability, taken in zip(probabilities, called, strict=True) if taken)
    assert len(called) == len(probabilities)
