"""The table of loss: what a job resumes from when nodes, links, bits or clocks fail. Three nodes with their own files, a
real sshd and rsync, and ranks that talk by gloo. docs/guides/checkpoint-replica.md has its figures."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the checkpoints are torch's own")

from cluster import ROOT, Cluster, cluster_of_two
from losses import PART, PROGRAM, TWO, Job, replicate, save, values
from waiting import PATIENCE, until

pytestmark = pytest.mark.slow
SCRATCH = "/tmp/scratch"
ALL = ("node1", "node2", "node3")
DAY = 86_400
_SSH = ("ssh", "-o", "ConnectTimeout=2", "-o", "ServerAliveInterval=1", "-o", "ServerAliveCountMax=2")
_FLIP = """
import os, sys
times = os.stat(sys.argv[1])
with open(sys.argv[1], "r+b") as stream:
    stream.seek(2000000)
    byte = stream.read(1)[0]
    stream.seek(2000000)
    stream.write(bytes([byte ^ 1]))
os.utime(sys.argv[1], ns=(times.st_atime_ns, times.st_mtime_ns))
"""


class ClusterJob(Job):
    """A job on nodes in namespaces, which lose power and bits."""

    nodes: Cluster

    def sh(self, node: str, script: str) -> str:
        return self.nodes.run(node, ["sh", "-c", script]).stdout

    def replace(self, *nodes: str) -> None:
        """They lose power, and blank ones take their place."""
        for node in nodes:
            self.nodes.kill_node(node)
        for node in nodes:
            self.nodes.start_node(node)

    def flip(self, node: str, files: str) -> None:
        largest = self.sh(node, f"ls -S {files}").split()[0]
        self.nodes.run(node, [sys.executable, "-c", _FLIP, largest])


def job_on(cluster: Cluster, **options: Any) -> ClusterJob:
    env = {"PYTHONPATH": str(ROOT / "tools"), "GLOO_SOCKET_IFNAME": "eth0"}
    return ClusterJob(cluster, (sys.executable, str(PROGRAM)), SCRATCH, f"{cluster.shared}/bulk", _SSH, env, options)


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="tunetool-cluster-") as folder, cluster_of_two(Path(folder), ALL) as made:
        yield made


@pytest.fixture
def cluster(three: Cluster) -> Iterator[Cluster]:
    """Three blank nodes."""
    yield three
    for name in list(three.nodes):
        three.run(name, ["sh", "-c", f"ip link set eth0 up; rm -rf {SCRATCH} {three.shared}/bulk"])


@pytest.fixture
def job(cluster: Cluster) -> ClusterJob:
    return job_on(cluster)


def test_a_node_lost_after_its_replication_loses_nothing(job: ClusterJob) -> None:
    job.run(TWO, save(6), replicate(6), save(7), replicate(7))
    job.replace("node1")
    ranks = job.resume("a node lost after the replication", TWO)
    assert (ranks[0]["step"], values(ranks)) == (7, [7, 7])
    assert PART < ranks[0]["bytes"] < 1.1 * PART
    assert ranks[0]["path"] == f"{SCRATCH}/step_7"
    # What it brought is there: nothing is brought again.
    again = job.resume("nothing lost since", TWO)
    assert (values(again), again[0]["bytes"]) == ([7, 7], 0)


def test_a_node_lost_before_replication_loses_one_interval(job: ClusterJob) -> None:
    job.run(TWO, save(6), replicate(6), save(7))
    job.replace("node1")
    ranks = job.resume("a node lost before the replication", TWO)
    assert (ranks[0]["step"], values(ranks)) == (6, [6, 6])


@pytest.mark.parametrize("how", ["node", "link"])
def test_a_node_lost_in_replication_loses_one_interval(job: ClusterJob, how: str) -> None:
    slow = replicate(7, [0], rate=2**20)
    ranks = job.start(TWO, save(6), replicate(6), save(7), slow)
    torn = f"{SCRATCH}/.replicas/node1/.draining-step_7-*/__0_0.*"
    until(lambda: int(job.sh("node2", f"stat -c %s {torn} 2>/dev/null || echo 0")) > 2**20, "a part of it", ranks[0])
    if how == "link":
        job.sh("node2", "ip link set eth0 down")
        until(lambda: not job.nodes.processes("node1", "checkpoint.replica_worker"), "its end", ranks[1])
    job.nodes.kill_node("node1")
    for rank in ranks:
        rank.terminate()
        rank.communicate(timeout=PATIENCE)
    job.sh("node2", "ip link set eth0 up; pkill -f '[r]ank_on_node' || true")
    job.nodes.start_node("node1")
    what = (
        "the link cut in the middle of it, then the node lost" if how == "link" else "a node lost in the middle of it"
    )
    resumed = job.resume(what, TWO)
    assert (resumed[0]["step"], values(resumed)) == (6, [6, 6])
    assert "replica of `node1` on `node2`: its replication did not end" in resumed[0]["skipped"][0]


def test_a_lost_peer_loses_nothing(job: ClusterJob) -> None:
    job.run(ALL, save(6), replicate(6), save(7), replicate(7))
    job.replace("node2")
    ranks = job.resume("the peer lost, of three nodes", ALL)
    assert (ranks[0]["step"], values(ranks)) == (7, [7, 7, 7])


def test_what_both_nodes_lost_comes_from_shared_storage(job: ClusterJob) -> None:
    job.run(ALL, save(6), replicate(6), ("drain", {"step": 6}), save(7), replicate(7))
    job.replace("node1", "node2")
    ranks = job.resume("a node and its peer lost: shared storage serves", ALL)
    assert (ranks[0]["step"], values(ranks), ranks[0]["bytes"]) == (6, [6, 6, 6], 0)
    assert ranks[0]["path"] == f"{job.bulk}/step_6"
    assert "`node1` needs shard `__0_0." in ranks[0]["skipped"][0]
    job.sh("node3", f"rm -rf {job.bulk}")
    (error,) = {rank["error"] for rank in job.resume("the same without shared storage: every rank gets one error", ALL)}
    assert error.startswith("no step can be read by every rank: step 7: `node1` needs shard `__0_0.")


def test_ranks_that_share_a_node_get_their_files_together(job: ClusterJob) -> None:
    four = ("node1", "node1", "node2", "node2")
    job.run(four, save(7), replicate(7))
    job.replace("node1")
    ranks = job.resume("two ranks on each node, one of them lost", four)
    assert (ranks[0]["step"], values(ranks)) == (7, [7, 7, 7, 7])
    assert 2 * PART < ranks[0]["bytes"] < 2.1 * PART


@pytest.mark.parametrize("torch_s", [False, True])
def test_a_replica_that_rotted_loses_one_interval(cluster: Cluster, torch_s: bool) -> None:
    job = job_on(cluster, torch_s=torch_s)
    job.run(TWO, save(6), replicate(6), save(7), replicate(7))
    job.flip("node2", f"{SCRATCH}/.replicas/node1/step_7/*.distcp")
    job.replace("node1")
    ranks = job.resume("a bit flipped in the replica, then the node lost", TWO)
    assert (ranks[0]["step"], values(ranks)) == (6, [6, 6])
    assert "replica of `node1` on `node2`: " in ranks[0]["skipped"][0]
    named = "differs from the replica that was verified" if torch_s else "`weight` is damaged"
    assert named in ranks[0]["skipped"][0]


def test_a_bit_that_flips_on_the_node_is_never_loaded(job: ClusterJob) -> None:
    job.run(TWO, save(6), replicate(6), save(7), replicate(7))
    job.flip("node1", f"{SCRATCH}/step_7/*.distcp")
    ranks = job.run(TWO, ("resume", {}))
    assert "`weight` is damaged" in ranks[0]
    job.sh("node1", f"mv {SCRATCH}/step_7 {SCRATCH}/damaged")
    resumed = job.resume("a bit flipped on the node: the load says so; that step moved away", TWO)
    assert (resumed[0]["step"], values(resumed)) == (7, [7, 7])


@pytest.mark.parametrize(("first", "second"), [(DAY, 0), (0, -DAY)])
def test_a_clock_a_day_wrong_loses_nothing(job: ClusterJob, first: int, second: int) -> None:
    job.run(TWO, save(6, clock=first), replicate(6), save(7, clock=second), replicate(7))
    job.replace("node1")
    what = "a clock a day ahead at the save before" if first else "a clock a day behind at the last save"
    ranks = job.resume(f"{what}, then the node lost", TWO)
    assert (ranks[0]["step"], values(ranks)) == (7, [7, 7])


def test_a_node_that_comes_back_brings_nothing_old(job: ClusterJob) -> None:
    # Its step 7 was not replicated when another node took its place, and the job saved step 7 again there.
    job.run(TWO, save(6), replicate(6), save(7))
    others = ("node3", "node2")
    assert values(job.resume("a blank node in place of one", others)) == [6, 6]
    job.run(others, save(7, seed=8), replicate(7))
    job.nodes.kill_node("node3")
    ranks = job.resume("a node that comes back with its old files", TWO)
    job.nodes.start_node("node3")
    assert (ranks[0]["step"], values(ranks)) == (7, [8, 8])
    kept = job.sh("node1", f"ls {SCRATCH}").split()
    assert [name.rpartition("-")[0] for name in kept if name.startswith("step_7.")] == ["step_7.other-save"]


@pytest.mark.parametrize("torch_s", [False, True])
@pytest.mark.parametrize(("nodes", "lost"), [(("node2", "node1"), ()), (("node2", "node3"), ("node1",))])
def test_a_job_resumes_on_other_nodes_in_another_order(
    cluster: Cluster, torch_s: bool, nodes: Sequence[str], lost: Sequence[str]
) -> None:
    job = job_on(cluster, torch_s=torch_s)
    job.run(TWO, save(6), replicate(6), save(7), replicate(7))
    job.replace(*lost)
    ranks = job.resume(f"restarted on {' and '.join(nodes)}" + (", the first one lost" if lost else ""), nodes)
    assert (ranks[0]["step"], values(ranks)) == (7, [7, 7])


def test_torchs_files_come_where_any_rank_may_need_them(cluster: Cluster) -> None:
    job = job_on(cluster, torch_s=True, shared=True)
    job.run(TWO, save(7), replicate(7))
    job.replace("node1")
    ranks = job.resume("a node lost, what all ranks hold in files of torch's writer", TWO)
    assert (ranks[0]["step"], values(ranks)) == (7, [7, 7])


def test_copies_of_a_shard_come_from_whoever_wrote_it(cluster: Cluster) -> None:
    """As with hybrid sharding: each node holds the whole model, and one of them wrote it."""
    job, four = job_on(cluster, copies=2), ("node1", "node1", "node2", "node2")
    job.run(four, save(7), replicate(7))
    ranks = job.resume("nothing lost, two copies of the model", four)
    assert (ranks[0]["step"], values(ranks)) == (7, [7, 7, 7, 7])
    # The other one has taken it from the replica that it keeps.
    assert ranks[0]["bytes"] == 0
    job.replace("node1")
    ranks = job.resume("a node lost, two copies of the model", four)
    assert (ranks[0]["step"], values(ranks)) == (7, [7, 7, 7, 7])
    assert 2 * PART < ranks[0]["bytes"] < 2.2 * PART
