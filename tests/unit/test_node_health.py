"""The node's health: its units, its checks and their cost in imports, the rules for idle nodes, measurements and Slurm."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from builders import record, sampled, wanted_read
from machines import RECORDED, lay_out_drives
from programs import need_program
from tunetool.health import check as checking
from tunetool.health import results, slurm
from tunetool.health.check import busy, check, due
from tunetool.health.measure import measure
from tunetool.health.results import Files, Health, Result, current, health, keep, of_checks, read
from tunetool.measure.session import Run
from tunetool.node.audit.manifest_checks import run_checks
from tunetool.node.common.check_result import Check
from tunetool.node.common.commands import Result as Done
from tunetool.node.common.drift import Ledger
from tunetool.node.common.settings_file import SettingsError
from tunetool.node.health import health_units, kernel_faults
from tunetool.node.health.settings import dump, load
from tunetool.node.memory.memory_checks import Attempt
from tunetool.node.plan.plan_file import TEARDOWN
from tunetool.node.removal.apply import Job
from tunetool.node.removal.decision import Removal, Volume
from tunetool.node.volume import program_units
from tunetool.node.volume.named_volume import describe_volume
from tunetool.node.volume.unit_dropins import ForeignDropIn
from tunetool.node.volume.write_read_probe import Answer, Question
from tunetool.record import CheckResult, Verdict
from tunetool.report.progress import PlainProgress
from tunetool.verify.request import Request
from tunetool.verify.run import verify

PROGRAM = "/opt/tunetool/bin/tunetool"
SOCKET = "/run/tunetool/health.sock"
SETTINGS: dict[str, Any] = {
    "schema": "tunetool.health/1",
    "period_seconds": 900,
    "measure_seconds": 86400,
    "textfile_directory": "",
    "ignored_checks": [],
}
NOW = 1.8e9


def converge(root: Path, wanted: dict[str, str]) -> list[str]:
    needed = health_units.changes(wanted, PROGRAM, str(root))
    for change in needed:
        program_units.put(change)
    return sorted("/" + os.path.relpath(change.path, root) for change in needed)


def left(root: Path) -> set[str]:
    return {"/" + str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() or path.is_symlink()}


def test_files_come_and_go(tmp_path: Path) -> None:
    without = health_units.files(PROGRAM, dump(900, 0, "", []), 900, "")
    with_socket = health_units.files(PROGRAM, dump(900, 0, "", []), 900, SOCKET)
    assert converge(tmp_path, {}) == []
    assert not health_units.installed(str(tmp_path))
    assert converge(tmp_path, with_socket) == sorted(with_socket)
    assert converge(tmp_path, with_socket) == []
    assert health_units.installed(str(tmp_path))
    for path in with_socket:
        if ".wants/" in path:
            assert (tmp_path / path[1:]).resolve() == tmp_path / "etc/systemd/system" / Path(path).name
    assert converge(tmp_path, without) == sorted(set(with_socket) - set(without))
    assert left(tmp_path) == set(without)
    converge(tmp_path, {})
    assert left(tmp_path) == set()


def test_metrics_that_nobody_renews_are_named(tmp_path: Path) -> None:
    textfiles = tmp_path / "prom"
    textfiles.mkdir()
    assert health_units.stale_metrics("", str(tmp_path)) == []
    converge(tmp_path, health_units.files(PROGRAM, dump(900, 0, str(textfiles), []), 900, ""))
    (textfiles / "tunetool-health.prom").touch()
    (textfiles / "node.prom").touch()
    assert health_units.stale_metrics(str(textfiles), str(tmp_path)) == []
    for other in ("", "/elsewhere"):
        assert health_units.stale_metrics(other, str(tmp_path)) == [str(textfiles / "tunetool-health.prom")]


@pytest.mark.parametrize("path", ["etc/systemd/system/tunetool-health.service", "opt/tunetool/bin/tunetool-health"])
def test_a_file_of_our_name_that_is_not_ours_stays(tmp_path: Path, path: str) -> None:
    theirs = tmp_path / path
    theirs.parent.mkdir(parents=True)
    theirs.write_text("theirs\n")
    assert converge(tmp_path, {}) == []
    with pytest.raises(ForeignDropIn):
        converge(tmp_path, health_units.files(PROGRAM, "", 900, ""))
    assert left(tmp_path) == {"/" + path}


def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    need_program("systemd-analyze")
    converge(tmp_path, health_units.files(PROGRAM, "", 900, SOCKET))
    starter = tmp_path / "opt/tunetool/bin/tunetool-health"
    starter.chmod(0o755)
    units = tmp_path / "etc/systemd/system"
    names = [path.name for path in units.iterdir() if path.is_file()]
    assert len(names) == 5
    for path in map(units.joinpath, names):
        path.write_text(path.read_text().replace(str(starter)[len(str(tmp_path)) :], str(starter)))
    done = subprocess.run(
        ["systemd-analyze", "verify", *(units / name.replace("@", "@1") for name in names)],
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{units}:"},
        capture_output=True,
        text=True,
        check=False,
    )
    complaints = [line for line in done.stderr.splitlines() if "tunetool-health" in line]
    assert complaints == []


def test_the_starter_runs_the_installed_versions_python(tmp_path: Path) -> None:
    program = tmp_path / "a b'c/bin/tunetool"
    for version in ("venv-1", "venv-2"):
        python = tmp_path / "a b'c" / version / "bin/python"
        python.parent.mkdir(parents=True)
        python.write_text(f"#!/bin/sh\necho {version} $@\n")
        python.chmod(0o755)
        (python.parent / "tunetool").touch()
    program.parent.mkdir()
    starter = Path(health_units.starter_path(str(program)))
    starter.write_text(health_units.files(str(program), "", 900, "")[str(starter)])
    shown = []
    for version in ("venv-1", "venv-2"):
        program.unlink(missing_ok=True)
        program.symlink_to(f"../{version}/bin/tunetool")
        for arguments in ([], ["check"]):
            shown.append(subprocess.run(["sh", starter, *arguments], capture_output=True, text=True, check=True).stdout)
    assert shown == [
        f"{version} -I -m tunetool.health {act}\n" for version in ("venv-1", "venv-2") for act in ("slurm", "check")
    ]


def test_settings_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "health.json"
    with pytest.raises(SettingsError, match="the health check is off"):
        load(str(path))
    path.write_text(dump(600, 7200, "/srv/prom", ["drives.wear"]))
    assert load(str(path))["measure_seconds"] == 7200
    path.write_text(path.read_text().replace("600", "6"))
    with pytest.raises(SettingsError, match=r"run `tunetool provision`"):
        load(str(path))


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["check", "check"]])
def test_a_wrong_call_is_refused(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "tunetool.health", *arguments], capture_output=True, check=False)
    assert (done.returncode, done.stderr[:6]) == (2, b"usage:")


# --- the checks


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """A node whose owner's volume is /proc: the only one that is mounted everywhere."""
    node = Files(tmp_path)
    manifest = json.loads((RECORDED / "built-manifest.json").read_text())
    manifest |= {
        "array": None,
        "filesystem": describe_volume("/proc"),
        "memory": {"hugepages": [], "shm_bytes": None, "memlock": None},
        "offload_dir": None,
        "expect": {"read": 1e9},
    }
    node.manifest.parent.mkdir(parents=True)
    node.manifest.write_text(json.dumps(manifest))
    # The kernel has logged nothing.
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kmsg").touch()
    return node


@pytest.fixture
def no_start(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Instead of starting a unit of this very machine, the volume that would be measured."""
    started: list[str] = []
    monkeypatch.setattr(checking, "_measure_if_idle", started.append)
    return started


def test_it_asks_what_verify_asks(files: Files, no_start: list[str], tmp_path: Path) -> None:
    request = Request(level="config", manifest=files.manifest, run=Run(runs_dir=tmp_path / "runs"))
    of_verify = verify(request, PlainProgress()).record
    assert of_verify is not None
    assert of_verify.verdict is not None
    textfiles = tmp_path / "prom"
    textfiles.mkdir()
    status = check({**SETTINGS, "textfile_directory": str(textfiles)}, files)
    assert status == of_verify.verdict.status == "pass"
    (page,) = textfiles.iterdir()
    families = {family.name: family for family in text_string_to_metric_families(page.read_text())}
    values = {sample.labels["check"]: sample.value for sample in families["tunetool_check"].samples}
    codes = {"pass": 0.0, "fail": 1.0, "unknown": 2.0, "skip": 3.0}
    of_log = dict.fromkeys(kernel_faults.CHECKS, 0.0)
    assert values == {each.id: codes[each.status] for each in of_verify.checks} | of_log
    verdicts = {sample.labels["status"]: sample.value for sample in families["tunetool_verdict"].samples}
    assert {name for name, value in verdicts.items() if value} == {"pass"}
    assert {sample.labels["kind"] for family in families.values() for sample in family.samples} == {"health"}
    assert families["tunetool_cpu_seconds"].samples[0].value > 0
    files.settings.write_text(dump(900, 0, "", []))
    assert current(files) == Health("pass")
    assert no_start == [["/proc"]]


def test_a_fault_is_seen_by_the_next_check(files: Files, no_start: list[str]) -> None:
    files.settings.write_text(dump(900, 0, "", []))
    check(SETTINGS, files)
    document = json.loads(files.manifest.read_text())
    document["filesystem"]["mount_point"] = "/nowhere"
    files.manifest.write_text(json.dumps(document))
    no_start.clear()
    assert check(SETTINGS, files) == "fail"
    assert current(files).status == "fail"
    assert current(files).reasons[0].startswith("filesystem.mounted: `/nowhere`")
    assert no_start == [], "a sick node is not measured"
    assert check({**SETTINGS, "ignored_checks": ["filesystem.*"]}, files) == "pass"


def test_a_result_that_cannot_be_read_is_no_pass(files: Files, no_start: list[str]) -> None:
    files.settings.write_text(dump(900, 3600, "", []))
    check(SETTINGS, files)
    assert current(files).status == "pass"
    files.measured.mkdir(parents=True)
    assert current(files).status == "unknown"
    assert str(files.measured) in current(files).reasons[0]


@pytest.mark.parametrize(("text", "words"), [(None, "there is none"), ("{}", "")])
def test_without_a_manifest_nothing_is_known(files: Files, no_start: list[str], text: str | None, words: str) -> None:
    files.manifest.unlink() if text is None else files.manifest.write_text(text)
    assert check(SETTINGS, files) == "unproven"
    result = read(files.checked)
    assert result is not None
    assert words in result.doubts[0]
    assert no_start == []


def test_a_check_imports_nothing_large(files: Files) -> None:
    """Its start is most of its cost: pydantic alone, or click, would add half again."""
    program = (
        "import sys, json; from pathlib import Path; from tunetool.health.results import Files;"
        "from tunetool.health.check import check; import tunetool.health.slurm, tunetool.health.answer;"
        "check(json.loads(sys.argv[1]), Files(Path(sys.argv[2]))); print(*sys.modules)"
    )
    settings = json.dumps({**SETTINGS, "measure_seconds": 0})
    done = subprocess.run(
        [sys.executable, "-c", program, settings, str(files.root)], capture_output=True, text=True, check=True
    )
    imported = set(done.stdout.split())
    assert "tunetool.node.audit.manifest_checks" in imported
    assert imported.isdisjoint({"pydantic", "click", "rich", "jinja2", "xxhash", "tunetool.record", "asyncio"})


def test_a_lock_that_held_is_not_tried_again_for_a_day() -> None:
    tried: list[str] = []

    def lock(kind: str, size: int) -> Attempt:
        tried.append(kind)
        return Attempt(65534, False, -1, size, "" if kind == "login" else "Cannot allocate memory")

    def run(earlier: dict[str, Any], now: float, size: int = 100) -> dict[str, Any]:
        locker = checking._Remembering(earlier, now, lock)
        assert locker("login", size).locked == size or size < 100
        locker("service", size)
        # As a file keeps it.
        kept: dict[str, Any] = json.loads(json.dumps(locker.locked))
        return kept

    kept = run({}, NOW)
    assert tried == ["login", "service"]
    tried.clear()
    kept = run(kept, NOW + 900)
    assert tried == ["service"], "what failed is tried by every check"
    for later, size in ((NOW + 86401, 100), (NOW - 10, 100), (NOW + 900, 200)):
        tried.clear()
        run(kept, later, size)
        assert tried == ["login", "service"], (later, size)
    tried.clear()
    run({"login": {"at": "x"}, "service": 3}, NOW)
    assert tried == ["login", "service"], "a file that somebody edited"


@pytest.mark.parametrize("by_hand", [0, 200])
@pytest.mark.parametrize(("period", "least"), [(120, 1 << 16), (900, (1 << 20) + (16 << 10)), (3600, 1 << 20)])
def test_checks_write_at_most_100_mib_in_a_day(
    monkeypatch: pytest.MonkeyPatch, period: int, least: int, by_hand: int
) -> None:
    """With the timer alone each writes; with others by hand the limit holds in every window of a day."""
    monkeypatch.setattr(checking, "ask_all", lambda questions: [Answer()])
    written: Any = []
    moments = [NOW + period * step for step in range(2 * 86400 // period)]
    moments += [NOW + 40000 + 7 * step for step in range(by_hand)]
    sizes: list[tuple[float, int]] = []
    for now in sorted(moments):
        volume = checking._Volume(written, {"period_seconds": period}, now)
        if not volume.writing.refused:
            question = Question("/x", "/x/y", pieces=8, step=1 << 19, bytes=volume.writing.bytes - (16 << 10))
            volume([question])
            sizes.append((now, question.moved))
        written = volume.written
    for first, _ in sizes[::40]:
        assert sum(size for at, size in sizes if first <= at < first + 86400) <= 100 << 20
    if not by_hand:
        assert len(sizes) == len(moments)
        assert min(size for _, size in sizes) >= least


@pytest.mark.parametrize("period", [60, 120, 900, 3600])
def test_the_bytes_of_a_day_are_for_all_volumes_together(monkeypatch: pytest.MonkeyPatch, period: int) -> None:
    monkeypatch.setattr(checking, "ask_all", lambda questions: [Answer(written=1, seconds=0.5)] * len(questions))
    names = [f"drive{number}" for number in range(8)]
    written: Any = []
    sizes: list[tuple[float, int]] = []
    for now in range(0, 2 * 86400, period):
        volume = checking._Volume(written, {"period_seconds": period}, NOW + now)
        volume.divide(names)
        if not volume.writing.refused:
            most = volume.writing.bytes - (16 << 10)
            questions = [Question(f"/x/{name}", f"/x/{name}/y", bytes=most) for name in names]
            volume(questions)
            sizes += [(now, question.moved) for question in questions]
        assert not volume.writing.refused or not volume.writing.doubtful
        written = volume.written
    for first in range(0, 86400, 3600):
        assert sum(size for at, size in sizes if first <= at < first + 86400) <= 100 << 20
    # Each is written to at least twice in ten minutes, or in each check.
    assert len(sizes) >= 8 * 2 * 86400 // max(period, 300)
    if volume.writing.refused:
        return
    figures = [(name, labels) for name, _, labels, _ in volume.figures()]
    assert ("probe_bytes", {"volume": "drive7"}) in figures
    assert len(figures) == 2 * 8 + 1


def test_a_check_asks_each_volume_and_names_a_silent_one(tmp_path: Path) -> None:
    manifest = lay_out_drives(tmp_path)
    asked: list[Question] = []

    def answer(questions: Sequence[Question]) -> Sequence[Answer]:
        asked.extend(questions)
        well, silent = Answer(written=1, is_directory=True), Answer(silent_at="write")
        return [silent if question.mount_point.endswith("drive3") else well for question in questions]

    checks = {each.id: each for each in run_checks(manifest, str(tmp_path), asker=answer)}
    assert [question.mount_point for question in asked] == [f"/mnt/nvme_raid0/drive{at}" for at in range(8)]
    silent = checks["filesystem.answers"]
    assert silent.status == "fail"
    assert silent.found == "`drive3`: the volume did not answer for 10 s (write)"
    reason = results.in_a_line([f"{silent.id}: {silent.found}"], 200)
    assert reason == "filesystem.answers: `drive3`: the volume did not answer for 10 s (write)"


def test_a_day_s_bytes_used_up_are_no_pass(files: Files, no_start: list[str]) -> None:
    """What a check wrote in vain is no proof, and a node that could not be asked is not called well."""
    document = json.loads(files.manifest.read_text())
    document["offload_dir"] = "/proc"
    files.manifest.write_text(json.dumps(document))
    files.kept.parent.mkdir(parents=True)
    files.kept.write_text(json.dumps({"written": [[time.time() - 60, 100 << 20]]}))
    assert check(SETTINGS, files) == "unproven"
    result = read(files.checked)
    assert result is not None
    assert (
        "filesystem.answers: it answers; nothing was written: the checks of a day have written 100 MiB" in result.doubts
    )
    files.kept.write_text('{"written": [["x"]], "kernel": 3}')
    assert check(SETTINGS, files) == "pass", "a file that somebody edited"


def test_what_is_switched_off_is_skipped(files: Files, no_start: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Question] = []
    monkeypatch.setattr(checking, "ask_all", lambda questions: asked.extend(questions) or [Answer()])
    (files.root / "dev/kmsg").unlink()
    settings_ = {**SETTINGS, "write": False, "kernel_log": False, "textfile_directory": str(files.root)}
    assert check(settings_, files) == "pass"
    assert [question.write for question in asked] == [False]
    page = (files.root / "tunetool-health.prom").read_text()
    assert 'check="kernel.drives"} 3' in page
    assert 'check="filesystem.answers"} 3' in page


def test_faults_and_what_was_written_are_in_the_metrics(
    files: Files, no_start: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checking, "ask_all", lambda questions: [Answer(written=1 << 20, seconds=0.25)])
    # A fault counts for a day: one from the beginning of this boot might be too old.
    (files.root / "dev/kmsg").write_text(f"3,1,{int(time.monotonic() * 1e6)},-;XFS (proc): log I/O error -5\n")
    (files.root / "proc/self").mkdir(parents=True)
    (files.root / "proc/self/mountinfo").write_text("25 1 0:22 / /proc rw - xfs /dev/proc rw\n")
    os.utime(files.manifest, (0, 0))
    assert check({**SETTINGS, "textfile_directory": str(files.root)}, files) == "fail"
    page = (files.root / "tunetool-health.prom").read_text()
    samples = {
        sample.name: (sample.labels, sample.value)
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    assert samples["tunetool_probe_bytes"][1] == 1 << 20
    assert samples["tunetool_probe_seconds"][1] == 0.25
    assert samples["tunetool_probe_day_bytes"][1] == (1 << 20) + (16 << 10)
    labels, value = samples["tunetool_kernel_faults"]
    assert (labels["fault"], labels["device"], value) == ("xfs_io_error", "proc", 1)


OK, BAD, DARK = Result(NOW, "pass"), Result(NOW, "fail", ["a: x"]), Result(NOW, "unproven", (), ["b: y"])


@pytest.mark.parametrize(
    ("checked", "measured", "later", "status", "reason"),
    [
        (None, None, 0, "unknown", "there is no result yet"),
        (OK, None, 2700, "pass", None),
        (OK, None, 2701, "unknown", "there is no result that is recent"),
        (OK, None, -1, "unknown", "there is no result that is recent"),
        (OK, OK, 0, "pass", None),
        (BAD, OK, 0, "fail", "a: x"),
        (BAD, None, 2701, "unknown", "there is no result that is recent"),
        (DARK, OK, 0, "unknown", "b: y"),
        (OK, Result(0, "fail", ["read: slow"]), 0, "fail", "read: slow"),
        (DARK, Result(0, "fail"), 0, "fail", "verify: it falls short"),
        (None, Result(0, "fail", ["read: slow"]), 0, "fail", "read: slow"),
    ],
)
def test_health_is_what_is_recent(
    checked: Result | None, measured: Result | None, later: float, status: str, reason: str | None
) -> None:
    now = health(checked, measured, NOW + later, 900)
    assert (now.status, next(iter(now.reasons), None)) == (status, reason)


CHECKS = st.lists(
    st.builds(
        Check, st.sampled_from("abc"), st.sampled_from(["pass", "fail", "skip", "unknown"]), st.just(""), st.just("")
    )
)


@given(CHECKS)
def test_the_verdict_is_that_of_a_record(checks: list[Check]) -> None:
    from tunetool.record import as_result
    from tunetool.verdict import Case, judge

    assert of_checks(checks, [], NOW).status == judge(Case(checks=[*map(as_result, checks)], judged="checks")).status


# --- measuring


@pytest.mark.parametrize(
    ("measured", "every", "expected"),
    [
        ({}, 86400, True),
        ({}, 0, False),
        ({"recorded": NOW - 86399, "tried": NOW - 86399, "status": "pass"}, 86400, False),
        ({"recorded": NOW - 86401, "tried": NOW - 86401, "status": "pass"}, 86400, True),
        # Unproven or unstable leaves no status: tomorrow again, not in an hour.
        ({"recorded": NOW - 4000, "tried": NOW - 4000}, 86400, False),
        ({"recorded": NOW - 4000, "tried": NOW - 4000, "status": "fail"}, 86400, True),
        ({"recorded": NOW - 3000, "tried": NOW - 3000, "status": "fail"}, 86400, False),
        # It was ended for a job.
        ({"tried": NOW - 3000}, 86400, False),
        ({"tried": NOW - 3601}, 86400, True),
        ({"recorded": NOW + 99999, "tried": NOW + 99999, "status": "pass"}, 86400, True),
        ({"recorded": "x", "tried": None}, 86400, True),
    ],
)
def test_a_measurement_is_due(measured: dict[str, Any], every: int, expected: bool) -> None:
    assert due(measured, {"measure_seconds": every}, NOW) is expected


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """An idle machine, with one process."""
    process = tmp_path / "proc/7"
    (process / "fd").mkdir(parents=True)
    (tmp_path / "proc/loadavg").write_text("9.00 1.00 0.10 1/99 7\n")
    (process / "cmdline").write_bytes(b"bash\0")
    (process / "comm").write_text("bash\n")
    return tmp_path


def test_an_idle_machine_is_idle(proc: Path) -> None:
    assert busy(["/mnt/scratch"], 2, str(proc)) is None


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda root: (root / "proc/loadavg").write_text("0.00 1.01 9.00 1/99 7\n"), "the load is 1.01"),
        (lambda root: (root / "proc/loadavg").write_text("\n"), "the load cannot be read"),
        (lambda root: (root / "proc/7/cmdline").write_bytes(b"slurmstepd: [4711.batch]\0"), "Slurm job 4711"),
        (lambda root: (root / "proc/7/fd/3").symlink_to("/dev/nvidia0"), "`bash`) has a GPU open"),
    ],
)
def test_a_machine_at_work_is_not(proc: Path, make: Callable[[Path], object], words: str) -> None:
    make(proc)
    assert words in str(busy(["/mnt/scratch"], 2, str(proc)))


def test_the_load_of_a_large_machine_may_be_larger(proc: Path) -> None:
    (proc / "proc/loadavg").write_text("0.00 11.20 0.00 1/99 7\n")
    assert busy([], 224, str(proc)) is None
    assert busy([], 223, str(proc)) == "the load is 11.2"


def test_a_process_with_a_file_of_the_volume_open_is_work(tmp_path: Path) -> None:
    mount = "29 1 259:9 / /mnt/scratch rw - xfs /dev/md127 rw\n"
    for pid in ("self", "7"):
        (tmp_path / "proc" / pid / "fdinfo").mkdir(parents=True)
        (tmp_path / "proc" / pid / "mountinfo").write_text(mount)
    (tmp_path / "proc/loadavg").write_text("0 0 0 1/9 7\n")
    (tmp_path / "proc/mounts").write_text("/dev/md127 /mnt/scratch xfs rw 0 0\n")
    assert busy(["/mnt/scratch"], 2, str(tmp_path)) is None
    (tmp_path / "proc/7/cwd").symlink_to("/mnt/scratch/data")
    assert "process 7" in str(busy(["/mnt/scratch"], 2, str(tmp_path)))


def printed(tmp_path: Path, status: Any, *reasons: str) -> list[str]:
    page = tmp_path / "record.json"
    verdict = Verdict(status=status, reasons=list(reasons))
    page.write_text(
        record(sampled("read", 1e9, 1e9), kind="verify", verdict=verdict).model_dump_json(exclude_none=True)
    )
    return ["cat", str(page)]


def test_a_measurement_is_kept_and_an_unproven_one_changes_none(tmp_path: Path) -> None:
    node, metrics = Files(tmp_path), {**SETTINGS, "textfile_directory": str(tmp_path)}
    assert measure(metrics, printed(tmp_path, "fail", "read: slow", "write: slow"), list, node) == "fail: read: slow"
    page = (tmp_path / "tunetool-verify.prom").read_text()
    assert 'kind="verify"' in page
    for command in (printed(tmp_path, "unstable", "it swings"), ["false"], ["echo", "{}"], ["echo", "no JSON"]):
        assert measure(metrics, command, list, node)
        kept = read(node.measured)
        assert kept is not None
        assert (kept.status, kept.failed) == ("fail", ("read: slow", "write: slow")), command
    assert measure(metrics, printed(tmp_path, "pass"), list, node) == "pass"
    kept = read(node.measured)
    assert kept is not None
    assert (kept.status, kept.failed) == ("pass", ())


@pytest.mark.parametrize(
    ("failing", "figure", "status", "reasons"),
    [
        (["drives.wear"], "pass", "pass", ()),
        (["drives.wear"], "unstable", None, None),
        (["drives.wear"], "fail", "fail", ("sequential read: slow",)),
        (["drives.wear", "drives.balance"], "pass", "fail", ("drives.balance: x",)),
        ([], "fail", "fail", ("sequential read: slow",)),
    ],
)
def test_an_ignored_check_makes_no_measurement_fail(
    tmp_path: Path, failing: list[str], figure: Any, status: str | None, reasons: tuple[str, ...] | None
) -> None:
    page = tmp_path / "record.json"
    checks = [CheckResult(id=name, status="fail", expected="", found="x") for name in failing]
    slow = [] if figure == "pass" else ["sequential read: slow"]
    verdict = Verdict(status="fail", reasons=[*(f"{name}: x" for name in failing), *slow])
    made = record(kind="verify", checks=checks, expectations=wanted_read(figure), verdict=verdict)
    page.write_text(made.model_dump_json(exclude_none=True))
    measure({**SETTINGS, "ignored_checks": ["drives.w*"]}, ["cat", str(page)], list, Files(tmp_path))
    kept = read(Files(tmp_path).measured)
    assert (kept.status, kept.failed) == (status, reasons) if kept else status is None


def test_a_warning_of_verify_makes_no_measurement_fail(tmp_path: Path) -> None:
    page = tmp_path / "record.json"
    checks = [CheckResult(id="drives.wear", status="fail", expected="", found="x")]
    reasons = ["drives.wear: x", "array.numa: `S1` on 1"]
    verdict = Verdict(status="fail", reasons=reasons, kinds=["check", "note"])
    made = record(kind="verify", checks=checks, expectations=wanted_read("pass"), verdict=verdict)
    page.write_text(made.model_dump_json(exclude_none=True))
    for ignored, kept in (["drives.w*"], ("pass", ())), ([], ("fail", ("drives.wear: x",))):
        measure({**SETTINGS, "ignored_checks": ignored}, ["cat", str(page)], list, Files(tmp_path))
        found = read(Files(tmp_path).measured)
        assert found is not None
        assert (found.status, found.failed) == kept


def test_a_job_ends_the_measurement(tmp_path: Path) -> None:
    marker = tmp_path / "ended"
    program = (
        "import signal, sys; from pathlib import Path\n"
        "def end(number, frame): Path(sys.argv[1]).write_text(str(number)); sys.exit(130)\n"
        "signal.signal(signal.SIGTERM, end); Path(sys.argv[1]).touch()\n"
        "while True: signal.pause()"
    )

    def jobs() -> Sequence[str]:
        return ["Slurm job 5 runs on this node"] if marker.exists() else []

    done = measure(SETTINGS, [sys.executable, "-c", program, str(marker)], jobs, Files(tmp_path))
    assert done == "ended before it was done: Slurm job 5 runs on this node"
    assert marker.read_text() == str(int(signal.SIGTERM))
    assert read(Files(tmp_path).measured) is None


# --- Slurm: the rule against a node that answers as scontrol does; tests/finetune/test_slurm.py has a real one


@dataclass
class Node:
    states: set[str] = field(default_factory=lambda: {"IDLE"})
    reason: str = ""
    more: str = ""
    calls: list[list[str]] = field(default_factory=list)

    def __call__(self, argv: Sequence[str]) -> Done:
        self.calls.append(list(argv))
        if argv[1] == "update":
            wanted = dict(word.split("=", 1) for word in argv[2:])
            assert wanted["NodeName"] == "n1"
            if wanted["State"] == "DRAIN":
                self.states.add("DRAIN")
                self.reason = wanted["Reason"]
            else:
                assert wanted["State"] == "UNDRAIN"
                self.states.discard("DRAIN")
                self.reason = ""
            return Done(0, "", "")
        reason = f" Reason={self.reason} [root@2026-11-23T03:00:00]{self.more}" if self.reason else ""
        return Done(0, f"NodeName=n1 Arch=x86_64 State={'+'.join(sorted(self.states))}* ThreadsPerCore=1{reason}\n", "")


SICK, WELL, UNKNOWN = (
    Health("fail", FAILED := ("array.members: 7 of 8; missing `S1`",)),
    Health("pass"),
    Health("unknown"),
)


@pytest.mark.parametrize("more", ["", " Comment=rack 7"])
def test_a_sick_node_is_drained_once_and_resumed_when_it_is_well(tmp_path: Path, more: str) -> None:
    node, ours = Node(more=more), Files(tmp_path)
    assert slurm.apply(WELL, "n1", ours, node) is None
    assert slurm.apply(UNKNOWN, "n1", ours, node) is None
    assert node.calls == [], "a node that is well asks the controller nothing"
    assert "drained" in str(slurm.apply(SICK, "n1", ours, node))
    assert (node.states, node.reason) == ({"IDLE", "DRAIN"}, "tunetool health: " + FAILED[0])
    assert slurm.apply(SICK, "n1", ours, node) is None
    assert slurm.apply(Health("fail", ["another: fault"]), "n1", ours, node) is None
    assert slurm.apply(UNKNOWN, "n1", ours, node) is None
    assert node.states == {"IDLE", "DRAIN"}
    assert slurm.apply(WELL, "n1", ours, node) == "resumed `n1`"
    assert node.states == {"IDLE"}
    node.calls.clear()
    assert slurm.apply(WELL, "n1", ours, node) is None
    assert node.calls == []


def test_what_a_person_drained_is_theirs(tmp_path: Path) -> None:
    node, ours = Node({"IDLE", "DRAIN"}, "cable"), Files(tmp_path)
    assert slurm.apply(SICK, "n1", ours, node) is None
    assert slurm.apply(WELL, "n1", ours, node) is None
    assert node.reason == "cable"
    down = Node({"DOWN"}, "Not responding")
    assert slurm.apply(SICK, "n1", ours, down) is None
    assert down.states == {"DOWN"}
    # A person takes over a drain of ours, then gives the node back; later it is drained by hand with our words.
    node = Node()
    slurm.apply(SICK, "n1", ours, node)
    words, node.reason = node.reason, "RMA 1234"
    assert slurm.apply(WELL, "n1", ours, node) is None
    assert (node.states, node.reason) == ({"IDLE", "DRAIN"}, "RMA 1234")
    node.reason = words
    assert slurm.apply(WELL, "n1", ours, node) is None
    assert "DRAIN" in node.states


@given(st.lists(st.text(max_size=300), min_size=1, max_size=3))
def test_any_reason_is_one_that_slurm_can_hold(reasons: list[str]) -> None:
    words = slurm.reason_of(Health("fail", reasons))
    assert re.fullmatch(r"tunetool health: [\x20-\x7e]*", words)
    assert '"' not in words
    assert len(words) <= 217
    assert words == words.strip() or words == slurm.PREFIX


@pytest.mark.parametrize(
    "names_it", ["drives.answer: `S3` is silent", "array.members: missing `S3`", "kernel.drives: `S3`"]
)
def test_slurm_s_reason_begins_with_what_names_a_drive(names_it: str) -> None:
    words = slurm.reason_of(Health("fail", ["array.state: state `broken`", names_it, "kernel.array: `md127`"]))
    assert words == f"tunetool health: {names_it} (and 2 more)"


def test_a_node_has_the_name_that_slurm_gives_it() -> None:
    assert slurm.node_name({"SLURMD_NODENAME": "n7"}) == "n7"
    assert "." not in slurm.node_name({})


def test_a_failed_measurement_counts_only_while_one_can_clear_it(files: Files, no_start: list[str]) -> None:
    """Else Slurm's program would drain a node again and again that nothing measures any more."""
    files.settings.write_text(dump(900, 3600, "", []))
    check(SETTINGS, files)
    built = files.manifest.stat().st_mtime
    keep(files.measured, Result(built + 1, "fail", ["read: slow"]))
    assert current(files) == Health("fail", ["read: slow"])
    files.settings.write_text(dump(900, 0, "", []))
    assert current(files) == Health("pass"), "it is never measured again"
    files.settings.write_text(dump(900, 3600, "", []))
    os.utime(files.manifest, (built + 2, built + 2))
    assert current(files) == Health("pass"), "it was built anew, perhaps without an expectation"
    os.utime(files.manifest, (built, built))
    assert current(files).status == "fail"
    files.manifest.unlink()
    assert current(files) == Health("pass"), "what was measured is gone"


def test_results_go_with_the_health_check(tmp_path: Path) -> None:
    node = Files(tmp_path)
    for path in (node.checked, node.answer, node.line, node.measured, node.drained):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert health_units.stale_results(True, True, str(tmp_path)) == []
    assert health_units.stale_results(True, False, str(tmp_path)) == [str(node.measured)]
    # The note of a drain stays: without it the node would be drained for ever.
    assert health_units.stale_results(False, True, str(tmp_path)) == [
        str(path) for path in (node.checked, node.answer, node.line, node.measured)
    ]


def test_metrics_replace_a_link_and_do_not_follow_it(files: Files, no_start: list[str], tmp_path: Path) -> None:
    """The directory may belong to the exporter's user, who could let root replace any file."""
    textfiles, secret = tmp_path / "prom", tmp_path / "secret"
    textfiles.mkdir()
    secret.write_text("theirs\n")
    secret.chmod(0o600)
    for name in health_units.METRICS:
        (textfiles / name).symlink_to(secret)
    settings = {**SETTINGS, "textfile_directory": str(textfiles)}
    check(settings, files)
    measure(settings, printed(tmp_path, "pass"), list, files)
    assert secret.read_text() == "theirs\n"
    for name in health_units.METRICS:
        assert not (textfiles / name).is_symlink()
        assert (textfiles / name).stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    ("status", "identity", "more", "kept"),
    [
        ("pass", "drives.link", [], "pass"),
        ("unknown", "drives.wear2", [], "pass"),
        ("unknown", "drives.link", [], None),
        ("pass", "drives.link", ["a process of the benchmark was lost"], None),
    ],
)
def test_what_is_unknown_beside_an_ignored_check_proves_nothing(
    tmp_path: Path, status: Any, identity: str, more: list[str], kept: str | None
) -> None:
    page = tmp_path / "record.json"
    checks = [
        CheckResult(id="drives.wear", status="fail", expected="", found="x"),
        CheckResult(id=identity, status=status, expected="", found="x"),
    ]
    reasons = [f"{check.id}: x" for check in checks if check.status != "pass"] + more
    verdict = Verdict(status="fail", reasons=reasons)
    made = record(kind="verify", checks=checks, expectations=wanted_read("pass"), verdict=verdict)
    page.write_text(made.model_dump_json(exclude_none=True))
    measure({**SETTINGS, "ignored_checks": ["drives.w*"]}, ["cat", str(page)], list, Files(tmp_path))
    result = read(Files(tmp_path).measured)
    assert (result.status if result else None) == kept


def test_the_note_of_a_drain_is_on_the_disk_before_the_drain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash that loses it leaves the node drained for ever."""
    synced: list[Path] = []
    fsync = os.fsync

    def seen(handle: int) -> None:
        synced.append(Path(f"/proc/self/fd/{handle}").readlink())
        fsync(handle)

    monkeypatch.setattr(os, "fsync", seen)
    node, ours = Node(), Files(tmp_path)

    def call(argv: Sequence[str]) -> Done:
        if argv[1] == "update":
            assert ours.drained.exists()
            assert synced[-1] == ours.drained.parent
        return node(argv)

    slurm.apply(SICK, "n1", ours, call)
    assert "DRAIN" in node.states
    # The names of the directories that were made, the text, under its first name, and then the name.
    *above, text, directory = synced
    assert above == list(ours.drained.parents)[1:5]
    assert text.parent == directory == ours.drained.parent


def test_a_check_that_runs_is_stopped_before_the_files_go() -> None:
    """It would write metrics and a result again after they were removed."""
    units = health_units.to_stop(False, True)
    assert units == [health_units.TIMER, health_units.SERVICE, health_units.MEASURE, health_units.SOCKET]
    assert health_units.to_stop(True, False) == [health_units.SOCKET]
    assert health_units.to_stop(True, True) == []


def test_a_check_that_runs_is_waited_for_before_a_teardown(tmp_path: Path) -> None:
    """What a stopped check leaves in the volume would keep it busy, and no timer starts another one meanwhile."""
    calls: list[list[str]] = []
    states = ["activating", "activating", "inactive"]

    def call(argv: Sequence[str], accept: Sequence[int] = (0,)) -> Done:
        calls.append(list(argv[1:]))
        return Done(0, states.pop(0) + "\n" if argv[1] == "is-active" else "", "")

    health_units.stop(False, False, str(tmp_path), call)
    assert calls == [], "systemd does not run"
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    health_units.stop(False, False, str(tmp_path), call)
    asked = ["is-active", health_units.SERVICE]
    assert calls == [["stop", health_units.TIMER], asked, asked, asked, ["stop", *health_units.to_stop(False, False)]]
    calls.clear()
    health_units.stop(True, False, str(tmp_path), call)
    assert calls == [["stop", health_units.SOCKET]], "a check that goes on is not waited for"


def test_a_check_is_no_user_that_refuses_a_teardown(monkeypatch: pytest.MonkeyPatch) -> None:
    uses = ["process 7 (`python`) has a file open"]
    monkeypatch.setattr(health_units, "wait_for_check", uses.clear)
    monkeypatch.setattr(Job, "occupants", lambda job: list(uses))
    volume = Volume("nvme_raid0", "u", "f", "/nowhere", ())
    Job(Removal(volume, ()), volume, TEARDOWN, PROGRAM, Ledger(None, acting=False)).refuse_if_busy()
    assert not uses


def test_a_job_of_the_last_second_spoils_the_figures(tmp_path: Path) -> None:
    def jobs() -> Sequence[str]:
        return ["Slurm job 5 runs on this node"]

    done = measure(SETTINGS, printed(tmp_path, "fail", "read: slow"), jobs, Files(tmp_path))
    assert done == "ended before it was done: Slurm job 5 runs on this node"
    assert read(Files(tmp_path).measured) is None


def test_a_wrong_mode_is_a_difference(tmp_path: Path) -> None:
    """A run that was cut may have left a starter that does not start."""
    wanted = health_units.files(PROGRAM, dump(900, 0, "", []), 900, SOCKET)
    before = os.umask(0o077)
    try:
        converge(tmp_path, wanted)
    finally:
        os.umask(before)
    starter = tmp_path / "opt/tunetool/bin/tunetool-health"
    modes = {path: (tmp_path / path[1:]).stat().st_mode & 0o777 for path in wanted if ".wants/" not in path}
    assert modes.pop("/" + str(starter.relative_to(tmp_path))) == 0o755
    assert set(modes.values()) == {0o644}
    starter.chmod(0o644)
    (change,) = health_units.changes(wanted, PROGRAM, str(tmp_path))
    assert (change.path, change.before.splitlines()[0]) == (str(starter), "(mode 0644)")
    assert change.after == starter.read_text()
    assert converge(tmp_path, wanted) == ["/opt/tunetool/bin/tunetool-health"]
    assert starter.stat().st_mode & 0o777 == 0o755
    assert converge(tmp_path, wanted) == []


def test_a_socket_that_systemd_gave_up_is_started_again(tmp_path: Path) -> None:
    calls: list[list[str]] = []
    state = ""

    def call(argv: Sequence[str], accept: Sequence[int] = (0,)) -> Done:
        calls.append(list(argv))
        code = 0 if argv[1] != "is-failed" or state == "failed" else 1
        assert code in accept
        return Done(code, state, "")

    def revived(now: str) -> list[str]:
        nonlocal state
        state = now
        calls.clear()
        health_units.revive_socket(str(tmp_path), call)
        return [argv[1] for argv in calls]

    (tmp_path / "run/systemd/system").mkdir(parents=True)
    assert revived("failed") == [], "no socket was asked for"
    converge(tmp_path, health_units.files(PROGRAM, "", 900, SOCKET))
    assert revived("active") == ["is-failed"]
    assert revived("failed") == ["is-failed", "restart"]
    assert calls[1][2] == health_units.SOCKET
    (tmp_path / "run/systemd/system").rmdir()
    assert revived("failed") == [], "systemd does not run"


def test_no_burst_of_callers_ends_the_socket() -> None:
    """systemd gives a socket up that starts 200 services in 2 s, unless it is told otherwise."""
    text = health_units.files(PROGRAM, "", 900, SOCKET)["/etc/systemd/system/tunetool-health.socket"]
    assert "TriggerLimitIntervalSec=0" in text.partition("[Socket]")[2].splitlines()


def test_the_answer_needs_no_closed_directory(files: Files, no_start: list[str], tmp_path: Path) -> None:
    """The answering process has no rights; the others' directories were perhaps made under root's umask 077."""
    answer_of = Files(tmp_path / "alone")

    def answered() -> Health:
        """By /run/tunetool/answer.json and nothing else."""
        answer_of.answer.parent.mkdir(parents=True, exist_ok=True)
        answer_of.answer.write_bytes(files.answer.read_bytes())
        return results.answered(answer_of)

    assert results.answered(answer_of) == Health("unknown", ["there is no result yet"])
    before = os.umask(0o077)
    try:
        files.settings.write_text(dump(900, 3600, "", []))
        check(SETTINGS, files)
        assert answered() == current(files) == Health("pass")
        assert files.answer.stat().st_mode & 0o777 == 0o644
        assert files.answer.parent.stat().st_mode & 0o777 == 0o755
        measure(SETTINGS, printed(tmp_path, "fail", "read: slow"), list, files)
        assert answered() == current(files) == Health("fail", ["read: slow"])
        measure(SETTINGS, printed(tmp_path, "pass"), list, files)
        assert answered() == current(files) == Health("pass")
        document = json.loads(files.answer.read_text())
        document["checked"]["at"] -= 2701
        files.answer.write_text(json.dumps(document))
        assert answered() == Health("unknown", ["there is no result that is recent"])
        files.settings.unlink()
        check(SETTINGS, files)
        assert answered() == current(files)
        assert "the health check is off" in answered().reasons[0]
    finally:
        os.umask(before)
