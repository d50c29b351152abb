"""`tunetool verify` as a process, with the real fio, on the disk under the temporary directory."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from calls import TUNETOOL, call
from judged import interrupted, proven, undisturbed
from machines import RECORDED
from programs import need_program
from pythons import bare_python, has_deepspeed
from skips import no_loops, no_xfs
from tunetool.bench.drives.layouts import LAYOUTS
from tunetool.bench.drives.made import Made
from tunetool.bench.drives.volume import stack_of, virtual_drives, volume
from tunetool.measure.evidence import obstacles
from tunetool.measure.session import Run
from tunetool.node.common import manifest as manifests
from tunetool.node.common.check_result import Check
from tunetool.node.machine.block_stack import read_stack
from tunetool.record import Record, parse, read
from tunetool.report.progress import PlainProgress
from tunetool.verify import run as verify_module
from tunetool.verify.request import Request
from waiting import PATIENCE, until

VERIFY = [*TUNETOOL, "verify"]


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A directory on a disk with counters; on the checkout's file system if ``tmp_path`` is in memory."""
    need_program("fio")
    if not obstacles(read_stack(str(tmp_path))):
        path = tmp_path / "target"
        path.mkdir()
        return path
    pytest.skip("the temporary directory lies on no disk: set TMPDIR to one")


@pytest.fixture
def memory() -> Iterator[Path]:
    path = Path("/dev/shm") / f"tunetool-test-{os.getpid()}"
    path.mkdir()
    yield path
    shutil.rmtree(path)


def verify(target: Path, runs: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # One test shows the DeepSpeed rung; in others it would only take time.
    without = [] if {"-i", "--require"} & set(arguments) else ["--python", str(bare_python(runs.parent))]
    common = ("--target", target, "--runs-dir", runs, "--allow-busy")
    return call(*VERIFY, *common, *without, *arguments, env={**os.environ, **environment})


def only_record(runs: Path) -> Record:
    (path,) = runs.glob("*/record.json")
    return read(path)


def test_it_passes_with_proof_and_leaves_nothing(disk: Path, tmp_path: Path) -> None:
    (disk / "theirs").write_text("keep")
    required = ["--require", "deepspeed"] if has_deepspeed() else []
    done = verify(disk, tmp_path / "runs", "--expect", "1MBps,write=1MBps", "--duration", "1s", *required)
    assert [entry.name for entry in disk.iterdir()] == ["theirs"]
    record = only_record(tmp_path / "runs")
    alone = undisturbed(done.returncode, record)
    assert done.stdout.rstrip().endswith("PASS" if alone else ("UNPROVEN", "UNSTABLE"))
    figures = {measurement.name: measurement for measurement in record.measurements}
    for direction in ("read", "write"):
        proven(figures[f"sequential.{direction}"], alone)
        assert figures[f"sequential.{direction}"].parameters["fio_path"] == shutil.which("fio")
        if required:
            theirs = figures[f"deepspeed.cpu.{direction}"]
            proven(theirs, alone)
            assert f"{direction}, aio" in done.stdout
            assert f"{theirs.value / figures[f'sequential.{direction}'].value:.0%} of fio" in done.stdout


@pytest.mark.slow  # a FAIL is in tests/unit/test_verify.py
def test_it_fails_an_expectation_no_disk_meets(disk: Path, tmp_path: Path) -> None:
    done = verify(disk, tmp_path / "runs", "--expect", "900GBps", "--duration", "1s", "--json", "-")
    assert done.returncode == 1, done.stderr
    record = parse(done.stdout, "stdout")
    assert record.verdict is not None
    assert record.verdict.status == "fail"
    assert "is below 900 GB/s" in record.verdict.reasons[0]


def test_memory_is_unproven(memory: Path, tmp_path: Path) -> None:
    done = verify(memory, tmp_path / "runs", "--expect", "1MBps", "--duration", "1s")
    if done.returncode == 2:
        pytest.skip("/dev/shm is too small here: " + done.stderr)
    assert done.returncode == 3
    assert "tmpfs" in done.stdout
    assert done.stdout.rstrip().endswith("UNPROVEN")
    assert list(memory.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_interrupted_in_the_middle(disk: Path, tmp_path: Path, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [*VERIFY, "--target", str(disk), "--runs-dir", str(tmp_path / "runs"), "--duration", "5s", "--allow-busy"],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    until(lambda: list(disk.glob(".tunetool-*/data.*")), "fio's files", process)
    children = until(lambda: fios_in(disk), "fio", process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, errors
    assert children
    assert list(disk.iterdir()) == []
    assert fios_in(disk) == []
    interrupted(tmp_path / "runs")


def janitors_of(folder: Path) -> list[int]:
    """Processes that clean up below ``folder`` after their run was killed."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().decode(errors="replace").split("\0")
            if any(word.endswith("janitor.py") for word in words) and any(str(folder) in word for word in words):
                pids.append(int(path.parent.name))
    return pids


def test_killed_outright_it_leaves_nothing(disk: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*VERIFY, "--target", str(disk), "--runs-dir", str(tmp_path / "runs"), "--duration", "5s", "--allow-busy"],
        stderr=subprocess.DEVNULL,
    )
    until(lambda: list(disk.glob(".tunetool-*/data.*")), "fio's files", process)
    process.kill()
    process.wait()
    until(lambda: not list(disk.iterdir()), "the janitor's end")


def test_killed_with_its_janitor_is_cleaned_by_the_next_run(disk: Path, tmp_path: Path) -> None:
    arguments = [*VERIFY, "--target", str(disk), "--runs-dir", str(tmp_path / "runs"), "--duration", "5s"]
    process = subprocess.Popen([*arguments, "--allow-busy"], stderr=subprocess.DEVNULL)
    until(lambda: list(disk.glob(".tunetool-*/data.*")), "fio's files", process)
    (janitor,) = janitors_of(disk)
    os.kill(janitor, signal.SIGKILL)
    process.kill()
    process.wait()
    until(lambda: not fios_in(disk), "the end of fio")
    assert len(list(disk.iterdir())) == 1
    done = verify(disk, tmp_path / "runs", "--expect", "1MBps", "--duration", "1s")
    assert "was left by a run that died" in done.stderr
    assert list(disk.iterdir()) == []


def test_a_limit_on_file_size_is_named(disk: Path, tmp_path: Path) -> None:
    limited = ["prlimit", "--fsize=1000000", *VERIFY, "--target", str(disk), "--runs-dir", str(tmp_path / "runs")]
    done = call(*limited, "--expect", "1MBps", "--allow-busy")
    assert done.returncode == 3
    assert "was ended by SIGXFSZ" in done.stdout
    assert list(disk.iterdir()) == []


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    """One host that is this machine, and one that does not exist: 192.0.2.0/24 is reserved for documentation."""
    pytest.importorskip("ansible_runner")
    prefix = tmp_path / "prefix/bin"
    prefix.mkdir(parents=True)
    program = prefix / "tunetool"
    # The node's own copy of its record goes where the test's files go.
    program.write_text(
        f'#!/bin/sh\nexec {sys.executable} -m tunetool "$@" --runs-dir {tmp_path}/node-runs --python {bare_python(tmp_path)}\n'
    )
    program.chmod(0o755)
    common = {"ansible_become": False, "tunetool_prefix": str(prefix.parent)}
    here = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    gone = {"ansible_host": "192.0.2.1", "ansible_ssh_common_args": "-o ConnectTimeout=2"}
    path = tmp_path / "hosts.json"
    path.write_text(json.dumps({"all": {"vars": common, "hosts": {"here": here, "gone": gone}}}))
    return path


def test_a_fleet_with_a_host_that_is_gone(disk: Path, tmp_path: Path, inventory: Path) -> None:
    done = verify(disk, tmp_path / "runs", "-i", str(inventory), "--expect", "1MBps", "--duration", "1s")
    assert done.returncode == 3, done.stdout + done.stderr
    assert "here" in done.stdout
    record = only_record(tmp_path / "runs")
    assert record.kind == "fleet"
    assert record.hosts is not None
    statuses = {host.host: host.status for host in record.hosts}
    assert statuses.keys() == {"here", "gone"}
    assert statuses["gone"] == "error"
    assert statuses["here"] in ("pass", "unproven", "unstable"), "it was measured, beside whatever else used its disk"
    assert list(disk.iterdir()) == []


def test_an_interrupted_fleet_leaves_nothing(disk: Path, tmp_path: Path, inventory: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    arguments = ["-i", str(inventory), "--limit", "here", "--target", str(disk), "--runs-dir", str(tmp_path / "runs")]
    process = subprocess.Popen(
        [*VERIFY, *arguments, "--duration", "1s", "--allow-busy"],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    until(lambda: list(disk.glob(".tunetool-*/data.*")), "fio's files", process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, errors
    assert not list(temporary.glob("tunetool-fleet-*"))
    assert list((tmp_path / "runs").iterdir()) == []
    # The node ends its run and removes its files.
    until(lambda: not list(disk.iterdir()), "the end of the node's own run")


def fios_in(folder: Path) -> list[int]:
    """Processes called fio that work below ``folder``."""
    pids = []
    for process in Path("/proc").iterdir():
        try:
            if (process / "comm").read_text().strip() == "fio" and str(folder) in str((process / "cwd").readlink()):
                pids.append(int(process.name))
        except (OSError, ValueError):
            continue
    return pids


def test_volumes_on_loop_devices_are_measured_at_once(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counters of the loop devices, which are this run's alone, prove the sum and each share."""
    if no_loops():
        pytest.skip("needs root and loop devices")
    if no_xfs():
        pytest.skip("needs XFS")
    mounted = [Check("filesystem.mounted", "pass", "as built", "as built")]
    monkeypatch.setattr(verify_module, "manifest_checks", lambda path, manifest, writing: mounted)
    document = json.loads((RECORDED / "built-manifest.json").read_text())
    built = {key: document.pop(key) for key in ("array", "filesystem", "offload_dir")}
    with Made(pytest.fail) as made:
        drives = virtual_drives(made, disk, 2, 2 << 30)
        with volume(LAYOUTS["xfs-per-drive"], drives, made, disk) as opened:
            places = opened.directories
            document |= {"schema": "tunetool.manifest/2", "expect": {"read": 1.0, "write": 1.0}, "volumes": []}
            for place in places:
                filesystem = {**built["filesystem"], "mount_point": str(place)}
                document["volumes"].append({**built, "name": place.name, "filesystem": filesystem})
            manifests.write(document, str(tmp_path / "node.json"))
            stacks = {
                str(place): replace(
                    stack_of([each.drive], "loop device", place),
                    mount=read_stack(str(place)).mount,
                    directory=str(place),
                )
                for place, each in zip(places, drives, strict=True)
            }
            monkeypatch.setattr(verify_module, "read_stack", stacks.__getitem__)
            run = Run(tmp_path / "runs", allow_busy=True)
            request = Request(manifest=tmp_path / "node.json", python=bare_python(tmp_path), duration=0.2, run=run)
            record = verify_module.verify(request, PlainProgress()).record
            assert [list(place.iterdir()) for place in places] == [[], []]
    assert record is not None
    assert [each.status for each in record.expectations] == ["pass"] * 6, record.verdict
    assert [each.value for each in record.expectations] == [1.0, 1.0, *[0.45] * 4]
    figures = {each.name: each for each in record.measurements if each.figure == "bandwidth"}
    for direction in ("read", "write"):
        whole = figures[f"sequential.{direction}"]
        shares = [figures[f"sequential.{direction}.{place.name}"] for place in places]
        for figure in (whole, *shares):
            proven(figure, alone=True)
        assert whole.medium == "2 x loop device"
        assert [share.labels["volume"] for share in shares] == ["volume-1", "volume-2"]
