"""`tunetool bench reference` on this machine: its real parts, and how a FAIL of the first affects the others."""

from __future__ import annotations

import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

if not find_spec("deepspeed") or not find_spec("peft"):
    pytest.skip("DeepSpeed or peft is not installed", allow_module_level=True)

from calls import TUNETOOL, call
from tunetool.record import read

pytestmark = pytest.mark.slow


def reference(target: Path, runs: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    target.mkdir(exist_ok=True)
    small = ["--model", "tiny", "--images", "16", "--steps", "3", "--device", "cpu"]
    small += ["--checkpoint-model", "tiny", "--state-bytes", "20MB"]
    common = ["--rounds", "1", "--duration", "1s", "--allow-busy", "--target", str(target), "--runs-dir", str(runs)]
    return call(*TUNETOOL, "bench", "reference", *small, *common, *arguments)


def test_every_part_has_its_record_and_one_is_over_all(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    done = reference(tmp_path / "bulk", runs, "--expect", "1MBps", "--skip", "strategies")
    record = read(next(runs.glob("*-bench.reference-*")))
    parts = {part.name: part for part in record.parts or []}
    status = {name: part.status for name, part in parts.items()}
    assert status.keys() == {"verify", "checkpoint", "staging", "strategies"}
    assert status.pop("strategies") == "skip"
    # Other programs may use the disk: then a part proves nothing, and the whole record says so.
    assert set(status.values()) <= {"pass", "unproven", "unstable"}, done.stdout + done.stderr
    assert done.returncode == (0 if set(status.values()) == {"pass"} else 3)
    for part in parts.values():
        if part.run is not None:
            assert read(runs / part.run).id == part.record_id
    names = {each.name for each in record.measurements}
    assert {"sequential.read", "sequential.write", "staging.single.bulk.end_to_end"} <= names
    assert any(name.startswith("checkpoint.") and name.endswith(".durable") for name in names)


def test_after_a_fail_nothing_else_is_measured(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    done = reference(tmp_path / "bulk", runs, "--expect", "5000GBps")
    assert done.returncode == 1, done.stdout + done.stderr
    record = read(next(runs.glob("*-bench.reference-*")))
    assert [part.status for part in record.parts or []] == ["fail", "skip", "skip", "skip"]
    assert len(list(runs.iterdir())) == 2
    assert "not run after the FAIL of verify" in " ".join(done.stdout.split())
