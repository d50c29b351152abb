"""Jobs under a real Slurm: slurmctld and two slurmd on the nodes of the tests' cluster."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster import CONTROL, NODES, Cluster
from cluster_slurm import COMMANDS, start_slurm
from staged import Quiet
from tunetool.errors import UsageProblem
from tunetool.launch.job import Job
from tunetool.launch.local import RankFailed
from tunetool.launch.slurm import SlurmLauncher
from tunetool.launch.slurm_script import SlurmOptions

_LONGEST = 90
_RANK = Path(__file__).with_name("slurm_rank.py")


@pytest.fixture(scope="module")
def slurm(cluster: Cluster) -> Iterator[Cluster]:
    start_slurm(cluster)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{cluster.commands(CONTROL, COMMANDS)}{os.pathsep}{os.environ['PATH']}")
        yield cluster


def _job(directory: Path, what: str, **more: object) -> Job:
    return Job((str(_RANK), what), 1, {"SAID": "a secret"}, directory, python=sys.executable, **more)  # type: ignore[arg-type]


def _run(job: Job, options: SlurmOptions, tick: Callable[[], None] = lambda: None) -> list[str]:
    progress, began = Quiet(), time.monotonic()

    def watched() -> None:
        assert time.monotonic() - began < _LONGEST, progress.lines
        tick()

    SlurmLauncher(options, progress).run(job, watched)
    return progress.lines


def _nothing_is_left(cluster: Cluster) -> None:
    assert cluster.run(CONTROL, ["squeue", "-h"]).stdout == ""
    for name in cluster.nodes:
        assert cluster.processes(name, _RANK.name) == []
        assert cluster.processes(name, "slurm_node") == []
        found = cluster.run(name, ["sh", "-c", "ls -A /dev/shm; ls -A /tmp | grep ^tunetool-slurm; true"])
        assert found.stdout == ""


def _at(path: Path, call: Callable[[], None]) -> Callable[[], None]:
    """A tick that calls once, when there is such a file."""
    pending = [call]

    def tick() -> None:
        if pending and path.exists():
            pending.pop()()

    return tick


def test_ranks_on_two_nodes_reduce_and_their_outputs_come_from_the_shared_directory(slurm: Cluster) -> None:
    work, directory = slurm.shared / "work", slurm.folder / "results"
    work.mkdir()
    said = _run(_job(directory, "reduce"), SlurmOptions(nodes=2, work_dir=work))
    assert "running on node[1-2]" in said[-1]
    results = [json.loads((directory / f"rank-{rank}/result.json").read_text()) for rank in range(2)]
    assert [result["host"] for result in results] == list(NODES)
    assert [result["sum"] for result in results] == [3000.0, 3000.0]
    assert {result["world"] for result in results} == {2}
    assert {result["said"] for result in results} == {"a secret"}
    # Otherwise Lightning would take srun for what started the ranks.
    assert all("SLURM_NTASKS" not in result["slurm"] for result in results)
    assert all(result["cpus"] == os.cpu_count() for result in results)
    assert list(work.iterdir()) == []
    assert "a secret" not in "".join(path.read_text() for path in directory.rglob("*.*") if path.name != "result.json")
    _nothing_is_left(slurm)


def test_a_rank_that_fails_is_named_with_its_host_and_all_are_ended(slurm: Cluster) -> None:
    directory = slurm.shared / "failing"
    with pytest.raises(RankFailed) as caught:
        _run(_job(directory, "fail"), SlurmOptions(nodes=2))
    assert (
        caught.value.message == "rank 1 on `node2` ended with exit status 1: RuntimeError: the cable of rank 1 fell out"
    )
    assert (caught.value.rank, caught.value.host) == (1, "node2")
    assert (directory / "rank-0/result.json").exists()
    assert "waiting" in (directory / "rank-0/stdout.log").read_text()
    assert not (directory / "spec.json").exists()
    _nothing_is_left(slurm)


def test_an_interrupt_cancels_the_job_and_leaves_nothing(slurm: Cluster) -> None:
    directory = slurm.shared / "interrupted"

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _run(_job(directory, "wait"), SlurmOptions(nodes=2), _at(directory / "rank-1/result.json", interrupt))
    _nothing_is_left(slurm)


def test_a_job_that_somebody_else_cancels_is_told_so(slurm: Cluster) -> None:
    directory = slurm.shared / "cancelled"

    def cancel() -> None:
        slurm.run(CONTROL, ["scancel", "--name=tunetool"])

    with pytest.raises(RankFailed, match=r"job \d+ was cancelled, and not by tunetool \(CANCELLED\)"):
        _run(_job(directory, "wait"), SlurmOptions(), _at(directory / "rank-0/result.json", cancel))
    _nothing_is_left(slurm)


def test_a_job_waits_with_its_reason_until_its_nodes_are_free(slurm: Cluster) -> None:
    blocking = slurm.start(CONTROL, ["srun", "--exclusive", "--nodes=2", "sleep", "60"])
    while slurm.run(CONTROL, ["squeue", "-h", "-t", "RUNNING"]).stdout == "":
        time.sleep(0.1)
    progress = Quiet()
    ended = threading.Event()

    def tick() -> None:
        if not ended.is_set() and any("Resources" in line for line in progress.lines):
            ended.set()
            slurm.run(CONTROL, ["scancel", "--name=sleep"])

    with pytest.raises(RankFailed, match="rank 0 on `node1`"):
        SlurmLauncher(SlurmOptions(), progress).run(_broken(slurm.shared / "waiting"), tick)
    blocking.communicate(timeout=20)
    assert any("waits: Resources (its nodes are in use)" in line for line in progress.lines)


def _broken(directory: Path) -> Job:
    return Job((str(_RANK),), 1, {}, directory, python=sys.executable)


def test_what_slurm_refuses_is_told_in_its_words_with_a_hint(slurm: Cluster) -> None:
    with pytest.raises(UsageProblem) as caught:
        _run(_job(slurm.shared / "refused", "wait"), SlurmOptions(lines=["--partition=nowhere"]))
    assert caught.value.message == "`sbatch` refuses the job: invalid partition specified: nowhere"
    assert "sinfo" in str(caught.value.hint)


def test_a_job_that_would_wait_for_ever_is_cancelled_with_the_reason(slurm: Cluster) -> None:
    with pytest.raises(RankFailed, match=r"job \d+ would never start: no nodes of its partition have what it asks for"):
        _run(_job(slurm.shared / "too-many", "wait"), SlurmOptions(nodes=9))
    _nothing_is_left(slurm)


def test_a_directory_that_the_nodes_do_not_share_is_named(slurm: Cluster) -> None:
    apart = Path("/dev/shm") / f"tunetool-test-{os.getpid()}"
    apart.mkdir()
    try:
        with pytest.raises(RankFailed) as caught:
            _run(_job(slurm.shared / "apart", "wait"), SlurmOptions(work_dir=apart))
    finally:
        apart.rmdir()
    assert str(apart) in caught.value.message
    assert "--slurm work-dir" in str(caught.value.hint)


def test_a_python_that_the_nodes_lack_is_named(slurm: Cluster) -> None:
    job = Job((str(_RANK), "wait"), 1, {}, slurm.shared / "no-python", python="/opt/nowhere/bin/python")
    with pytest.raises(RankFailed, match="/opt/nowhere/bin/python") as caught:
        _run(job, SlurmOptions())
    assert "installed on the nodes" in str(caught.value.hint)


@pytest.mark.slow  # half a minute: Slurm waits for a node before it gives it up
def test_a_lost_node_ends_the_run_with_its_name(slurm: Cluster) -> None:
    directory = slurm.shared / "lost"
    with pytest.raises(RankFailed) as caught:
        _run(
            _job(directory, "wait"),
            SlurmOptions(nodes=2),
            _at(directory / "rank-1/result.json", lambda: slurm.kill_node("node2")),
        )
    assert "node2" in caught.value.message
    assert caught.value.host == "node2"
    _nothing_is_left(slurm)
