"""`bench reference`: errors that stop the chain or only a part, the record over all parts, and the command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from builders import measurement, record
from calls import benchmark, call
from shown_records import on_screen
from staged import Quiet
from tunetool import record as records
from tunetool.bench.defaults import CHECKPOINT_MODEL, MATRIX
from tunetool.bench.reference import headlines
from tunetool.bench.reference.chain import Outcome, Step
from tunetool.bench.reference.parts import checkpoint_arguments, steps
from tunetool.bench.reference.request import MAIN_STATE_BYTES, Complete
from tunetool.bench.reference.run import follow
from tunetool.errors import CannotJudge, ExitCode, UsageProblem
from tunetool.measure.pace import QUICK_LOOKS, Pace
from tunetool.node.common import documents
from tunetool.record import Measurement, Part, Status, Verdict
from tunetool.report.kinds import write_page
from tunetool.report.page import WIDTH
from tunetool.view.plots import Bar, bars

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def made(runs: Path, name: str, status: Status, *figures: Measurement) -> Callable[[], Outcome]:
    """A part that writes a real record."""

    def run() -> Outcome:
        left = record(
            *figures,
            kind=name if name == "verify" else f"bench.{name}",
            id=records.new_id(),
            verdict=Verdict(status=status, reasons=[] if status == "pass" else [f"{name} is {status}"]),
        )
        return left, records.write(left, runs)

    return run


def raising(error: Exception) -> Callable[[], Outcome]:
    def run() -> Outcome:
        raise error

    return run


def request(tmp_path: Path, **more: Any) -> Complete:
    asked = {"model": "tiny", "target": tmp_path, "runs_dir": tmp_path / "runs", "state_bytes": MAIN_STATE_BYTES}
    return Complete(**{**asked, "checkpoint_model": CHECKPOINT_MODEL, "matrix": MATRIX, **more})


def test_a_pass_of_every_part_is_one_record_with_their_ids(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    read, write = measurement("sequential.read", 5e9), measurement("sequential.write", 2e9)
    wanted = [
        Step("verify", made(runs, "verify", "pass", read, write, measurement("ceiling.link", 9e9)), headlines.verify),
        Step("checkpoint", made(runs, "checkpoint", "pass")),
    ]
    result = follow(request(tmp_path, skip=("staging", "strategies")), wanted, Quiet())
    assert result.code == ExitCode.OK
    assert result.path is not None
    record = records.read(result.path)
    assert [(part.name, part.status) for part in record.parts or []] == [
        ("verify", "pass"),
        ("checkpoint", "pass"),
        ("staging", "skip"),
        ("strategies", "skip"),
    ]
    assert [each.name for each in record.measurements] == ["sequential.read", "sequential.write"]
    for part in record.parts or []:
        if part.run is not None:
            assert records.read(runs / part.run).id == part.record_id


@pytest.mark.parametrize(
    ("statuses", "code", "verdict"),
    [
        (["pass", "unproven", "pass"], 3, "unproven"),
        (["pass", "error", "fail"], 1, "fail"),
        (["unstable", "pass", "pass"], 3, "unstable"),
        (["pass", "pass", "pass"], 0, "pass"),
    ],
)
def test_precedence_over_parts(tmp_path: Path, statuses: list[Status], code: int, verdict: str) -> None:
    names = ("verify", "checkpoint", "staging")
    wanted = [Step(name, made(tmp_path / "runs", name, each)) for name, each in zip(names, statuses, strict=True)]
    result = follow(request(tmp_path), wanted, Quiet())
    assert result.code == code
    assert result.record is not None
    assert result.record.verdict is not None
    assert result.record.verdict.status == verdict


def test_a_dry_run_says_why_a_part_cannot_run_and_is_not_0(tmp_path: Path) -> None:
    wanted = [
        Step("checkpoint", raising(CannotJudge("no torch here", "install it"))),
        # What a dry run of a part that can run leaves.
        Step("staging", lambda: (None, None)),
    ]
    progress = Quiet()
    asked = request(tmp_path, dry_run=True)
    with pytest.raises(CannotJudge, match="`checkpoint` cannot run here") as caught:
        follow(asked, wanted, progress)
    assert "--skip" in str(caught.value.hint)
    assert [line for line in progress.lines if "ERROR" in line] == ["checkpoint: ERROR: no torch here; install it"]


def test_after_a_fail_of_verify_nothing_is_measured(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    called = []
    wanted = [
        Step("verify", made(runs, "verify", "fail")),
        Step("checkpoint", lambda: called.append("checkpoint") or made(runs, "checkpoint", "pass")()),  # type: ignore[func-returns-value]
    ]
    result = follow(request(tmp_path), wanted, Quiet())
    assert result.code == ExitCode.FALLS_SHORT
    assert not called
    assert result.record is not None
    assert [part.status for part in result.record.parts or []] == ["fail", "skip"]
    assert "--anyway" in (result.record.parts or [])[1].reasons[0]
    result = follow(request(tmp_path, anyway=True), wanted, Quiet())
    assert called == ["checkpoint"]
    # A part that fell short still does.
    assert result.code == ExitCode.FALLS_SHORT


def test_a_verify_that_could_not_judge_stops_nothing(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    wanted = [Step("verify", made(runs, "verify", "unproven")), Step("checkpoint", made(runs, "checkpoint", "pass"))]
    result = follow(request(tmp_path), wanted, Quiet())
    assert [part.status for part in (result.record.parts if result.record else None) or []] == ["unproven", "pass"]


@pytest.mark.parametrize(
    "error",
    [
        UsageProblem("`/dev/shm` is too small: 17 GB are needed", "stage less"),
        CannotJudge("busy: somebody is at work"),
        OSError(5, "Input/output error", "/mnt/x"),
    ],
)
def test_a_part_that_cannot_run_is_a_line_and_the_others_go_on(tmp_path: Path, error: Exception) -> None:
    runs = tmp_path / "runs"
    wanted = [
        Step("verify", made(runs, "verify", "pass")),
        Step("staging", raising(error)),
        Step("strategies", made(runs, "strategies", "pass")),
    ]
    result = follow(request(tmp_path), wanted, Quiet())
    assert result.code == ExitCode.NOT_JUDGED
    assert result.record is not None
    assert result.path is not None
    assert [part.status for part in result.record.parts or []] == ["pass", "error", "pass"]
    shown = on_screen(result.record, result.path)
    assert all(len(line) <= WIDTH for line in shown.splitlines())
    said = str(error) if not isinstance(error, OSError) else "`/mnt/x`: Input/output error"
    assert said[:30] in " ".join(shown.split())
    assert shown.rstrip().endswith("ERROR")


def test_a_wrong_call_ends_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="nothing to measure"):
        follow(request(tmp_path), [Step("verify", raising(UsageProblem("nothing to measure")))], Quiet())
    assert not list((tmp_path / "runs").iterdir())


def test_ctrl_c_ends_the_chain_and_says_what_is_done(tmp_path: Path) -> None:
    runs, progress = tmp_path / "runs", Quiet()
    called: list[str] = []

    def interrupted() -> Outcome:
        raise KeyboardInterrupt

    wanted = [
        Step("verify", made(runs, "verify", "pass")),
        Step("checkpoint", interrupted),
        Step("staging", lambda: called.append("staging") or (None, None)),  # type: ignore[func-returns-value]
    ]
    with pytest.raises(KeyboardInterrupt):
        follow(request(tmp_path), wanted, progress)
    assert not called
    assert sorted(path.name.split("-")[1] for path in runs.iterdir()) == ["bench.reference", "verify"]
    assert progress.lines[-2].startswith("interrupted; done: verify (")
    assert progress.lines[-1].startswith("the measurements until then are kept in `")


def test_the_page_has_every_part_with_a_link_to_its_own_page(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    read = measurement("sequential.read", 5e9, host="n1")
    cell: dict[str, object] = {
        **{"model": "m", "tuning": "full", "parameters": 1e6, "trained": 1e6, "launcher": "ssh", "compute": "cpu"},
        **{"nodes": 1, "ranks": 1, "zero_stage": 2, "sent_bytes": 0, "state_bytes": 9, "batch_size": 2, "steps": 8},
    }
    step = measurement("strategies.step.1x1.z2", 0.5, "duration", parameters=cell)
    wanted = [
        Step("verify", made(runs, "verify", "pass", read), headlines.verify),
        Step("staging", raising(CannotJudge("`/dev/shm` is <small>"))),
        Step("strategies", made(runs, "strategies", "unstable", step), headlines.strategies),
    ]
    result = follow(request(tmp_path, skip=("checkpoint",)), wanted, Quiet())
    assert result.record is not None
    assert result.path is not None
    path = write_page(result.record, result.path)
    assert path == result.path.parent / "report.html"
    shown = path.read_text()
    rows = [re.sub("<[^>]*>", "|", row) for row in shown.splitlines() if row.startswith("<tr><td>")]
    parts = {row.strip("|").split("|")[0]: row for row in rows[:4]}
    assert list(parts) == ["verify", "checkpoint", "staging", "strategies"]
    assert "PASS" in parts["verify"]
    assert "not run" in parts["checkpoint"]
    assert "is &lt;small&gt;" in parts["staging"]
    # The parts that made a record have pages of their own, which are beside them by now.
    links = re.findall('href="([^"]+)"', shown)
    assert [(path.parent / link).resolve().is_file() for link in links] == [True, True]
    assert [link.split("/")[1] for link in links] == [(result.record.parts or [])[number].run for number in (0, 3)]
    for figure in ("5 GB/s", "0.5 s", "1x1.z2"):
        assert figure in shown
    assert shown.count("<svg") == 2


def test_one_round_has_no_interval_on_the_page(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    single = measurement("sequential.read", 1.25e9, samples=[1.25e9])
    # As earlier versions wrote it.
    old = measurement(
        "sequential.write",
        1.5e9,
        samples=[1.5e9],
        confidence={"level": 0.0, "low": 1.5e9, "high": 1.5e9, "method": "range of 1 samples"},
    )
    result = follow(
        request(tmp_path), [Step("verify", made(runs, "verify", "pass", single, old), headlines.verify)], Quiet()
    )
    assert result.record is not None
    path = write_page(result.record, result.path)
    assert path is not None
    shown = path.read_text()
    assert shown.count("<td>none: one round</td>") == 2
    assert "1.25 to 1.25" not in shown
    assert "1.5 to 1.5" not in shown


@pytest.mark.parametrize("name", ["staging", "strategies"])
def test_a_part_that_failed_has_a_page_with_its_reasons(tmp_path: Path, name: str) -> None:
    wanted = [Step(name, made(tmp_path / "runs", name, "error"))]
    result = follow(request(tmp_path), wanted, Quiet())
    assert result.record is not None
    path = write_page(result.record, result.path)
    assert path is not None
    (link,) = re.findall('href="([^"]+)"', path.read_text())
    shown = (path.parent / link).read_text()
    assert f"<li>{name} is error</li>" in shown
    assert "ERROR" in shown
    assert "<table" not in shown
    assert "<svg" not in shown


@pytest.mark.parametrize("run", ["..", "", "../elsewhere", "/srv/run", "a/b", "."])
def test_a_part_whose_record_is_not_beside_is_refused(run: str) -> None:
    document = records.to_document(
        record(kind="bench.reference", parts=[Part(name="verify", run="run", status="pass")])
    )
    document["parts"][0]["run"] = run
    document["sha256"] = documents.checksum(document)
    with pytest.raises(UsageProblem, match=r"is not a record: parts\.0\.run: "):
        records.parse(json.dumps(document), "record.json")


def test_no_page_is_written_through_a_link_or_for_a_circle(tmp_path: Path) -> None:
    runs, elsewhere = tmp_path / "runs", tmp_path / "elsewhere"
    _, there = made(elsewhere, "strategies", "pass")()
    assert there is not None
    chain = record(kind="bench.reference", parts=[Part(name="strategies", run="link", status="pass")])
    path = records.write(chain, runs)
    (runs / "link").symlink_to(there.parent)
    with pytest.raises(UsageProblem, match="leads out of"):
        write_page(chain, path)
    assert [each.name for each in there.parent.iterdir()] == ["record.json"]
    own = chain.model_copy(update={"parts": [Part(name="itself", run=path.parent.name, status="pass")]})
    path.write_text(records.dumps(own))
    assert write_page(own, path) == path.parent / "report.html"


def test_a_long_name_of_a_bar_is_not_cut_off() -> None:
    name = "checkpoint-engine-with-a-long-name.restore node1"
    plot = bars("x", [Bar(name, 1, 1, 1, "#000"), Bar("short", 2, 2, 2, "#000")])
    ends = [float(x) for x in re.findall(r'<text x="([^"]+)"[^>]*text-anchor="end"', plot)]
    assert len(set(ends)) == 1
    assert ends[0] > 6 * len(name)
    assert max(float(x) for x in re.findall(r' x="([^"]+)"', plot)) < 760


def test_there_is_no_page_where_nothing_was_run(tmp_path: Path) -> None:
    result = follow(request(tmp_path), [Step("staging", raising(CannotJudge("no")))], Quiet())
    assert result.record is not None
    assert write_page(result.record, result.path) is None


def test_the_best_checkpoint_of_every_host_is_the_headline(tmp_path: Path) -> None:
    figures = [
        measurement(f"checkpoint.{engine}.{kind}", value, host=host)
        for host in ("a", "b")
        for engine, kind, value in (("direct", "durable", 3e9), ("direct", "restore", 4e9), ("dcp", "durable", 1e9))
    ]
    record, _ = made(tmp_path, "checkpoint", "pass", *figures)()
    assert record is not None
    chosen = headlines.checkpoint(record)
    assert [(each.host, each.name) for each in chosen] == [
        (host, f"checkpoint.direct.{kind}") for host in ("a", "b") for kind in ("durable", "restore")
    ]


def test_parts_are_chosen_by_name(tmp_path: Path) -> None:
    asked = request(tmp_path, skip=("verify", "staging"))
    assert [step.name for step in steps(asked, Quiet())] == ["checkpoint", "strategies"]
    with pytest.raises(UsageProblem, match="`--skip stagging` is not a part"):
        steps(request(tmp_path, skip=("stagging",)), Quiet())
    with pytest.raises(UsageProblem, match="leaves nothing"):
        steps(request(tmp_path, skip=("verify", "checkpoint", "staging", "strategies")), Quiet())


def test_an_impossible_state_is_refused_before_measuring(tmp_path: Path) -> None:
    small = request(tmp_path, state_bytes=20_000_000)
    with pytest.raises(UsageProblem, match="`--state-bytes 20000000` is too little for `--model phi3-mini`"):
        steps(small, Quiet())
    assert len(steps(replace(small, skip=("checkpoint",)), Quiet())) == 3
    assert len(steps(replace(small, inventory=tmp_path / "hosts.yml"), Quiet())) == 4
    assert len(steps(replace(small, checkpoint_model="tiny"), Quiet())) == 4


def test_hosts_are_asked_for_the_same_checkpoints(tmp_path: Path) -> None:
    asked = request(tmp_path, device="cpu", ranks_per_node=2, state_bytes=10**8, allow_busy=True)
    argv = checkpoint_arguments(asked)
    read = benchmark("checkpoint").make_context("checkpoint", argv).params
    assert (read["target"], read["state_bytes"], read["ranks"], read["allow_busy"]) == (
        tmp_path,
        10**8,
        2,
        True,
    )


@pytest.mark.parametrize(
    ("asked", "rounds", "budget", "thorough", "pace"),
    [
        ({}, None, None, False, Pace(15, 300.0, QUICK_LOOKS)),
        ({"budget": 90.0}, None, 90.0, False, Pace(15, 90.0, QUICK_LOOKS)),
        ({"rounds": 2}, 2, None, False, Pace(2)),
        ({"thorough": True}, 3, None, True, Pace(3)),
        ({"thorough": True, "rounds": 1}, 1, None, True, Pace(1)),
    ],
)
def test_its_parts_make_as_many_rounds_as_it_says(
    asked: dict[str, Any], rounds: int | None, budget: float | None, thorough: bool, pace: Pace, tmp_path: Path
) -> None:
    made = request(tmp_path, **asked)
    assert made.in_rounds == {"rounds": rounds, "budget": budget, "thorough": thorough}
    assert made.pace == pace
    on_hosts = benchmark("checkpoint").make_context("checkpoint", checkpoint_arguments(made)).params
    assert {name: on_hosts[name] for name in made.in_rounds} == made.in_rounds


def ansible(*arguments: object) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("ansible", reason="Ansible's control side needs Python 3.11")
    return call(str(BIN / "ansible-playbook"), *map(str, arguments), cwd=ROOT)


@pytest.mark.skipif(not (BIN / "tunetool").exists(), reason="tunetool is not installed as a program here")
def test_the_playbook_is_the_command(tmp_path: Path) -> None:
    inventory = tmp_path / "hosts.yml"
    inventory.write_text("all: {hosts: {n1: {}}}\n")
    done = ansible("playbooks/bench.yml", "-i", inventory, "-i", "localhost,")
    assert done.returncode == 2
    assert "give one inventory" in " ".join(done.stdout.split())
    options = '{"bench_options": ["--skip", "stagging"]}'
    done = ansible("playbooks/bench.yml", "-i", inventory, "-e", options)
    assert done.returncode == 2
    assert "`--skip stagging` is not a part" in " ".join(done.stdout.split())


@pytest.mark.skipif(not (BIN / "tunetool").exists(), reason="tunetool is not installed as a program here")
def test_a_record_comes_back_from_every_host(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "data").write_bytes(b"x" * 5000)
    inventory = tmp_path / "hosts.yml"
    inventory.write_text(
        f"all: {{vars: {{ansible_connection: local, ansible_python_interpreter: {sys.executable}, ansible_become: false, "
        f"tunetool_prefix: {BIN.parent}}}, hosts: {{n1: {{}}}}}}\n"
    )
    arguments = f'["--runs-dir", "{tmp_path / "runs"}", "{source}", "{tmp_path / "copy"}"]'
    variables = f'{{"run_tunetool_command": ["stage"], "run_tunetool_arguments": {arguments}}}'
    done = ansible("playbooks/run_tunetool.yml", "-i", inventory, "-e", variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "copy/data").read_bytes() == b"x" * 5000
