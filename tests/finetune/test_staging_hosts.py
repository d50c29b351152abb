"""`tunetool bench staging -i INVENTORY`: files are staged into the memory of two nodes and removed from both afterwards."""

from __future__ import annotations

import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if not find_spec("deepspeed") or not find_spec("peft"):
    pytest.skip("DeepSpeed or peft is not installed", allow_module_level=True)

from cluster import NODES, Cluster
from tunetool.record import read
from waiting import PATIENCE, until


def call(cluster: Cluster, runs: Path, *arguments: str) -> subprocess.Popen[str]:
    common = ["--model", "tiny", "--images", "16", "--device", "cpu", "--steps", "3", "--allow-busy"]
    where = ["-i", str(cluster.inventory), "--target", str(cluster.shared / "bulk"), "--runs-dir", str(runs)]
    return subprocess.Popen(
        [sys.executable, "-m", "tunetool", "bench", "staging", *common, *where, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell that runs the tests in the background makes them ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509  (tests run no threads)
    )


def in_memory(cluster: Cluster, node: str) -> list[str]:
    return cluster.run(node, ["ls", "-A", "/dev/shm"]).stdout.split()


@pytest.mark.slow
def test_every_node_has_its_copy_and_gives_it_back(cluster: Cluster, tmp_path: Path) -> None:
    process = call(cluster, tmp_path, "--scenarios", "nodes", "--rounds", "1")
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, out + err
    record = read(next(tmp_path.glob("*-bench.staging-*")))
    ranks = {
        (each.name.split(".")[2], each.rank): each
        for each in record.measurements
        if each.name.endswith("rank_model_load")
    }
    assert {rank: each.host for (path, rank), each in ranks.items() if path == "memory"} == dict(enumerate(NODES))
    kept = next(tmp_path.glob("*-bench.staging-*"))
    assert len(list(kept.glob("stage/nodes-1-node-*-model.json"))) == len(NODES)
    assert "many nodes: 2 rank(s) on 2 node(s)" in out
    assert "no rank shares a page cache with another" in " ".join(out.split())
    for name in NODES:
        assert in_memory(cluster, name) == []


@pytest.mark.slow
def test_ctrl_c_gives_the_memory_of_every_node_back(cluster: Cluster, tmp_path: Path) -> None:
    process = call(cluster, tmp_path, "--scenarios", "nodes", "--rounds", "9")

    def on_all() -> bool:
        return all(any("tunetool-staging" in name for name in in_memory(cluster, node)) for node in NODES)

    try:
        until(on_all, "a copy on every node", process)
        process.send_signal(signal.SIGINT)
    finally:
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, out + err
    for name in NODES:
        assert in_memory(cluster, name) == []
        assert cluster.processes(name, "tunetool.bench") == []
