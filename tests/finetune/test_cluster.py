"""The tests' cluster: its nodes are isolated, joined by a network, and removed afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from calls import call
from cluster import CONTROL, NODES, ROOT, Cluster
from waiting import PATIENCE, until

_RECEIVE = """
import socket, sys, time
with socket.create_server(("", 7000)) as server:
    started, received = time.monotonic(), 0
    print("ready", flush=True)
    with server.accept()[0] as stream:
        while part := stream.recv(1 << 20):
            received += len(part)
    print(received / (time.monotonic() - started))
"""
_SEND = "import socket; s = socket.create_connection(('node2', 7000)); s.sendall(bytes({size})); s.close()"
_READ = """
import mmap, os, sys, time
buffer, started = mmap.mmap(-1, 1 << 20), time.monotonic()
stream = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT)
while os.readv(stream, [buffer]):
    pass
print(time.monotonic() - started)
"""


def _sent(cluster: Cluster, size: int) -> float:
    """Upper bound of the bytes per second from node1 to node2: the time begins before the first byte is sent."""
    with cluster.start("node2", [sys.executable, "-c", _RECEIVE]) as receiver:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "ready\n"
        cluster.run("node1", [sys.executable, "-c", _SEND.format(size=size)])
        return float(receiver.stdout.read())


def test_nodes_are_apart_and_share_one_directory(cluster: Cluster) -> None:
    for name in NODES:
        cluster.run(name, ["sh", "-c", f"for at in /dev/shm /tmp /run /etc; do echo {name} > $at/tunetool-mark; done"])
        cluster.run(name, ["sh", "-c", f"echo {name} >> {cluster.shared}/all"])
    for name in NODES:
        seen = cluster.run(name, ["sh", "-c", "hostname; cat /dev/shm/*mark /tmp/*mark /run/*mark /etc/tunetool-mark"])
        assert seen.stdout.split() == [name] * 5
    assert (cluster.shared / "all").read_text().split() == list(NODES)
    assert not any(Path(at, "tunetool-mark").exists() for at in ("/dev/shm", "/tmp", "/run", "/etc"))


def test_the_inventory_leads_to_both_nodes_by_name(cluster: Cluster) -> None:
    done = call(
        str(Path(sys.executable).with_name("ansible")),
        "all",
        "-i",
        str(cluster.inventory),
        "-m",
        "command",
        "-a",
        "hostname",
        env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")},
        check=True,
    )
    assert [name for name in NODES if f"{name} | CHANGED | rc=0 >>\n{name}" in done.stdout] == list(NODES)
    over = cluster.run("node1", ["ssh", "node2", "hostname; echo $SSH_CONNECTION"])
    assert over.stdout.split()[:2] == ["node2", cluster.address("node1")]


@pytest.mark.slow  # only slow tests limit the network
def test_the_limit_between_nodes_binds_and_is_lifted(cluster: Cluster) -> None:
    cluster.limit_network("100mbit")
    # It is no faster than the limit, however slow; that the limit is lifted is read from the kernel.
    assert _sent(cluster, 6_000_000) < 14e6
    assert "tbf" in _shaping(cluster, "node2")
    cluster.limit_network(None)
    assert "tbf" not in _shaping(cluster, "node2")
    assert _sent(cluster, 60_000_000) > 0


def _shaping(cluster: Cluster, node: str) -> str:
    return cluster.run(node, ["tc", "qdisc", "show", "dev", "eth0"]).stdout


def _limits(cluster: Cluster) -> list[str]:
    """The limits of the disk in the nodes' control groups."""
    groups = [group for name in NODES for group in cluster.nodes[name].groups]
    files = [path for group in groups for path in (group / "io.max", *group.glob("blkio.throttle.*_bps_device"))]
    return [path.read_text().strip() for path in files if path.exists() and path.read_text().strip()]


@pytest.mark.slow  # only slow tests limit the disk
def test_the_limit_of_the_disk_binds_on_every_node_and_is_lifted(cluster: Cluster) -> None:
    data = cluster.shared / "data"
    data.write_bytes(os.urandom(10 << 20))
    with data.open("rb") as stream:
        os.fsync(stream.fileno())
    read = [sys.executable, "-c", _READ, str(data)]
    cluster.throttle(cluster.shared, 10 << 20)
    assert all(float(cluster.run(name, read).stdout) > 0.8 for name in NODES)
    assert _limits(cluster) != []
    cluster.throttle(cluster.shared, None)
    assert _limits(cluster) == []


def test_signals_reach_a_program_on_a_node(cluster: Cluster) -> None:
    # It waits for the signal itself: one that came just before a sleep would not end that.
    wait = (
        "import signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, {2}); print('up', flush=True);"
        "sys.exit(40 + signal.sigwait({2}))"
    )
    with cluster.start("node1", [sys.executable, "-c", wait]) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE) == 42
        finally:
            process.kill()


@pytest.mark.slow  # only slow tests lose a node
def test_a_node_can_be_lost_and_come_back(cluster: Cluster) -> None:
    cluster.run("node2", ["sh", "-c", "sleep 12345 >/dev/null 2>&1 & echo mine > /tmp/mine"])
    assert cluster.processes("node2", "sleep 12345") == ["sleep 12345"]
    cluster.kill_node("node2")
    lost = cluster.run("node1", ["ssh", "-o", "ConnectTimeout=1", "node2", "true"], check=False)
    assert lost.returncode == 255
    cluster.start_node("node2")
    assert "mine" not in cluster.run("node1", ["ssh", "node2", "ls /tmp"]).stdout.split()
    assert cluster.processes("node2", "sleep 12345") == []


_OWNER = """
import subprocess, sys, time
from pathlib import Path
from cluster import cluster_of_two

from waiting import PATIENCE, until
with cluster_of_two(Path(sys.argv[1])) as cluster:
    for name in cluster.nodes:
        cluster.run(name, ["sh", "-c", "sleep 54321 >/dev/null 2>&1 &"])
    print(*[node.pid for node in cluster.nodes.values()], cluster.address("node1"), flush=True)
    if sys.argv[2] == "fail":
        raise RuntimeError("as a test would")
    time.sleep(6000)
"""


@pytest.mark.parametrize("how", [pytest.param("fail", marks=pytest.mark.slow), "kill"])
def test_nothing_is_left_of_a_cluster_without_its_owner(cluster: Cluster, tmp_path: Path, how: str) -> None:
    owner = [sys.executable, "-c", _OWNER, str(tmp_path), how]
    with subprocess.Popen(
        owner,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        *pids, address = process.stdout.readline().split()
        assert len(pids) == len({*NODES, CONTROL})
        if how == "kill":
            process.kill()
    network = address.rsplit(".", 1)[0] + "."

    def left() -> list[object]:
        there = [pid for pid in pids if Path("/proc", pid).exists()]
        return [*there, *_addresses(network), *_processes("54321"), *_groups(process.pid)]

    until(lambda: not left(), "the end of all that the cluster had")


def _addresses(network: str) -> list[str]:
    listed = subprocess.run(["ip", "-o", "-4", "address"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if network in line]


def _groups(owner: int) -> list[Path]:
    return list(Path("/sys/fs/cgroup").glob(f"**/tunetool-{owner}-*"))


def _processes(needle: str) -> list[str]:
    listed = subprocess.run(["ps", "-e", "-o", "args="], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line == f"sleep {needle}"]
