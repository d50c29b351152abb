"""The Python in each node's manifest, on two nodes: launched ranks, and the whole chain while a node is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import tunetool

if not find_spec("deepspeed") or not find_spec("peft"):
    pytest.skip("DeepSpeed or peft is not installed", allow_module_level=True)

from cluster import NODES, Cluster
from machines import RECORDED
from pythons import python_that
from tunetool.record import Record, parse, read
from waiting import PATIENCE, until

pytestmark = pytest.mark.slow  # Ansible starts ranks several times in it: minutes
TUNETOOL = [sys.executable, "-m", "tunetool"]
BUILT: dict[str, Any] = json.loads((RECORDED / "built-manifest.json").read_text())


@pytest.fixture
def built(cluster: Cluster) -> Iterator[Path]:
    """Two nodes as the role leaves them: each manifest names the node's own Python, whose calls are in the file."""
    folder = cluster.shared / "training"
    folder.mkdir(exist_ok=True)
    calls = folder / "calls"
    calls.unlink(missing_ok=True)
    for name in NODES:
        bin_ = folder / name / "bin"
        bin_.mkdir(parents=True, exist_ok=True)
        # It uses the tunetool of this checkout, wherever the test's environment has its own from.
        export = f"export PYTHONPATH={Path(tunetool.__file__).parents[1]}"
        python_that(bin_, f'{export}; echo "$(hostname) $TUNETOOL_TEST_OF $*" >> {calls}')
        part = {
            "python": str(bin_ / "python"),
            # Not of pip's: what is known of it is its Python.
            "source": "named",
            "directory": str(folder / name),
            "lock_sha256": "0" * 64,
            "packages": {"torch": "2", "deepspeed": "0"},
            "accelerator": "cpu",
            "ops": {},
            "ops_directory": str(folder / name),
            "environment": {"TUNETOOL_TEST_OF": name},
            "trainers": ["deepspeed"],
        }
        document = {**BUILT, "training": part, "offload_dir": None}
        document["filesystem"] = {**BUILT["filesystem"], "mount_point": str(cluster.shared)}
        write = ["sh", "-c", "mkdir -p /etc/tunetool && cat > /etc/tunetool/node.json"]
        cluster.run(name, write, stdin=json.dumps(document))
    yield calls
    for name in cluster.nodes:
        cluster.run(name, ["rm", "-rf", "/etc/tunetool"])


def start(cluster: Cluster, runs: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*TUNETOOL, "bench", *arguments, "-i", str(cluster.inventory), "--allow-busy", "--runs-dir", str(runs)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    )


def bench(cluster: Cluster, runs: Path, *arguments: str) -> tuple[int, str, str]:
    process = start(cluster, runs, *arguments)
    stdout, stderr = process.communicate(timeout=PATIENCE)
    return process.returncode, stdout, stderr


SMALL = ["--images", "8", "--steps", "3", "--rounds", "1"]
CHAIN = ["reference", *SMALL, "--matrix", "2x1:z2", "--skip", "verify", "--skip", "checkpoint"]
"""Without the options of the first line the chosen sizes would be small too; they save minutes. The nodes have no array
to verify."""


def test_ranks_run_under_the_python_of_each_nodes_manifest(cluster: Cluster, built: Path, tmp_path: Path) -> None:
    arguments = ["finetune", "--model", "tiny", "--images", "8", "--steps", "2", "--device", "cpu", "--json", "-"]
    code, stdout, stderr = bench(cluster, tmp_path, *arguments, "--target", str(cluster.shared / "bulk"))
    assert code == 0, stderr
    assert parse(stdout, "stdout").verdict is not None
    called = built.read_text().splitlines()
    for name in NODES:
        assert any(line.startswith(f"{name} ") and "tunetool.launch.node" in line for line in called)
        # The second word is the variable that the manifest sets.
        assert any(line.startswith(f"{name} {name} ") and "agent.py" in line for line in called), called


def test_a_python_that_went_away_on_one_node_names_it(cluster: Cluster, built: Path, tmp_path: Path) -> None:
    (built.parent / "node2/bin/python").unlink()
    arguments = ["finetune", "--model", "tiny", *SMALL[:4], "--target", str(cluster.shared / "bulk")]
    code, stdout, stderr = bench(cluster, tmp_path, *arguments)
    assert code == 3, stdout + stderr
    record = read(next(tmp_path.glob("*-bench.finetune-*")))
    assert record.verdict is not None
    (reason,) = record.verdict.reasons
    assert reason.startswith(f"host `node2`: `{built.parent}/node2/bin/python` is gone, the Python of this node's")
    assert "run `tunetool provision` for this node" in reason


def chain(runs: Path) -> Record:
    return read(next(runs.glob("*-bench.reference-*")))


def test_the_chain_needs_no_option_but_the_inventory(cluster: Cluster, built: Path, tmp_path: Path) -> None:
    code, stdout, stderr = bench(cluster, tmp_path, *CHAIN, "--skip", "staging")
    assert code == 0, stdout + stderr
    assert f"target: `{cluster.shared}`, from the manifest" in stderr
    assert "model: `tiny` (there are no GPUs to train on)" in stderr
    record = chain(tmp_path)
    assert [part.status for part in record.parts or []] == ["skip", "skip", "skip", "pass"]
    assert {each.name for each in record.measurements} == {"strategies.step.2x1.z2"}
    assert {line.split()[0] for line in built.read_text().splitlines()} == set(NODES)


def test_a_node_lost_in_a_part_is_named_and_the_next_goes_on(cluster: Cluster, built: Path, tmp_path: Path) -> None:
    process = start(cluster, tmp_path, *CHAIN, "--matrix", "1x1:z2,2x1:z2")
    try:
        # A rank of node2 has started, with the variable that its manifest sets.
        until(lambda: built.exists() and "node2 node2 " in built.read_text(), "a rank on node2", process)
        cluster.kill_node("node2")
        stdout, stderr = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        if "node2" not in cluster.nodes:
            cluster.start_node("node2")
    assert process.returncode == 3, stdout + stderr
    record = chain(tmp_path)
    parts = {part.name: part for part in record.parts or []}
    assert parts["staging"].status == "error"
    assert "node2" in parts["staging"].reasons[0]
    assert parts["strategies"].status == "pass"
    out = {host.host: host.reasons[0] for host in record.hosts or []}
    assert out["node2"].startswith("left out before strategies: ")
    assert {each.name for each in record.measurements} == {"strategies.step.1x1.z2"}
