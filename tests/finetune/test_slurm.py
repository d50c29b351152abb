"""Jobs under a real Slurm: slurmctld and two slurmd on the nodes of the tests' cluster."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster import CONTROL, NODES, Cluster
from staged import Quiet
from tunetool.errors import UsageProblem
from tunetool.launch.job import Host, Job
from tunetool.launch.local import RankFailed
from tunetool.launch.slurm import SlurmLauncher, SlurmOptions
from tunetool.node.health import health_units
from tunetool.node.health.settings import CONFIG_PATH, dump
from waiting import PATIENCE, until

_RANK = Path(__file__).with_name("slurm_rank.py")


def _job(directory: Path, what: str, *nodes: str) -> Job:
    hosts = [Host(name, name) for name in nodes]
    return Job((str(_RANK), what), 1, {"SAID": "a secret"}, directory, hosts, sys.executable)


def _run(
    cluster: Cluster,
    job: Job,
    tick: Callable[[], None] = lambda: None,
    progress: Quiet | None = None,
    **options: object,
) -> list[str]:
    progress, began = progress or Quiet(), time.monotonic()

    def watched() -> None:
        assert time.monotonic() - began < PATIENCE, progress.lines
        tick()

    asked = SlurmOptions(**{"work_dir": cluster.shared, **options})  # type: ignore[arg-type]
    SlurmLauncher(asked, progress).run(job, watched)
    return progress.lines


def _once(condition: Callable[[], object], call: Callable[[], None]) -> Callable[[], None]:
    """A tick that calls a function once, when the condition holds."""
    pending = [call]

    def tick() -> None:
        if pending and condition():
            pending.pop()()

    return tick


def _up(cluster: Cluster, rank: int) -> Callable[[], object]:
    """Whether that rank is working."""
    return lambda: list(cluster.shared.glob(f".tunetool-*/rank-{rank}/result.json"))


def _nothing_is_left(cluster: Cluster) -> None:
    assert cluster.run(CONTROL, ["squeue", "-h"]).stdout == ""
    assert list(cluster.shared.iterdir()) == []
    for name in cluster.nodes:
        assert cluster.processes(name, _RANK.name) == []
        assert cluster.processes(name, "slurm_node") == []
        listing = cluster.run(name, ["sh", "-c", "ls -A /dev/shm; ls -A /tmp | grep ^tunetool-slurm; true"])
        assert listing.stdout == ""


def test_ranks_on_two_nodes_reduce_and_their_outputs_come_back(slurm: Cluster, tmp_path: Path) -> None:
    said = _run(slurm, _job(tmp_path, "reduce", *NODES))
    assert any("running on node[1-2]" in line for line in said), said
    results = [json.loads((tmp_path / f"rank-{rank}/result.json").read_text()) for rank in range(2)]
    assert [result["host"] for result in results] == list(NODES)
    assert [result["sum"] for result in results] == [3000.0, 3000.0]
    assert {result["world"] for result in results} == {2}
    assert {result["said"] for result in results} == {"a secret"}
    # Otherwise Lightning would take srun for what started the ranks.
    assert all("SLURM_NTASKS" not in result["slurm"] for result in results)
    assert all(result["cpus"] == os.cpu_count() for result in results)
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "result.json"]
    assert not [path for path in kept if "a secret" in path.read_text()]
    _nothing_is_left(slurm)


def test_a_rank_that_fails_is_named_and_all_are_ended(slurm: Cluster, tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as caught:
        _run(slurm, _job(tmp_path, "fail", *NODES))
    message = "rank 1 on `node2` ended with exit status 1: RuntimeError: the cable of rank 1 fell out"
    assert caught.value.message == message
    assert (caught.value.rank, caught.value.host) == (1, "node2")
    assert "waiting" in (tmp_path / "rank-0/stdout.log").read_text()
    assert not (tmp_path / "spec.json").exists()
    _nothing_is_left(slurm)


def test_an_interrupt_cancels_the_job_and_leaves_nothing(slurm: Cluster, tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _run(slurm, _job(tmp_path, "wait", *NODES), _once(_up(slurm, 1), interrupt))
    _nothing_is_left(slurm)


@pytest.mark.slow
def test_a_killed_guard_leaves_nothing_and_takes_nothing(slurm: Cluster, tmp_path: Path) -> None:
    others = "/dev/shm/deepspeed_allreduce_buffer_0_10.0.0.1_29500_0"
    slurm.run("node2", ["touch", others])

    def kill() -> None:
        slurm.run(
            "node2",
            [
                "sh",
                "-c",
                "kill -9 $(ps -e -o pid=,args= | awk '/-m tunetool.launch.slurm_node/ && !/awk/ { print $1 }')",
            ],
        )

    with pytest.raises(RankFailed, match="node2"):
        _run(slurm, _job(tmp_path, "wait", *NODES), _once(_up(slurm, 1), kill))
    slurm.run("node2", ["rm", others])
    _nothing_is_left(slurm)


@pytest.mark.slow
def test_a_job_that_somebody_else_cancels_is_told_so(slurm: Cluster, tmp_path: Path) -> None:
    def cancel() -> None:
        slurm.run(CONTROL, ["scancel", "--name=tunetool"])

    with pytest.raises(RankFailed, match=r"job \d+ was cancelled, and not by tunetool \(CANCELLED\)"):
        _run(slurm, _job(tmp_path, "wait"), _once(_up(slurm, 0), cancel))
    _nothing_is_left(slurm)


@pytest.mark.slow
def test_a_job_waits_with_its_reason_until_its_nodes_are_free(slurm: Cluster, tmp_path: Path) -> None:
    blocking = slurm.start(CONTROL, ["srun", "--exclusive", "--nodes=2", "sleep", "6000"])
    until(lambda: slurm.run(CONTROL, ["squeue", "-h", "-t", "RUNNING"]).stdout, "the job that blocks", blocking)
    progress = Quiet()

    def waiting() -> bool:
        return any("waits: Resources (its nodes are in use)" in line for line in progress.lines)

    free = _once(waiting, lambda: slurm.run(CONTROL, ["scancel", "--name=sleep"]) and None)
    with pytest.raises(RankFailed, match="rank 0 on `node1`"):
        _run(slurm, Job((str(_RANK),), 1, {}, tmp_path, python=sys.executable), free, progress)
    blocking.communicate(timeout=PATIENCE)
    assert waiting()


def test_what_slurm_refuses_is_told_in_its_words_with_a_hint(slurm: Cluster, tmp_path: Path) -> None:
    with pytest.raises(UsageProblem) as caught:
        _run(slurm, _job(tmp_path, "wait"), lines=["--partition=nowhere"])
    assert caught.value.message == "`sbatch` refuses the job: invalid partition specified: nowhere"
    assert "sinfo" in str(caught.value.hint)
    with pytest.raises(UsageProblem, match="Invalid node name specified"):
        _run(slurm, _job(tmp_path, "wait", "nowhere"))


def test_a_job_that_would_wait_for_ever_is_cancelled(slurm: Cluster, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"job \d+ would never start: it is held"):
        _run(slurm, _job(tmp_path, "wait"), lines=["--hold"])
    _nothing_is_left(slurm)


def test_a_directory_that_the_nodes_do_not_share_is_named(slurm: Cluster, tmp_path: Path) -> None:
    # Every node has its own /dev/shm, and this machine too.
    apart = Path("/dev/shm") / f"tunetool-test-{os.getpid()}"
    apart.mkdir()
    try:
        with pytest.raises(RankFailed) as caught:
            _run(slurm, _job(tmp_path, "wait"), work_dir=apart)
    finally:
        apart.rmdir()
    assert str(apart) in caught.value.message
    assert "--slurm work-dir" in str(caught.value.hint)


def test_a_python_that_the_nodes_lack_is_named(slurm: Cluster, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="/opt/nowhere/bin/python") as caught:
        _run(slurm, Job((str(_RANK), "wait"), 1, {}, tmp_path, python="/opt/nowhere/bin/python"))
    assert "installed on the nodes" in str(caught.value.hint)


def test_a_sick_node_is_drained_by_its_check_and_comes_back(slurm: Cluster) -> None:
    """slurmd itself starts the program, with the little environment that it gives."""
    folder = slurm.shared / "health"
    folder.mkdir()
    starter, python = folder / "tunetool-health", folder / "python"
    (folder / "tunetool").touch()
    starter.write_text(health_units.files(str(folder / "tunetool"), "", 900, "")[str(starter)])
    # Without -I: this very checkout's code, whatever is installed.
    python.write_text(f'#!/bin/sh\nshift; PYTHONPATH={_RANK.parents[2]}/tools exec {sys.executable} "$@"\n')
    for program in (starter, python):
        program.chmod(0o755)
    before = slurm.run(CONTROL, ["cat", "/etc/slurm/slurm.conf"]).stdout

    def configure(text: str) -> None:
        for name in (CONTROL, *NODES):
            slurm.run(name, ["sh", "-c", "cat > /etc/slurm/slurm.conf"], stdin=text)
        slurm.run(CONTROL, ["scontrol", "reconfigure"])

    def write(path: str, text: str) -> None:
        slurm.run("node2", ["sh", "-c", f"mkdir -p $(dirname {path}); cat > {path}"], stdin=text)

    def result(*failed: str) -> None:
        document = {"at": time.time(), "status": "fail" if failed else "pass", "failed": failed, "doubts": []}
        write("/run/tunetool/health.json", json.dumps(document))

    def shown(node: str) -> str:
        return slurm.run(CONTROL, ["scontrol", "--oneliner", "show", "node", node]).stdout

    write(CONFIG_PATH, dump(86400, 0, "", []))
    result("array.members: 7 of 8 members; missing `S1`")
    try:
        configure(f"{before}\nHealthCheckProgram={starter}\nHealthCheckInterval=1\nHealthCheckNodeState=ANY\n")
        until(lambda: "IDLE+DRAIN" in shown("node2"), "the drain")
        assert "Reason=tunetool health: array.members: 7 of 8 members; missing `S1` [" in shown("node2")
        # This node's health is unknown: nothing is asked or done.
        assert "DRAIN" not in shown("node1")
        result()
        until(lambda: "DRAIN" not in shown("node2"), "the end of the drain")
        assert "Reason=" not in shown("node2")
        assert slurm.run("node2", ["ls", "/var/lib/tunetool/health"]).stdout == ""
    finally:
        configure(before)
        shutil.rmtree(folder)


@pytest.mark.slow  # half a minute: Slurm waits for a node before it gives it up
def test_a_lost_node_ends_the_run_with_its_name(slurm: Cluster, tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as caught:
        _run(slurm, _job(tmp_path, "wait", *NODES), _once(_up(slurm, 1), lambda: slurm.kill_node("node2")))
    assert "node2" in caught.value.message
    assert caught.value.host == "node2"
    _nothing_is_left(slurm)
