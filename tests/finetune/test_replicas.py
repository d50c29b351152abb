"""Replicas of checkpoints on another node: two nodes with their own files, a real sshd and a real rsync."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the checkpoints are torch's own")

import torch
import torch.distributed.checkpoint as dcp

from cluster import ROOT, Cluster
from losses import PROGRAM, Job, values
from tunetool.checkpoint import DirectWriter
from waiting import PATIENCE, until

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
SCRATCH = "/tmp/scratch"
REPLICAS = f"{SCRATCH}/.replicas/node1"
MIB = 2**20
FAST = ("ssh", "-o", "ConnectTimeout=2", "-o", "ServerAliveInterval=1", "-o", "ServerAliveCountMax=2")
"""Options with which a dead link ends soon."""
_PROGRAM = str(Path(__file__).with_name("replica_on_node.py"))
_ENVIRONMENT = {"PYTHONPATH": str(ROOT / "tools")}
_RECOVER = """
import json, sys
from tunetool.checkpoint import recover
from tunetool.errors import TunetoolError
try:
    assert str(recover(sys.argv[2], **json.loads(sys.argv[1]))) == sys.argv[2]
    print("recovered")
except TunetoolError as error:
    print(error.line)
"""
_FLIP = """
def flip(path):
    with open(path, "r+b") as stream:
        stream.seek(2000000)
        byte = stream.read(1)[0]
        stream.seek(2000000)
        stream.write(bytes([byte ^ 1]))
"""
_FLIPPING = f"""
import os, runpy, sys
{_FLIP}
def flipping(number, sync=os.fsync):
    path = os.readlink(f"/proc/self/fd/{{number}}")
    if path.endswith(".distcp"):
        flip(path)
    sync(number)
os.fsync = flipping
runpy.run_module(sys.argv[2], run_name="__main__")
"""


def torch_s(path: Path) -> Any:
    return dcp.FileSystemWriter(path, single_file_per_rank=True, sync_files=False)


def ours(path: Path) -> Any:
    return DirectWriter(path, threads=1)


class Nodes:
    """node1 saves, and node2 keeps its replicas."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def save(self, number: int, writer: Callable[[Path], Any] = ours, count: int = MIB) -> str:
        """A step on node1; its two ranks' files are made here and moved there."""
        made = self.cluster.shared / f"step_{number}"
        source = torch.Generator().manual_seed(number)
        dcp.save({"weight": torch.randn(count, generator=source)}, storage_writer=writer(made), no_dist=True)
        self.sh("node1", f"mkdir -p {SCRATCH} && mv {made} {SCRATCH}/")
        return f"{SCRATCH}/step_{number}"

    def start(self, *steps: str, **options: Any) -> subprocess.Popen[str]:
        given = [{"step_dir": step, "peer": "node2", "ssh": FAST, **options} for step in steps]
        argv = [sys.executable, _PROGRAM, json.dumps(given)]
        return self.cluster.start("node1", argv, env=_ENVIRONMENT)

    def replicate(self, *steps: str, **options: Any) -> tuple[str | None, str]:
        """The path of the last replica, and the problem."""
        with self.start(*steps, **options) as process:
            return ended(process)

    def half_sent(self, step: str, **options: Any) -> tuple[subprocess.Popen[str], str]:
        """A replication in the middle of its data file, and that file on the peer."""
        process = self.start(
            step, rate=MIB // 4, **options
        )  # a quarter of a minute, for a machine that is slow to look
        file = f"{REPLICAS}/.draining-*/*.distcp"
        until(lambda: int(self.sh("node2", f"stat -c %s {file} 2>/dev/null || echo 0")) > 0, "a part of it", process)
        return process, file

    def sh(self, node: str, script: str) -> str:
        return self.cluster.run(node, ["sh", "-c", script]).stdout

    def recover(self, step: str) -> str:
        """Bring a step back to node1; returns `recovered`, or what was wrong."""
        argv = [sys.executable, "-c", _RECOVER, json.dumps({"peer": "node2", "ssh": FAST}), step]
        return self.cluster.run("node1", argv, env=_ENVIRONMENT).stdout.strip()

    def fetch(self, step: str) -> str:
        """Bring a step back to node1 by the command; returns from where."""
        argv = [sys.executable, "-m", "tunetool", "checkpoint", "fetch", step, "--from", f"node2:{SCRATCH}"]
        return str(json.loads(self.cluster.run("node1", [*argv, "--json", "-"], env=_ENVIRONMENT).stdout)["source"])

    def sums(self, node: str, folder: str) -> list[str]:
        """The checksums of all files in a step but the marker."""
        return self.sh(node, f"cd {folder} && md5sum .metadata *.distcp").splitlines()

    def names(self, folder: str = REPLICAS, node: str = "node2") -> list[str]:
        return self.sh(node, f"ls -A {folder} 2>/dev/null || true").split()

    def marker(self, step: str) -> dict[str, Any]:
        return dict(json.loads(self.sh("node2", f"cat {step}/.tunetool-drained.json")))


def ended(process: subprocess.Popen[str]) -> tuple[str | None, str]:
    """What the program on node1 printed."""
    output, _ = process.communicate(timeout=PATIENCE)
    *before, last = output.splitlines()
    assert last.startswith("{"), output
    outcome = json.loads(last)
    if outcome["problem"]:
        assert len(before) == 1, output
        assert outcome["problem"] in before[0]
        assert before[0].startswith("warning: no replica of")
    return outcome["path"], outcome["problem"] or ""


@pytest.fixture
def nodes(cluster: Cluster) -> Iterator[Nodes]:
    made = Nodes(cluster)
    for name in ("node1", "node2"):
        made.sh(name, f"mkdir -p {SCRATCH}")
    yield made
    for name in ("node1", "node2"):
        made.sh(name, f"rm -rf {SCRATCH}")


@pytest.mark.parametrize(
    ("writer", "sums"), [(ours, "checksums of the save"), (torch_s, "digests made at the source when")]
)
def test_a_replica_has_the_bytes_of_its_save(nodes: Nodes, writer: Callable[[Path], Any], sums: str) -> None:
    step = nodes.save(7, writer)
    before = nodes.sums("node1", step)
    assert nodes.replicate(step) == (f"node2:{REPLICAS}/step_7", "")
    assert nodes.sums("node2", f"{REPLICAS}/step_7") == nodes.sums("node1", step) == before
    assert nodes.names() == ["step_7"]
    marker = nodes.marker(f"{REPLICAS}/step_7")
    assert marker["sums"].startswith(sums)
    assert set(marker["hosts"].values()) == {"node1"}
    # A node that lost its files gets them back.
    nodes.sh("node1", f"rm -rf {step}")
    assert nodes.recover(step) == "recovered"
    assert nodes.sums("node1", step) == before
    assert nodes.names(SCRATCH, "node1") == [".tunetool-saving", "step_7"]
    assert ".tunetool-drained.json" not in nodes.names(step, "node1")
    nodes.sh("node1", f"rm -rf {step}")
    assert nodes.fetch(step) == f"node2:{REPLICAS}/step_7"
    assert nodes.sums("node1", step) == before


def test_a_saver_replicates_what_it_saves(nodes: Nodes) -> None:
    env = {"PYTHONPATH": str(ROOT / "tools"), "GLOO_SOCKET_IFNAME": "eth0"}
    job = Job(nodes.cluster, (sys.executable, str(PROGRAM)), SCRATCH, f"{nodes.cluster.shared}/bulk", FAST, env)
    ranks = ("node1", "node1", "node2")
    # While rank 2 still waits for its replica, rank 0 begins the next save, and waits for rank 2.
    said = job.run(ranks, ("save_and_replicate", {"steps": [5, 6, 7], "slow": 2, "rate": 2 * MIB}))
    of_each = [[json.loads(line)["replica"] for line in rank.splitlines() if line.startswith("{")] for rank in said]
    places = [f"{SCRATCH}/.replicas/{host}/step_" for host in ("node1", "node2")]
    assert of_each == [
        [f"node2:{places[0]}{step}" for step in (5, 6, 7)],
        [],
        [f"node1:{places[1]}{step}" for step in (5, 6, 7)],
    ]
    assert nodes.names() == ["step_6", "step_7"], "the last two stay"
    nodes.sh("node1", f"rm -rf {SCRATCH}")
    resumed = job.resume("a node lost after its saver replicated", ranks)
    assert (resumed[0]["step"], values(resumed)) == (7, [7, 7, 7])


@pytest.mark.slow  # the imports of transformers, six times
@pytest.mark.skipif(not find_spec("accelerate"), reason="accelerate is not installed")
def test_a_trainer_whose_node_is_lost_goes_on(nodes: Nodes) -> None:
    tests, two = ROOT / "tests", ("node1", "node2")
    variables = {"ACCELERATE_USE_FSDP": "true", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "eth0", "SCRATCH": SCRATCH}
    variables |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1", **_ENVIRONMENT}
    variables |= {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}

    def run(name: str, killed: int) -> list[tuple[int, str]]:
        folder = nodes.cluster.shared / name
        guide = tests.parent / "docs/guides/checkpoint-recipes.md"
        argv = [sys.executable, str(tests / "checkpoint/recipe_trainer.py"), str(guide), str(folder), str(killed)]
        started = [nodes.cluster.start(node, argv, env={**variables, "RANK": str(n)}) for n, node in enumerate(two)]
        said = [rank.communicate(timeout=PATIENCE)[0] for rank in started]
        return [(rank.returncode, words) for rank, words in zip(started, said, strict=True)]

    def results(name: str) -> list[dict[str, Any]]:
        ended = run(name, 0)
        assert [code for code, _ in ended] == [0, 0], ended
        return [json.loads(words.splitlines()[-1]) for _, words in ended]

    whole = results("whole")
    for node in two:
        nodes.sh(node, f"rm -rf {SCRATCH}/*  {SCRATCH}/.[a-z]*")
    assert all(code for code, _ in run("cut", 5))
    # The replication goes on when the job has died.
    until(lambda: "step_4" in nodes.names(), "the replica of node1")
    nodes.sh("node1", f"rm -rf {SCRATCH} {nodes.cluster.shared}/cut/bulk")
    assert results("cut") == [{**rank, "from": "scratch/step_4"} for rank in whole]


@pytest.mark.slow
def test_a_peer_keeps_the_replicas_that_were_saved_last(nodes: Nodes) -> None:
    # The job went back: step 2 was saved last. The clock was a day ahead when step 5 was saved.
    steps = [nodes.save(number, count=1000) for number in (5, 7, 2)]
    nodes.sh("node1", f"touch -d '+1 day' {steps[0]}/.metadata")
    nodes.replicate(*steps, max_to_keep=2)
    assert nodes.names() == ["step_2", "step_7"]
    inode = nodes.sh("node2", f"stat -c %i {REPLICAS}/step_2")
    assert nodes.replicate(steps[2]) == (f"node2:{REPLICAS}/step_2", "")
    assert nodes.sh("node2", f"stat -c %i {REPLICAS}/step_2") == inode, "what is there is not sent again"


@pytest.mark.slow
def test_a_node_without_metadata_sends_what_it_names(nodes: Nodes) -> None:
    step, metadata = nodes.save(7, torch_s), str(nodes.cluster.shared / "metadata")
    nodes.sh("node1", f"mv {step}/.metadata {metadata}; cp {step}/__0_0.distcp {step}/__9_0.distcp")
    assert nodes.replicate(step, metadata=metadata) == (f"node2:{REPLICAS}/step_7", "")
    assert nodes.names(f"{REPLICAS}/step_7") == [".metadata", ".tunetool-drained.json", "__0_0.distcp"]


@pytest.mark.slow
def test_a_bit_that_flips_on_the_node_makes_no_replica(nodes: Nodes) -> None:
    old, step = nodes.save(6), nodes.save(7)
    file = nodes.sh("node1", f"ls {step}/*.distcp").strip()
    nodes.cluster.run("node1", [sys.executable, "-c", f"import sys{_FLIP}flip(sys.argv[1])", file])
    with nodes.start(old, step) as process:
        output, _ = process.communicate(timeout=PATIENCE)
    problem = json.loads(output.splitlines()[-1])["problem"]
    assert "`node2`: `weight` is damaged: bytes 1835008 to 2097151" in problem
    assert [name for name in nodes.names() if not name.startswith(".")] == ["step_6"]
    # What came is not continued with, although its size and time are those of the source.
    assert nodes.names(f"{REPLICAS}/.draining-*/*.distcp") == []


@pytest.mark.parametrize(
    ("writer", "named"),
    [
        (ours, "`weight` is damaged"),
        pytest.param(torch_s, "differs from what `node1`", marks=pytest.mark.slow),
    ],
)
def test_a_bit_that_flips_on_the_peer_makes_no_replica(nodes: Nodes, writer: Callable[[Path], Any], named: str) -> None:
    step = nodes.save(7, writer)
    # Its Python flips a bit of what came, when that is to be synced.
    python = nodes.cluster.shared / "python"
    python.write_text(f"#!{sys.executable}{_FLIPPING}")
    python.chmod(0o755)
    path, problem = nodes.replicate(step, python=str(python))
    assert path is None
    assert named in problem
    assert [name for name in nodes.names() if not name.startswith(".")] == []
    assert nodes.replicate(step) == (f"node2:{REPLICAS}/step_7", "")
    assert nodes.sums("node2", f"{REPLICAS}/step_7") == nodes.sums("node1", step)


@pytest.mark.parametrize("how", ["stopped", pytest.param("killed", marks=pytest.mark.slow)])
def test_a_replica_that_was_cut_off_is_continued(nodes: Nodes, how: str) -> None:
    step, stop = nodes.save(7), nodes.cluster.shared / "stop"
    process, file = nodes.half_sent(step, stop_at=str(stop) if how == "stopped" else None)
    if how == "stopped":
        stop.touch()
    else:
        nodes.sh("node1", "pkill -9 -f '[c]heckpoint.replica_worker'")
    with process:
        output, _ = process.communicate(timeout=PATIENCE)
    assert "ended with status -9" in output
    # Nothing of it lives on, on either side.
    for node in ("node1", "node2"):
        until(
            lambda node=node: (
                not [*nodes.cluster.processes(node, "rsync"), *nodes.cluster.processes(node, "checkpoint.replica")]
            )
        )
    inode = nodes.sh("node2", f"stat -c %i {file}")
    assert nodes.replicate(step) == (f"node2:{REPLICAS}/step_7", "")
    assert nodes.sh("node2", f"stat -c %i {REPLICAS}/step_7/*.distcp") == inode
    assert nodes.sums("node2", f"{REPLICAS}/step_7") == nodes.sums("node1", step)


@pytest.mark.slow
def test_a_link_that_is_cut_is_one_warning(nodes: Nodes) -> None:
    step = nodes.save(7)
    process, _ = nodes.half_sent(step)
    nodes.sh("node2", "ip link set eth0 down")
    try:
        with process:
            path, problem = ended(process)
        assert path is None
        assert "`node2` does not answer: " in problem or "`rsync` to `node2` failed" in problem
        assert "not responding" in problem
        # A peer that is gone from the beginning.
        assert "`node2` does not answer: ssh: connect to host node2" in nodes.replicate(step)[1]
    finally:
        nodes.sh("node2", "ip link set eth0 up")
    assert [name for name in nodes.names() if not name.startswith(".")] == []
    assert nodes.replicate(step) == (f"node2:{REPLICAS}/step_7", "")


@pytest.mark.slow
def test_a_frozen_peer_is_one_warning(nodes: Nodes) -> None:
    process, _ = nodes.half_sent(nodes.save(7), patience=5.0)
    nodes.sh("node2", "pkill -STOP -f '[c]heckpoint.replica_receiver'")
    with process:
        path, problem = ended(process)
    nodes.sh("node2", "pkill -KILL -f '[c]heckpoint.replica_receiver'")
    assert path is None
    assert "`node2` gave no sign of life for 5 s" in problem
    assert nodes.sh("node1", "ps -o stat= -C rsync || true") == "", "nothing goes on sending"


@pytest.mark.slow
def test_a_lost_node_gets_the_replica_before_back(nodes: Nodes) -> None:
    old, step = nodes.save(6), nodes.save(7)
    before = nodes.sums("node1", old)
    assert nodes.replicate(old)[1] == ""
    process, _ = nodes.half_sent(step)
    nodes.cluster.kill_node("node1")
    with process:
        process.communicate(timeout=PATIENCE)
    nodes.cluster.start_node("node1")
    assert [name for name in nodes.names() if not name.startswith(".")] == ["step_6"]
    assert f"`node2` does not give the replica `{REPLICAS}/step_7`: " in nodes.recover(step)
    assert nodes.recover(old) == "recovered"
    assert nodes.sums("node1", old) == before
    # The blank node saves again: what the lost one had half sent is swept.
    assert nodes.replicate(nodes.save(8)) == (f"node2:{REPLICAS}/step_8", "")
    assert nodes.names() == ["step_6", "step_8"]


@pytest.mark.slow
def test_a_peer_without_room_is_one_warning(nodes: Nodes) -> None:
    step = nodes.save(7)
    nodes.sh("node2", "mkdir /tmp/small && mount -t tmpfs -o size=2M none /tmp/small")
    try:
        path, problem = nodes.replicate(step, peer_dir="/tmp/small")
        assert path is None
        assert "`node2`: `/tmp/small/.replicas/node1` has 2.097 MB of space left" in problem
        assert nodes.sh("node2", "find /tmp/small -type f -size +0").split() == []
    finally:
        nodes.sh("node2", "umount /tmp/small; rmdir /tmp/small")


@pytest.mark.parametrize("saver", [pytest.param("node1", marks=pytest.mark.slow), "node2"])
def test_it_pauses_while_either_side_saves(nodes: Nodes, saver: str) -> None:
    step = nodes.save(7)
    with (
        nodes.cluster.start(
            saver, ["sh", "-c", f"exec 9>{SCRATCH}/.tunetool-saving; flock -s 9; exec sleep 9999"]
        ) as save,
        nodes.start(step) as process,
    ):
        until(lambda: "T" in nodes.sh("node1", "ps -o stat= -C rsync || true"), "rsync to be stopped", process)
        assert [name for name in nodes.names() if not name.startswith(".")] == []
        save.terminate()
        assert ended(process) == (f"node2:{REPLICAS}/step_7", "")


@pytest.mark.slow
def test_a_file_that_is_saved_again_meanwhile_is_named(nodes: Nodes) -> None:
    step = nodes.save(7)
    process, _ = nodes.half_sent(step)
    nodes.sh("node1", f"touch {step}/*.distcp")
    with process:
        path, problem = ended(process)
    assert path is None
    assert "changed since its replica was asked for" in problem
    assert [name for name in nodes.names() if not name.startswith(".")] == []


@pytest.mark.slow
@pytest.mark.parametrize("writer", [ours, torch_s])
def test_a_replica_that_rotted_is_not_recovered(nodes: Nodes, writer: Callable[[Path], Any]) -> None:
    step = nodes.save(7, writer)
    nodes.replicate(step)
    assert f"`{step}` exists" in nodes.recover(step)
    nodes.sh("node1", f"rm -rf {step}")
    flip = [sys.executable, "-c", f"import sys{_FLIP}flip(sys.argv[1])"]
    (file,) = nodes.sh("node2", f"ls {REPLICAS}/step_7/*.distcp").split()
    nodes.cluster.run("node2", [*flip, file])
    refused = nodes.recover(step)
    assert "`weight` is damaged" in refused or "differs from the replica that was verified" in refused
    assert Path(file).name in refused
    assert "step_7" not in nodes.names(SCRATCH, "node1")
    # What came is not continued with.
    nodes.cluster.run("node2", [*flip, file])
    assert nodes.recover(step) == "recovered"
