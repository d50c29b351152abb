"""`bench staging` and `bench strategies` as jobs of a real Slurm, each with one command."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if not find_spec("deepspeed") or not find_spec("peft"):
    pytest.skip("DeepSpeed or peft is not installed", allow_module_level=True)

from cluster import CONTROL, NODES, Cluster
from tunetool.record import Record, parse
from waiting import PATIENCE

pytestmark = pytest.mark.slow  # some jobs each, and every one of them imports torch on two nodes


def bench(slurm: Cluster, runs: Path, *arguments: str) -> Record:
    command = [sys.executable, "-m", "tunetool", "bench", *arguments, "--model", "tiny", "--images", "16"]
    command += ["--device", "cpu", "--steps", "4", "--rounds", "1", "--allow-busy", "--json", "-"]
    command += ["--target", str(slurm.shared / "bulk"), "--runs-dir", str(runs), "-i", str(slurm.inventory)]
    command += ["--launcher", "slurm", "--slurm", f"work-dir={slurm.shared}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    assert slurm.run(CONTROL, ["squeue", "-h"]).stdout == ""
    for name in NODES:
        assert slurm.processes(name, "tunetool.bench") == []
        assert slurm.run(name, ["ls", "-A", "/dev/shm"]).stdout == ""
    assert [path.name for path in slurm.shared.iterdir()] == ["bulk"]
    return parse(done.stdout, "stdout")


def test_staging_runs_as_jobs(slurm: Cluster, tmp_path: Path) -> None:
    record = bench(slurm, tmp_path, "staging", "--scenarios", "nodes")
    loads = [each for each in record.measurements if each.name == "staging.nodes.memory.rank_model_load"]
    assert {each.rank: each.host for each in loads} == dict(enumerate(NODES))
    assert {check.id: check.status for check in record.checks}["staging.nodes.losses"] == "pass"


def test_strategies_run_as_jobs(slurm: Cluster, tmp_path: Path) -> None:
    record = bench(
        slurm,
        tmp_path,
        "strategies",
        "--matrix",
        "1x1:z2,2x1:z2,2x1:z3",
        "--network-time",
        "3s",
        "--ranks-per-node",
        "1",
    )
    by_name = {each.name: each for each in record.measurements}
    assert {"strategies.step.1x1.z2", "strategies.step.2x1.z2", "strategies.step.2x1.z3"} <= set(by_name)
    assert float(by_name["strategies.step.2x1.z2"].parameters["sent_bytes"]) > 0
