"""`tunetool tune` with DeepSpeed's own handle and with fio, on the disk under the temporary directory."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from calls import TUNETOOL, call
from judged import proven, undisturbed
from pythons import python_that
from tunetool.measure.aio import Probe
from tunetool.record import Record, parse
from tunetool.tune.goals import parts
from tunetool.tune.samples import block_of
from tunetool.tune.settings import DEFAULTS, from_block
from tunetool.verdict import TESTER_CEILING, TESTER_CPU_SHARE
from waiting import PATIENCE, gone, until

pytest_plugins = ["disks"]

FEW = {"queue_depth": [8, 64], "intra_op_parallelism": [1, 2]}


@pytest.fixture
def disk(disk: Path, ready: Probe) -> Iterator[Path]:
    """A directory in which no test may leave anything."""
    (disk / "theirs").write_text("keep")
    yield disk
    assert [entry.name for entry in disk.iterdir()] == ["theirs"]


@pytest.fixture
def few(tmp_path: Path) -> Path:
    path = tmp_path / "space.json"
    path.write_text(json.dumps(FEW))
    return path


def command(disk: Path, *arguments: str) -> list[str]:
    runs = str(disk.parent / "runs")
    return [*TUNETOOL, "tune", "--target", str(disk), "--runs-dir", runs, "--allow-busy", *arguments]


def tune(disk: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return call(*command(disk, *arguments), env={**os.environ, **environment})


def record_of(done: subprocess.CompletedProcess[str]) -> Record:
    record = parse(done.stdout, "stdout")
    assert record.kind == "tune"
    return record


def chosen(record: Record) -> dict[str, Any]:
    parameters = next(m.parameters for m in record.measurements if m.name == "tune.gain.mix")
    return {name: parameters[name] for name in DEFAULTS.block()}


def assert_limits_of_the_tester(record: Record) -> None:
    """What was chosen has what its program reaches without storage, and its share of the cores."""
    wanted = set()
    for gain in record.measurements:
        if gain.name.startswith("tune.gain."):
            goal, block = str(gain.parameters["goal"]), {name: gain.parameters[name] for name in DEFAULTS.block()}
            wanted |= {f"tune.{way}.{block_of(from_block(block))}" for way in (parts(goal))}  # type: ignore[arg-type]  # of a record
    limited = {m.name: m.parameters for m in record.measurements if TESTER_CEILING in m.parameters}
    assert set(limited) == wanted
    for parameters in limited.values():
        assert float(parameters[TESTER_CEILING]) > 1e8
        assert float(parameters[TESTER_CPU_SHARE]) > 0


def test_a_block_for_deepspeed_is_written_with_its_evidence(disk: Path, few: Path, tmp_path: Path) -> None:
    output, store = tmp_path / "aio.json", tmp_path / "vars"
    store.mkdir()
    more = ("--budget", "30s", "-o", str(output), "--store-vars", str(store), "--explain", str(tmp_path / "why"))
    done = tune(disk, "--space", str(few), *more, "--json", "-")
    record = record_of(done)
    alone = undisturbed(done.returncode, record)
    block = json.loads(output.read_text())
    assert block == {"aio": chosen(record)}
    assert [type(value) for value in block["aio"].values()] == [int, int, int, bool, bool, bool]
    figures = [m for m in record.measurements if m.evidence is not None]
    assert {m.parameters["direction"] for m in figures} == {"read", "write"}
    assert len({m.name for m in figures}) == len(figures)
    for figure in figures:
        proven(figure, alone)
        assert figure.evidence is not None
        # A sample is one transfer or, where that is quick, several.
        transfers, rest = divmod(figure.evidence.claimed_bytes or 0, int(figure.parameters["transfer_bytes"]))
        assert transfers >= len(figure.samples or [])
        assert rest == 0
    assert_limits_of_the_tester(record)
    checks = {check.id: check for check in record.checks}
    assert checks["tune.block"].status == "pass"
    assert "understood all" in checks["tune.block"].found
    stored = json.loads((store / "tunetool_tuned.json").read_text())["tunetool_tuned"]
    assert stored[record.node.speed_hash]["block"] == block["aio"]
    text = (tmp_path / "why/explained.md").read_text()
    assert all(f"## `{name}`" in text for name in block["aio"])
    assert (tmp_path / "why/queue_depth.svg").read_text().startswith("<svg")


@pytest.mark.slow  # its search is in tests/unit/test_tune_search.py
def test_fio_in_the_place_of_deepspeed(disk: Path, few: Path, tmp_path: Path) -> None:
    output = tmp_path / "aio.json"
    more = ("--driver", "fio", "--python", "/bin/false", "--budget", "80s", "--io-size", "64M", "-o", str(output))
    done = tune(disk, "--space", str(few), *more, "--json", "-")
    record = record_of(done)
    undisturbed(done.returncode, record)
    assert json.loads(output.read_text()) == {"aio": chosen(record)}
    assert {m.engine.split()[0] for m in record.measurements} == {"fio"}
    assert_limits_of_the_tester(record)
    assert {check.id: check.status for check in record.checks}["tune.block"] == "skip"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--space", '{"num_threads": [4]}'), 2, "unknown key `num_threads`"),
        (("--mix", "both=1"), 2, "is not a mix"),
        (("--io-size", "1000"), 2, "cannot be moved exactly by every parallelism"),
        (("-o", "/nowhere/aio.json"), 2, "`/nowhere/aio.json` cannot be written"),
        (("--store-vars", "/nowhere"), 2, "is not a directory"),
        (("--space", '{"use_gds": [true]}'), 2, "needs GPU memory"),
        (("--device", "cuda"), 3, "sees no GPU"),
        (("--target", "/dev/shm"), 3, "in memory"),
        (("--target", "/proc"), 3, "has no block device"),
    ],
)
def test_what_cannot_be_tuned_is_refused_before_a_write(
    disk: Path, tmp_path: Path, arguments: tuple[str, str], code: int, said: str
) -> None:
    name, value = arguments
    if value.startswith("{"):
        space = tmp_path / "space.json"
        space.write_text(value)
        value = str(space)
    done = tune(disk, name, value)
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stderr
    assert "hint: " in done.stderr
    assert not (tmp_path / "runs").exists()


def test_an_unbuilt_or_locked_op_is_named_and_nothing_compiled(disk: Path, ready: Probe) -> None:
    empty = disk.parent / "extensions"
    done = tune(disk, TORCH_EXTENSIONS_DIR=str(empty))
    assert done.returncode == 3
    assert "DeepSpeed's op `async_io` is not built for torch" in done.stderr
    assert "hint: run `tunetool build-ops`" in done.stderr
    (empty / "async_io").mkdir(parents=True)
    (empty / "async_io/lock").touch()
    done = tune(disk, TORCH_EXTENSIONS_DIR=str(empty))
    assert done.returncode == 3
    assert "is locked by" in done.stderr
    assert "hint: run `tunetool build-ops`" in done.stderr


def test_a_broken_op_and_a_limit_end_it_without_a_block(disk: Path, ready: Probe, tmp_path: Path) -> None:
    output = tmp_path / "aio.json"
    output.write_text("as it was")
    broken = tmp_path / "extensions"
    for part in ready.parts("async_io"):
        (broken / part).mkdir(parents=True)
        shutil.copy("/bin/true", broken / part / f"{part}.so")
        (broken / part / "tunetool.json").write_text(json.dumps(ready.stamp()))
    done = tune(disk, "-o", str(output), TORCH_EXTENSIONS_DIR=str(broken))
    assert done.returncode == 3, done.stdout + done.stderr
    assert "aio_handle" in done.stdout
    # The limit holds for the child alone, so nothing can be known before. The op reports success all the same.
    liar = python_that(tmp_path, "ulimit -f 20000")
    done = tune(disk, "-o", str(output), "--python", str(liar))
    assert done.returncode == 3, done.stdout + done.stderr
    assert "reported success, but `aio.data` holds" in " ".join(done.stdout.split())
    assert output.read_text() == "as it was"


def test_limits_and_a_directory_that_takes_no_file_are_named(disk: Path, few: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to give up what root may do")
    little = ["prlimit", "--memlock=65536:65536", "setpriv", "--bounding-set", "-ipc_lock", "--inh-caps", "-ipc_lock"]
    for limits, said in (
        (little, "RLIMIT_MEMLOCK is 64 KiB, DeepSpeed's buffer locks 64 MiB"),
        (["prlimit", "--fsize=20000000"], "RLIMIT_FSIZE ends files at 19.07 MiB"),
    ):
        done = call(*limits, *command(disk, "--space", str(few), "--io-size", "64M"))
        assert done.returncode == 3, done.stdout + done.stderr
        assert said in " ".join(done.stdout.split())
    subprocess.run(["chattr", "+i", str(disk)], check=True)
    try:
        done = tune(disk, "--space", str(few))
    finally:
        subprocess.run(["chattr", "-i", str(disk)], check=True)
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"`{disk}` is not writable" in done.stderr


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL])
def test_killed_in_the_middle(disk: Path, number: signal.Signals) -> None:
    process = subprocess.Popen(command(disk), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until(lambda: list(disk.glob(".tunetool-*/process-0/aio.data")), "the data of a transfer", process)
    children = [int(each) for each in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    process.send_signal(number)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert children
    assert gone(*children)
    until(lambda: not list(disk.glob(".tunetool-*")), "the end of what the run had on the disk")


@pytest.mark.slow
def test_all_of_a_space_and_two_processes(disk: Path, few: Path) -> None:
    done = tune(disk, "--space", str(few), "--exhaustive", "--processes", "2", "--io-size", "64M", "--json", "-")
    record = record_of(done)
    undisturbed(done.returncode, record)
    reads = [m for m in record.measurements if m.name.startswith("tune.read.")]
    assert len(reads) == 4
    assert all(len(m.samples or []) >= 6 for m in reads)
    assert {m.parameters["processes"] for m in reads} == {2}
