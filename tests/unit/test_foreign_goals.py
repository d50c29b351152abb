"""A goals file of a stranger runs nothing but what measures, and no figure that proves nothing holds a goal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

import pytest

from tunetool import record as records
from tunetool.accept.goal import Goal, Pick
from tunetool.accept.judge import judged
from tunetool.accept.program import announced
from tunetool.accept.progress_file import Kept, measured_before
from tunetool.accept.run import Request, accept, judge_records
from tunetool.accept.view import view
from tunetool.cli.accept import read_goals
from tunetool.errors import TunetoolError, UsageProblem
from tunetool.measure.figure import What, computed, figure
from tunetool.measure.session import Run
from tunetool.measure.statistics import Estimate
from tunetool.record import CheckResult, Evidence, FleetHost, Measurement, Node, Part, Record, Verdict
from tunetool.report.progress import PlainProgress
from tunetool.verdict import NO_EXPECTATION, Case, judge
from tunetool.view.model import Table

NOW = datetime(2026, 11, 28, tzinfo=timezone.utc)
READ = What("sequential.{direction}", "bandwidth", "fio", "disk", "bandwidth", {"direction": "read"})
GOAL = Goal(("verify", "--target", "/t"), Pick("bandwidth", {"direction": "read"}), None, "at least", 1e9, "B/s")
FAST = (2e9,) * 6
PASS = Verdict(status="pass", reasons=[])


def goals(run: str, bound: str = 'at_least = "1GBps"', pick: str = "bandwidth", values: str = "") -> str:
    return (
        f'schema = "tunetool.goals/1"\ntitle = "t"\n{values}[[goal]]\nrun = \'{run}\'\n'
        f'figure = {{figure = "{pick}"}}\n{bound}\n'
    )


def record(*measurements: Measurement, verdict: Verdict = PASS, number: int = 0, **more: object) -> Record:
    fields = {
        "kind": "verify",
        "id": f"{number:032d}",
        "started": NOW,
        "finished": NOW,
        "node": Node(host="a", speed_hash="1"),
        "command": ["tunetool", "verify", "--target", "/t"],
        "target": "/t",
        "measurements": measurements or [figure(READ, FAST)],
        "verdict": verdict,
    }
    return Record.model_validate({**fields, **more})


@pytest.mark.parametrize(
    ("run", "pick"),
    [
        ("verify --target /t -i/tmp/inventory", "bandwidth"),
        ("tune --target /t -o/etc/x", "bandwidth"),
        ("tune --target /t --output /etc/x", "bandwidth"),
        ("tune --target /t --store-vars /etc/x", "bandwidth"),
        ("stage evict /data/model", "copy"),
        ("verify --target /t --python /tmp/program", "bandwidth"),
        ("verify --target /t --python=/tmp/program", "bandwidth"),
        ("verify --target /t --python {python}", "bandwidth"),
        ("verify --target /t {python}", "bandwidth"),
        ("verify --target /t --manifest /tmp/manifest.json", "bandwidth"),
        ("bench kv-cache --target /t --engine-python /tmp/program", "restore"),
    ],
)
def test_a_file_names_no_program_and_no_other_place(run: str, pick: str) -> None:
    values = '[values]\npython = "--python=/tmp/program"\n' if " {python}" in run and "--python " not in run else ""
    values = values or '[values]\npython = "/tmp/program"\n'
    with pytest.raises(UsageProblem, match=r"`run`|evict"):
        read_goals(goals(run, pick=pick, values=values), "g.toml")


def test_who_calls_names_a_program() -> None:
    text = goals("verify --target /t --python {python}", values='[values]\npython = "python3"\n')
    assert read_goals(text, "g.toml", ["python=/opt/bin/python"]).runs[0][-1] == "/opt/bin/python"


@pytest.mark.parametrize(
    "text",
    [
        goals("verify", "at_least = 1" + "0" * 400),
        goals("verify", "at_least = -1" + "0" * 400),
        goals("verify", "at_least = 1" + "0" * 5000),
        goals("verify") + "needs = " + "[" * 100_000,
        goals("verify --target {t}", values='[values]\nt = "/t\\u0000"\n'),
    ],
    ids=["large", "negative", "too many digits", "deep", "NUL"],
)
def test_a_file_that_no_reader_takes_is_refused_with_words(text: str) -> None:
    with pytest.raises(UsageProblem):
        read_goals(text, "g.toml")


def test_verify_says_what_is_unproven_without_an_expectation_too() -> None:
    verdict = judge(Case(measurements=[figure(READ, FAST)], unproven={"sequential.read": "the page cache answers"}))
    assert verdict.kinds == ["expectation", "unproven"]
    found = judged(GOAL, [record(verdict=verdict)])
    assert (found.verdict, "the page cache answers" in found.reason) == ("not decided", True)


def _evidence(worst: float | None) -> Measurement:
    return figure(READ, FAST, evidence=Evidence(kind="block", ratio=1.0, worst_ratio=worst))


def _interval(level: float | None) -> Measurement:
    made = (
        computed(READ, 2e9, parameters=None)
        if level is None
        else computed(READ, 2e9, Estimate(2e9, 2e9, 2e9, level, ""))
    )
    return made.model_copy(update={"parameters": {"pairs": 6}})


@pytest.mark.parametrize(
    ("measured", "reason"),
    [
        ([record(verdict=Verdict(status="unproven", reasons=["no counter"]))], "unproven: no counter"),
        ([record(_evidence(0.1))], "counted 0.1"),
        ([record(_interval(0.5))], "decide nothing"),
        ([record(figure(READ, FAST[:3]))] * 2, "3 rounds"),
        ([record(), record(number=1, target="/home")], "several targets"),
        ([record(), record(number=1, node=Node(host="a", speed_hash="2"))], "several machines"),
        ([record(), record(figure(READ, FAST).model_copy(update={"unit": "1/s"}), number=1)], "in 1/s"),
        ([record(figure(READ, FAST).model_copy(update={"host": "b"}))], "not measured"),
    ],
    ids=["before kinds", "a round", "level", "twice", "target", "machine", "unit", "host"],
)
def test_what_proves_nothing_holds_no_goal(measured: Sequence[Record], reason: str) -> None:
    found = judged(GOAL, measured)
    assert (found.verdict, reason in found.reason) == ("not decided", True), found.reason


@pytest.mark.parametrize(
    ("above", "below", "reason"),
    [
        (figure(READ, FAST).model_copy(update={"unit": "s"}), FAST, "is in s"),
        (figure(READ, (-2.0,) * 6), (-1.0,) * 6, "or less"),
        (figure(READ, (2e300,) * 6), (1e-300,) * 6, "next to 0"),
    ],
    ids=["units", "negative", "infinite"],
)
def test_a_share_of_what_is_no_whole_is_not_decided(above: Measurement, below: Sequence[float], reason: str) -> None:
    write = What("sequential.{direction}", "bandwidth", "fio", "disk", "bandwidth", {"direction": "write"})
    share = Goal(GOAL.run, GOAL.pick, Pick("bandwidth", {"direction": "write"}), "at least", 0.5, "1")
    found = judged(share, [record(above, figure(write, below))])
    assert (found.verdict, reason in found.reason) == ("not decided", True), found.reason


@pytest.mark.parametrize(
    ("reasons", "verdict"),
    [([NO_EXPECTATION], "held"), ([NO_EXPECTATION, "sequential read: the page cache answers"], "not decided")],
)
def test_an_unproven_part_of_a_chain_proves_no_headline(reasons: list[str], verdict: str) -> None:
    part = Part(name="verify", status="unproven", reasons=reasons)
    chain = Verdict(status="unproven", reasons=[f"verify: {reasons[0]}"], kinds=["part"])
    assert judged(GOAL, [record(verdict=chain, parts=[part])]).verdict == verdict


def test_an_engine_that_failed_in_a_later_round_holds_no_goal() -> None:
    direct = figure(What("c.{engine}", "bandwidth", "direct", "disk", "bandwidth", {"engine": "direct"}), FAST)
    check = CheckResult(id="c.direct", labels={"engine": "direct"}, status="unknown", expected="", found="EIO")
    found = judged(
        Goal(GOAL.run, Pick("bandwidth", {"engine": "direct"}), None, "at least", 1e9, "B/s"),
        [record(direct, checks=[check])],
    )
    assert found.verdict == "not decided"


def test_a_run_that_could_not_do_its_work_is_no_pass() -> None:
    failed = Verdict(status="error", reasons=["read: EIO"], kinds=["error"])
    found = judge_records([GOAL], [record(verdict=failed)], ["x"])
    assert found.verdict is not None
    assert found.verdict.status == "error"


@pytest.mark.parametrize(
    ("command", "target", "verdict"),
    [
        (["tunetool", "verify", "--target", "/home"], "/home", "not decided"),
        (["tunetool", "verify", "--target", "/t", "--level", "full"], "/t", "not decided"),
        (["tunetool", "verify", "--target=/t", "--duration", "9s"], "/t", "held"),
        (["tunetool", "verify"], "/t", "held"),
    ],
)
def test_records_of_another_call_are_not_judged(command: list[str], target: str, verdict: str) -> None:
    (found,) = judge_records([GOAL], [record(command=command, target=target)], ["x"]).goals or []
    assert found.verdict == verdict, found.reason


def test_a_record_that_was_swapped_in_is_measured_again(tmp_path: Path) -> None:
    path = records.write(record(), tmp_path)
    kept = Kept(records.read(path), path.name if path.is_dir() else path.parent.name)
    measured_before(tmp_path, "g", {"a": "b"}, afresh=True).add(GOAL.run, kept)
    assert measured_before(tmp_path, "g", {"a": "b"}, afresh=False).runs
    (tmp_path / kept.run / records.FILE).write_text(records.dumps(record(figure(READ, (9e9,) * 6))))
    assert not measured_before(tmp_path, "g", {"a": "b"}, afresh=False).runs


def test_a_node_without_an_answer_counts_among_the_nodes() -> None:
    held = judged(GOAL, [record()]).model_copy(update={"host": "a"})
    hosts = [FleetHost(host="a", status="pass"), FleetHost(host="b", status="error", reasons=["unreachable"])]
    shown = view(record(goals=[held], hosts=hosts))
    tables = [block for section in shown.sections if section.title == "Goals" for block in section.blocks]
    assert "1 of 2" in json.dumps([str(each.rows) for each in tables if isinstance(each, Table)])


def test_files_beside_the_goals_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("click.py", "runpy.py", "tunetool.py"):
        (tmp_path / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit(9)\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TunetoolError):
        announced(["verify", "--target", str(tmp_path / "absent")])
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("target", "is_relative"), [("/t", False), ("data", True)])
def test_a_relative_target_is_another_one_in_another_directory(
    target: str, is_relative: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Looked(Exception):
        pass

    def look(runs_dir: Path, name: str, identity: dict[str, str], afresh: bool) -> None:
        raise Looked(identity)

    monkeypatch.setattr("tunetool.accept.run.measured_before", look)
    monkeypatch.chdir(tmp_path)
    text = goals("verify --target {t}", values=f'[values]\nt = "{target}"\n').replace(
        '"bandwidth"', '"bandwidth", direction = "read"'
    )
    with pytest.raises(Looked) as looked:
        accept(Request(read_goals(text, "g.toml"), run=Run(runs_dir=tmp_path)), PlainProgress())
    assert looked.value.args[0].get("directory") == (str(tmp_path) if is_relative else None)
