"""`tunetool bench offload` with real DeepSpeed on the CPU: figures with proof, faults seen, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from calls import TUNETOOL, call
from judged import proven, undisturbed
from tunetool.bench.offload import preflight
from tunetool.bench.offload.request import Request
from tunetool.bench.offload.run import train
from tunetool.measure.aio import Probe
from tunetool.measure.marked_processes import marked
from tunetool.record import Record, parse
from tunetool.report.progress import PlainProgress
from waiting import PATIENCE, until

pytest_plugins = ["disks"]

AIO = {
    "block_size": 2**20,
    "queue_depth": 16,
    "intra_op_parallelism": 2,
    "single_submit": False,
    "overlap_events": True,
}
SIZES = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
MODEL = {"model_type": "llama", **SIZES, "intermediate_size": 1024, "vocab_size": 2048}
FILES = {"optimizer": 46_680_064, "bfloat16params": 2_097_152}


@pytest.fixture(scope="module", autouse=True)
def adam(ready: Probe) -> None:
    """CPUAdam, which every offload uses."""
    subprocess.run([*TUNETOOL, "build-ops", "--op", "cpu_adam"], check=True, capture_output=True, timeout=PATIENCE)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MODEL))
    (tmp_path / "aio.json").write_text(json.dumps({"aio": AIO}))
    return path


def command(model: Path, runs: Path, *arguments: object) -> list[str]:
    common = ["--model", str(model), "--aio", str(model.with_name("aio.json")), "--sequence-length", "32"]
    return [*TUNETOOL, "bench", "offload", *common, "--runs-dir", str(runs), "--allow-busy", *map(str, arguments)]


def bench(model: Path, runs: Path, *arguments: object, **more: Any) -> tuple[subprocess.CompletedProcess[str], Record]:
    done = call(*command(model, runs, *arguments, "--json", "-"), **more)
    return done, parse(done.stdout, done.stderr[-2000:])


def test_steps_on_disk_and_in_memory_are_as_in_dram(disk: Path, memory: Path, model: Path, tmp_path: Path) -> None:
    (disk / "theirs").write_text("keep")
    places = ("--target", disk, "--memory-target", memory, "--parameters", "nvme")
    done, record = bench(model, tmp_path / "runs", *places, "--rounds", 2)
    undisturbed(done.returncode, record)
    found = {check.id.removeprefix("offload."): check for check in record.checks}
    assert {name: check.status for name, check in found.items()} == dict.fromkeys(
        ("target.files", "target.losses", "memory.files", "memory.losses", "dram.losses"), "pass"
    )
    assert f"{sum(FILES.values())} bytes" in found["target.files"].found
    by_name = {each.name.removeprefix("offload."): each for each in record.measurements}
    for row in ("target.default", "target.tuned", "memory.default", "memory.tuned"):
        step = by_name[f"{row}.step"]
        assert len(step.samples or []) == 2
        parts = [by_name[f"{row}.{part}"].value for part in ("compute", "read", "write")]
        assert min(parts) > 0
        assert max(parts) < step.value
        assert by_name[f"{row}.write.bandwidth"].parameters["step_bytes"] == sum(FILES.values())
        # The last layer's parameters are still there when the backward pass begins.
        assert by_name[f"{row}.read.bandwidth"].parameters["step_bytes"] == sum(FILES.values()) + 2**20
        for figure in (
            f"{row}.{direction}.{kind}" for direction in ("read", "write") for kind in ("bandwidth", "rung")
        ):
            if row.startswith("target"):
                proven(by_name[figure])
            else:
                evidence = by_name[figure].evidence
                assert evidence is not None
                assert evidence.kind == "memory"
                assert by_name[figure].medium == "tmpfs"
        assert by_name[f"{row}.against_dram"].parameters["decided"] is False, "two rounds decide nothing"
        assert by_name[f"{row}.step"].parameters["intra_op_parallelism"] == (2 if "tuned" in row else 1)
    assert by_name["dram.step"].medium == "DRAM"
    assert "dram.read.bandwidth" not in by_name
    assert [entry.name for entry in disk.iterdir()] == ["theirs"]
    (kept,) = (tmp_path / "runs").iterdir()
    assert "<svg" in (kept / "report.html").read_text()
    configs = {name: json.loads((kept / f"ds_config-{name}.json").read_text()) for name in ("target", "dram")}
    assert configs["dram"]["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert configs["target"]["aio"]["intra_op_parallelism"] == 2
    shown = " ".join(call(*TUNETOOL, "report", "show", kept).stdout.split())
    assert "advice: offload to disk where memory is short: these rounds do not decide" in shown
    assert "these rounds do not decide that 1 MiB x 16 x 2 is faster" in shown


def test_what_comes_back_wrong_from_the_disk_fails(
    disk: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []

    def look_and_damage(configured: preflight.Configured, directory: Path) -> tuple[str, int] | None:
        looks.append(directory)
        if len(looks) == 2:
            for path in directory.glob("zero_stage_3/optimizer/rank0/*.swp"):
                # A part of the master weights; the sizes stay as they are.
                if not path.name.startswith("exp_avg") and "gradient" not in path.name:
                    with path.open("r+b") as file:
                        file.write(bytes(1 << 20))
        return shortfall(configured, directory)

    shortfall = preflight.shortfall
    monkeypatch.setattr(preflight, "shortfall", look_and_damage)
    kept: dict[str, Any] = {"runs_dir": tmp_path / "runs", "allow_busy": True}
    request = Request(model=str(model), target=disk, tokens=32, rounds=2, device="cpu", **kept)
    result = train(request, PlainProgress(), None)
    assert result.record is not None
    by_id = {check.id: check for check in result.record.checks}
    assert by_id["offload.target.files"].status == "pass", "the sizes are right"
    assert by_id["offload.target.losses"].status == "fail"
    assert by_id["offload.target.losses"].found.startswith("step 4 of ")
    assert result.code == 1
    assert list(disk.iterdir()) == []


def test_a_killed_rank_is_an_error_and_leaves_nothing(disk: Path, model: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    name = "TUNETOOL_TEST_MARK"
    arguments = ("--target", disk, "--without-dram", "--rounds", 1000)
    with subprocess.Popen(
        command(model, runs, *arguments),
        env={**os.environ, name: str(runs)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        until(lambda: list(disk.glob(".tunetool-*/rung-0")), "the first round", process)
        (rank,) = [pid for pid in marked(name, str(runs)) if runs_program(pid, b"bench/offload/rank.py")]
        os.kill(rank, signal.SIGKILL)
        said = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == 3, said
    (path,) = runs.glob("*/record.json")
    record = parse(path.read_text(), str(path))
    assert record.verdict is not None
    assert record.verdict.status == "error"
    assert "was ended by SIGKILL" in record.verdict.reasons[0]
    until(lambda: not marked(name, str(runs)) and not list(disk.iterdir()), "the end of all that the run had")


def runs_program(pid: int, program: bytes) -> bool:
    return any(word.endswith(program) for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"))


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 128 MiB."""
    point = tmp_path / "small"
    point.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=128m", "none", point], capture_output=True, check=False
    ).returncode:
        pytest.skip("needs root and mount(2)")
    try:
        yield point
    finally:
        subprocess.run(["umount", str(point)], check=True)


def test_a_disk_that_fills_while_swapping_is_an_error(
    small_tmpfs: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As one that fills up after the look at its free space.
    monkeypatch.setattr(preflight, "free_bytes", lambda _: 10**12)
    (small_tmpfs / "filler").write_bytes(bytes(100 << 20))
    kept: dict[str, Any] = {"runs_dir": tmp_path / "runs", "allow_busy": True, "without_dram": True}
    request = Request(model=str(model), memory_target=small_tmpfs, tokens=32, rounds=1, device="cpu", **kept)
    result = train(request, PlainProgress(), None)
    assert result.code == 3
    assert result.record is not None
    assert result.record.verdict is not None
    assert result.record.verdict.status == "error"
    assert f"`{small_tmpfs}` is full" in result.record.verdict.reasons[0]
    assert [entry.name for entry in small_tmpfs.iterdir()] == ["filler"]


def test_ops_that_are_not_built_leave_everything_out(disk: Path, model: Path, tmp_path: Path) -> None:
    bare = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path / "none")}
    done, record = bench(model, tmp_path / "runs", "--target", disk, env=bare)
    assert done.returncode == 3
    (check,) = record.checks
    assert (check.id, check.status) == ("offload.deepspeed", "skip")
    assert "`async_io` is not built" in check.found
    assert "tunetool build-ops" in check.remedy
    assert record.measurements == []
    assert list(disk.iterdir()) == []


def test_a_dry_run_writes_nothing(disk: Path, model: Path, tmp_path: Path) -> None:
    done = call(*command(model, tmp_path / "runs", "--target", disk, "--dry-run"))
    assert done.returncode == 0, done.stderr
    assert "3,015,936 parameters, 1 rank on the CPU" in done.stderr
    assert "again in every step, removed afterwards" in done.stderr
    assert "14 steps in each place" in done.stderr
    assert list(disk.iterdir()) == []
    assert not (tmp_path / "runs").exists()
