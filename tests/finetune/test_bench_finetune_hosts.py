"""`tunetool bench finetune -i INVENTORY` on two nodes that share nothing but a directory and a network."""

from __future__ import annotations

import os
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

if not find_spec("deepspeed") or not find_spec("peft"):
    pytest.skip("DeepSpeed or peft is not installed", allow_module_level=True)

from calls import TUNETOOL, call
from cluster import NODES, Cluster
from tunetool.record import parse

pytestmark = pytest.mark.slow  # Ansible starts ranks twice in it: half a minute


def bench(cluster: Cluster, runs: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    common = ["--model", "tiny", "--images", "16", "--device", "cpu", "-i", str(cluster.inventory), "--allow-busy"]
    return call(*TUNETOOL, "bench", "finetune", *common, "--runs-dir", str(runs), *arguments, env=os.environ)


def test_model_and_data_are_made_on_nodes_that_one_run_spans(cluster: Cluster, tmp_path: Path) -> None:
    target = cluster.shared / "bulk"
    done = bench(cluster, tmp_path / "runs", "--target", str(target), "--steps", "4", "--json", "-")
    assert done.returncode == 0, done.stderr + done.stdout
    record = parse(done.stdout, "stdout")
    steps = {each.rank: each for each in record.measurements if each.name == "finetune.step"}
    assert {rank: each.host for rank, each in steps.items()} == dict(enumerate(NODES))
    assert {each.parameters["nodes"] for each in record.measurements} == {2}
    assert {("loss", 0), ("loss", 1), ("node.cpu", 1)} <= {(each.name, each.rank) for each in record.series}
    assert sorted(path.name for path in target.iterdir() if not path.name.startswith(".") and path.is_dir()) == [
        "colours-16x448x280",
        "qwen2.5-vl-tiny",
    ]
    for name in NODES:
        assert cluster.processes(name, "tunetool.bench") == []
        assert cluster.run(name, ["ls", "-A", "/dev/shm"]).stdout == ""


def test_a_node_that_cannot_make_its_model_is_quoted(cluster: Cluster, tmp_path: Path) -> None:
    done = bench(cluster, tmp_path / "runs", "--target", "/proc/nowhere")
    assert done.returncode == 2, done.stderr + done.stdout
    assert "rank 0 on `node1`: `/proc/nowhere` cannot be created" in done.stderr
