"""Ranks on this machine and on two nodes: outputs are fetched, dead and hanging ranks are named, nothing remains."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

if not find_spec("torch"):
    pytest.skip("torch is not installed", allow_module_level=True)

import launched
from launched import Said, job

from cluster import NODES, Cluster
from tunetool.launch.choose import launcher
from tunetool.launch.job import Host
from tunetool.launch.local import RankFailed
from waiting import PATIENCE, until

SHM = Path("/dev/shm")
LAUNCHED = Path(launched.__file__)


def reported(directory: Path, rank: int) -> dict[str, str]:
    return dict(json.loads((directory / f"rank-{rank}/told.json").read_text()))


def running(needle: str) -> list[str]:
    listed = subprocess.run(["ps", "-e", "-o", "args="], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if needle in line]


@contextlib.contextmanager
def foreign(*names: str) -> Iterator[None]:
    """Files of another run in /dev/shm."""
    paths = [SHM / name for name in names]
    for path in paths:
        path.write_bytes(b"another's")
    try:
        yield
        assert [path.name for path in paths if path.read_bytes() != b"another's"] == []
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def test_a_rank_knows_its_place_and_only_what_it_wrote_stays(tmp_path: Path) -> None:
    before = time.time()
    with foreign("torch_1_2_3", "nccl-of-tests"):
        launcher("auto", None, None, Said()).run(job(tmp_path / "run", "work", "leave"), lambda: None)
        ranks = [reported(tmp_path / "run", rank) for rank in (0, 1)]
        assert [(each["RANK"], each["LOCAL_RANK"]) for each in ranks] == [("0", "0"), ("1", "1")]
        for each in ranks:
            assert (each["WORLD_SIZE"], each["LOCAL_WORLD_SIZE"]) == ("2", "2")
            assert each["MASTER_ADDR"] == "127.0.0.1"
            assert each["OF_TESTS"] == "$x 'y' {{ z }}"
            assert each["TUNETOOL_OUT"] == str(tmp_path / "run")
            assert before < float(each["started_at"]) < time.time()
            assert not Path(each["left"]).exists()
            assert running(f"sleep {each['child']}") == []
            assert not Path(each["TUNETOOL_NODE"]).exists()
    assert (tmp_path / "run/rank-1/stdout.log").read_text() == "I am 1\n"


def test_a_rank_that_hangs_is_named_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as caught:
        launcher("local", None, None, Said()).run(job(tmp_path, "gather", "away", stall=10.0), lambda: None)
    assert caught.value.rank == 1
    assert caught.value.host == os.uname().nodename
    line = next(at for at, text in enumerate(LAUNCHED.read_text().splitlines(), 1) if "# away" in text)
    said = re.sub(r"after \d+ beats", "after some beats", str(caught.value))
    assert f"rank 1 on `{os.uname().nodename}` is behind, after some beats, and is at {LAUNCHED}:{line} in away" in said
    assert "all_reduce" in (tmp_path / "rank-0/stack.txt").read_text()
    assert running(str(LAUNCHED)) == []


@pytest.mark.slow  # longer than the stall time
def test_ranks_that_wait_for_a_compiler_do_not_hang(tmp_path: Path) -> None:
    launcher("local", None, None, Said()).run(job(tmp_path, "compiling", "30", stall=10.0), lambda: None)
    assert [reported(tmp_path, rank)["RANK"] for rank in (0, 1)] == ["0", "1"]


@pytest.mark.parametrize("how", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL])
def test_interrupted_or_killed_nothing_is_left_on_this_machine(tmp_path: Path, how: signal.Signals) -> None:
    with _control("local", "", str(tmp_path), "wait", log=tmp_path / "log") as control:
        until(lambda: len(list(tmp_path.glob("rank-*/told.json"))) == 2, "both ranks", control)
        ranks = [reported(tmp_path, rank) for rank in (0, 1)]
        assert all(running(f"sleep {each['child']}") for each in ranks)
        control.send_signal(how)
        assert control.wait(PATIENCE) == (130 if how == signal.SIGINT else -signal.SIGKILL)
    for each in ranks:
        # Interrupted, it was cleaned up when the control process ended; killed, a moment later.
        if how == signal.SIGKILL:
            until(lambda each=each: not Path(each["TUNETOOL_NODE"]).exists(), "the rank's folder to go")  # type: ignore[misc]
        assert not Path(each["TUNETOOL_NODE"]).exists()
        assert running(f"sleep {each['child']}") == []
        assert not Path(each["left"]).exists()


@pytest.mark.slow
def test_deepspeeds_buffers_go_with_a_dead_rank_and_others_stay(tmp_path: Path) -> None:
    if not find_spec("deepspeed"):
        pytest.skip("deepspeed is not installed")
    name = f"deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1_1_0"
    with foreign(name):
        with pytest.raises(RankFailed) as caught:
            launcher("local", None, None, Said()).run(job(tmp_path, "buffers", "die"), lambda: None)
        assert str(caught.value).startswith(f"rank 1 on `{os.uname().nodename}` was ended by SIGKILL")
        made = reported(tmp_path, 0)["buffers"].split()
        assert len(made) == 2
        assert [each for each in made if (SHM / each).exists()] == []


@contextlib.contextmanager
def _control(*arguments: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A launch in a process of its own."""
    argv = [sys.executable, str(LAUNCHED), "control", *arguments]
    with log.open("wb") as stream, subprocess.Popen(argv, stdout=stream, stderr=subprocess.STDOUT) as process:
        try:
            yield process
        finally:
            process.kill()


def _left(cluster: Cluster, node: str) -> str:
    listed = cluster.run(node, ["sh", "-c", "ls -d /tmp/tunetool-launch-* /dev/shm/*"], check=False).stdout
    return listed + "\n".join(cluster.processes(node, "tunetool.launch") + cluster.processes(node, "sleep 7"))


@pytest.fixture
def directory(cluster: Cluster, request: pytest.FixtureRequest) -> Path:
    """On every node, at the same path."""
    return cluster.shared / request.node.name[:40]


def test_over_ssh_the_rank_that_dies_is_named_with_its_host(cluster: Cluster, directory: Path) -> None:
    # Debian's entry, by which gloo and every server on the first node would use the wrong address.
    edited = cluster.run("node1", ["sed", "-i.bak", r"s/^\S* node1$/127.0.1.1 node1/", "/etc/hosts"])
    assert "127.0.1.1 node1" in cluster.run("node1", ["cat", "/etc/hosts"]).stdout, edited
    hosts = [Host(name, name if name == "node1" else cluster.address(name)) for name in NODES]
    with pytest.raises(RankFailed) as caught:
        launcher("auto", cluster.inventory, None, Said()).run(
            job(directory, "gather", "die", python=sys.executable, hosts=hosts), lambda: None
        )
    cluster.run("node1", ["mv", "/etc/hosts.bak", "/etc/hosts"])
    assert (caught.value.rank, caught.value.host) == (1, "node1")
    assert str(caught.value).startswith("rank 1 on `node1` was ended by SIGKILL")
    ranks = [reported(directory, rank) for rank in range(4)]
    assert [(each["host"], each["LOCAL_RANK"]) for each in ranks] == [
        (node, local) for node in NODES for local in ("0", "1")
    ]
    assert {(each["MASTER_ADDR"], each["WORLD_SIZE"]) for each in ranks} == {("node1", "4")}
    # Every rank added its number, so they did communicate.
    assert {each["sum"] for each in ranks} == {"6.0"}
    assert {each["OF_TESTS"] for each in ranks} == {"$x 'y' {{ z }}"}
    assert [_left(cluster, node) for node in NODES] == ["", ""]


@pytest.mark.slow
def test_of_two_runs_one_is_interrupted_and_one_loses_a_node(cluster: Cluster, directory: Path) -> None:
    directory.mkdir()
    try:
        with (
            _over_ssh(cluster, directory, "1") as first,
            _over_ssh(cluster, directory, "2") as second,
        ):
            until(lambda: all(len(_marks(cluster, name)) == 2 for name in NODES), "the ranks of both runs", first)
            first.send_signal(signal.SIGINT)
            assert first.wait(PATIENCE) == 130
            # The other run continues.
            assert [len(_marks(cluster, name)) for name in NODES] == [1, 1]
            cluster.kill_node("node2")
            assert second.wait(PATIENCE) == 3, _logs(directory)
        assert (directory / "2.log").read_text().startswith("host `node2` is lost")
        assert reported(directory / "2", 0)["host"] == "node1"
        assert _left(cluster, "node1") == ""
    finally:
        if "node2" not in cluster.nodes:
            cluster.start_node("node2")


@pytest.mark.slow
def test_killed_outright_nothing_is_left_on_any_node(cluster: Cluster, directory: Path) -> None:
    directory.mkdir()
    before = set(Path("/tmp").glob("tunetool-fleet-*"))
    with _over_ssh(cluster, directory, "1") as launcher_process:
        until(lambda: all(_marks(cluster, name) for name in NODES), "the ranks", launcher_process)
        launcher_process.kill()
    until(lambda: all(_left(cluster, name) == "" for name in NODES), "the end of what the nodes had")
    until(lambda: running(str(cluster.inventory)) == [], "the end of Ansible")
    until(lambda: set(Path("/tmp").glob("tunetool-fleet-*")) <= before, "the end of Ansible's folder")


def _over_ssh(
    cluster: Cluster, directory: Path, name: str
) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    return _control("ssh", str(cluster.inventory), str(directory / name), "wait", log=directory / f"{name}.log")


def _logs(directory: Path) -> list[str]:
    return [path.read_text() for path in sorted(directory.glob("*.log"))]


def _marks(cluster: Cluster, node: str) -> list[str]:
    """The ranks that started on a node: each has a child that sleeps."""
    return cluster.processes(node, "sleep 7")


def _from_control(cluster: Cluster, directory: Path, *what: str) -> subprocess.CompletedProcess[str]:
    """DeepSpeed's launcher; the test is skipped without pdsh."""
    directory.mkdir()
    hosts: Mapping[str, object] = {name: {"ansible_host": cluster.address(name)} for name in NODES}
    inventory = directory / "inventory.yml"
    variables = {"ansible_python_interpreter": sys.executable}
    inventory.write_text(json.dumps({"all": {"vars": variables, "hosts": hosts}}))
    argv = [sys.executable, str(LAUNCHED), "control", "deepspeed", str(inventory), str(directory), *what]
    return cluster.run("control", argv, env={"DS_ACCELERATOR": "cpu"}, timeout=PATIENCE, check=False)


@pytest.mark.slow
def test_deepspeeds_launcher_runs_ranks_that_come_home(cluster: Cluster, directory: Path) -> None:
    if not find_spec("deepspeed"):
        pytest.skip("deepspeed is not installed")
    done = _from_control(cluster, directory, "gather")
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = [reported(directory, rank) for rank in range(2)]
    assert [(each["host"], each["LOCAL_RANK"], each["LOCAL_WORLD_SIZE"]) for each in ranks] == [
        (node, "0", "1") for node in NODES
    ]
    assert {each["sum"] for each in ranks} == {"1.0"}
    assert {each["OF_TESTS"] for each in ranks} == {"$x 'y' {{ z }}"}
    assert (directory / "rank-1/stdout.log").read_text() == "I am 1\n"
    assert [_left(cluster, node) for node in NODES] == ["", ""]


@pytest.mark.slow
def test_a_dead_rank_of_deepspeeds_launcher_is_named(cluster: Cluster, directory: Path) -> None:
    if not find_spec("deepspeed"):
        pytest.skip("deepspeed is not installed")
    done = _from_control(cluster, directory, "gather", "die")
    assert done.returncode == 3
    assert "rank 1 on `node2` was ended by a signal" in done.stdout
    assert [_left(cluster, node) for node in NODES] == ["", ""]


@pytest.mark.slow
def test_a_host_without_the_program_ends_the_run_before_any_rank(cluster: Cluster, directory: Path) -> None:
    with pytest.raises(RankFailed, match="host `node1`: `/nowhere/python` does not exist"):
        launcher("ssh", cluster.inventory, None, Said()).run(
            job(directory, "wait", python="/nowhere/python"), lambda: None
        )
    assert list(directory.glob("rank-*")) == []
    assert [_left(cluster, node) for node in NODES] == ["", ""]
