"""Drains of checkpoints from the node to shared storage. A node is a directory, a rank is a process."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the checkpoints are torch's own")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner

from tunetool.checkpoint import DirectWriter, Drain, drain, latest, markers, saving, verify_drained
from tunetool.checkpoint import bulk as on_bulk
from tunetool.checkpoint.pace import SAVE_LOCK, savers
from tunetool.errors import CannotJudge, UsageProblem
from waiting import PATIENCE, stopped, until

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
MIB = 2**20
COUNT = 3 * MIB // 2
"""Number of elements of a tensor: 6 MiB, which a copy moves in several pieces."""


def state(rank: int, step: int) -> dict[str, torch.Tensor]:
    source = torch.Generator().manual_seed(1000 * step + rank)
    return {f"weight{rank}": torch.randn(COUNT, generator=source), f"bias{rank}": torch.randn(7, generator=source)}


def torch_s(path: Path, threads: int = 1) -> Any:
    return dcp.FileSystemWriter(path, single_file_per_rank=True, thread_count=threads)


def ours(path: Path) -> Any:
    return DirectWriter(path, threads=1)


def save(directory: Path, step: int, rank: int = 0, threads: int = 1) -> Path:
    path = directory / f"step_{step}"
    dcp.save(state(rank, step), storage_writer=torch_s(path, threads))
    return path


def assert_loads(path: Path, step: int, *ranks: int) -> None:
    expected = {name: each for rank in ranks for name, each in state(rank, step).items()}
    loaded = {name: torch.zeros_like(each) for name, each in expected.items()}
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    for name, each in expected.items():
        assert torch.equal(loaded[name], each), name


def as_job(tmp_path: Path, work: Callable[[int], Any], world: int = 2) -> list[Any]:
    """The results of ``work`` on each rank of a job. Ranks are forked, since an import of torch takes longer than a test."""
    store = tmp_path / f"store-{time.monotonic_ns()}"
    children = []
    for rank in range(world):
        out = tmp_path / f"{store.name}-{rank}"
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                # Here the parent's pool of threads, if there is one, does not exist.
                torch.set_num_threads(1)
                dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
                returned = work(rank)
                out.write_bytes(pickle.dumps(returned))
                dist.destroy_process_group()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        children.append((pid, out))
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid, _ in children]
    assert statuses == [0] * world
    return [pickle.loads(out.read_bytes()) for _, out in children]


@pytest.fixture
def stopping(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Let the drains that begin from now on end, or stop, at a change below ``under``; see ``stops.install``."""

    def stop(under: Path, at: str, number: int = signal.SIGKILL) -> None:
        order = {"under": str(under), "log": str(tmp_path / "stops"), "at": at, "number": number}
        monkeypatch.setenv("TUNETOOL_TESTS_STOP", json.dumps(order))
        monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "stopped"))

    return stop


def pid_of(work: Drain) -> int:
    return work._process.pid


def test_a_drain_that_outlives_its_job_says_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    step = save(tmp_path / "node", 1)
    program = textwrap.dedent("""
        import os, sys
        from tunetool.checkpoint import drain

        print(drain(sys.argv[1], sys.argv[2])._process.pid, flush=True)
        os._exit(0)
    """)
    argv = [sys.executable, "-c", program, str(step), str(tmp_path / "bulk")]
    job = subprocess.run(argv, stdout=subprocess.PIPE, check=True, text=True)
    until(lambda: not Path(f"/proc/{int(job.stdout)}").exists())
    assert (tmp_path / "bulk/step_1/.metadata").exists()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("writer", [torch_s, ours])
def test_a_lost_node_s_shards_come_back_from_shared_storage(tmp_path: Path, writer: Callable[[Path], Any]) -> None:
    nodes, bulk = [tmp_path / "a", tmp_path / "b"], tmp_path / "bulk"

    def first_job(rank: int) -> str:
        step = nodes[rank] / "step_100"
        dcp.save(state(rank, 100), storage_writer=writer(step))
        return str(drain(step, bulk, rank=rank, world=2, patience=PATIENCE).wait(PATIENCE))

    def new_job(rank: int) -> Any:
        newest = latest([nodes[rank], bulk])
        assert newest is not None
        loaded = {name: torch.zeros_like(each) for name, each in state(rank, 100).items()}
        dcp.load(loaded, storage_reader=dcp.FileSystemReader(newest.path))
        return str(newest.path), all(torch.equal(loaded[name], each) for name, each in state(rank, 100).items())

    paths = as_job(tmp_path, first_job)
    assert paths == [str(bulk / "step_100")] * 2
    assert not (nodes[1] / "step_100" / ".metadata").exists(), "only the coordinator's node has it"
    shutil.rmtree(nodes[1])
    nodes[1].mkdir()
    assert as_job(tmp_path, new_job) == [(str(bulk / "step_100"), True)] * 2
    assert_loads(bulk / "step_100", 100, 0, 1)
    assert verify_drained(bulk / "step_100") > 12 * MIB
    # A step that was not drained was lost with the node: the job gets a message and goes back.
    as_job(tmp_path, lambda rank: save(nodes[rank], 200, rank))
    shutil.rmtree(nodes[1])
    nodes[1].mkdir()

    def later_job(rank: int) -> Any:
        newest = latest([nodes[rank], bulk])
        return newest and (newest.step, newest.skipped)

    (step, skipped), other = as_job(tmp_path, later_job)
    assert (step, skipped) == other
    assert step == 100
    host = os.uname().nodename
    assert len(skipped) == 1
    assert f"step 200: rank 0 on `{host}`: shard `__1_0.distcp` of rank 1 is missing in" in skipped[0]
    assert f"rank 1 on `{host}`: it is not there" in skipped[0]


def test_a_rank_that_does_not_come_is_named_and_may_come_later(tmp_path: Path, drains: Callable[..., Drain]) -> None:
    nodes, bulk = [tmp_path / "a", tmp_path / "b"], tmp_path / "bulk"
    as_job(tmp_path, lambda rank: save(nodes[rank], 5, rank))
    steps = [node / "step_5" for node in nodes]
    with pytest.raises(CannotJudge) as failed:
        drains(steps[0], bulk, rank=0, world=2, patience=0.5).wait(PATIENCE)
    assert "`__1_0.distcp` of rank 1, which has not reported" in failed.value.message
    with pytest.raises(CannotJudge) as none:
        latest([bulk])
    assert "`__1_0.distcp` of rank 1, from a node that has not reported, is missing" in none.value.message
    assert list(bulk.glob("step_*")) == []
    both = [drains(step, bulk, rank=rank, world=2) for rank, step in enumerate(steps)]
    assert {each.wait(PATIENCE) for each in both} == {bulk / "step_5"}
    assert_loads(bulk / "step_5", 5, 0, 1)
    # A rank that comes after the drain sees that its files exist.
    assert drains(steps[1], bulk, rank=1, world=2).wait(PATIENCE) == bulk / "step_5"


def test_a_rank_whose_copy_is_swept_away_copies_again(tmp_path: Path, drains: Callable[..., Drain]) -> None:
    nodes, bulk = [tmp_path / "a", tmp_path / "b"], tmp_path / "bulk"
    as_job(tmp_path, lambda rank: save(nodes[rank], 5, rank))
    # A drain that waits for a save has created its file already.
    with saving(nodes[1]):
        both = [drains(nodes[rank] / "step_5", bulk, rank=rank, world=2) for rank in (0, 1)]
        (part,) = until(lambda: list(bulk.glob(".draining-*/.part-1-*")), "the copy to begin")
        part.unlink()
    assert {each.wait(PATIENCE) for each in both} == {bulk / "step_5"}
    assert_loads(bulk / "step_5", 5, 0, 1)


def test_a_drain_that_was_killed_is_taken_up(
    tmp_path: Path, drains: Callable[..., Drain], stopping: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, bulk = save(tmp_path / "scratch", 7, threads=2), tmp_path / "bulk"
    names = sorted(path.name for path in step.glob("*.distcp"))
    assert len(names) == 2
    # The drain is killed when it begins with the second of its two files.
    stopping(bulk, f"open /.draining-step_7-*/.part-0-{names[1]}")
    with pytest.raises(CannotJudge) as died:
        drains(step, bulk).wait(PATIENCE)
    monkeypatch.delenv("TUNETOOL_TESTS_STOP")
    (partial,) = bulk.glob(".draining-step_7-*")
    assert on_bulk.delivered(partial, on_bulk.deliveries(partial))
    assert "ended with status -9" in died.value.message
    there = {path.name: path.stat().st_ino for path in partial.glob("*.distcp")}
    assert len(there) == 1
    assert not (bulk / "step_7").exists()
    with pytest.raises(CannotJudge) as none:
        latest([bulk])
    assert f"of rank 0, from node `{os.uname().nodename}`, is missing" in none.value.message
    assert drains(step, bulk).wait(PATIENCE) == bulk / "step_7"
    assert_loads(bulk / "step_7", 7, 0)
    for name, inode in there.items():
        assert (bulk / "step_7" / name).stat().st_ino == inode, "what was there was not copied again"
    assert sorted(path.name for path in bulk.iterdir()) == ["step_7"]
    assert sorted(path.name for path in (bulk / "step_7").iterdir()) == sorted([".metadata", markers.MARKER, *names])


def test_a_flipped_byte_is_named(
    tmp_path: Path, drains: Callable[..., Drain], stopping: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, bulk = save(tmp_path / "scratch", 7), tmp_path / "bulk"
    (name,) = (path.name for path in step.glob("*.distcp"))
    size = (step / name).stat().st_size

    def flip(path: Path) -> None:
        with path.open("r+b") as stream:
            stream.seek(5 * MIB)
            byte = stream.read(1)[0]
            stream.seek(5 * MIB)
            stream.write(bytes([byte ^ 1]))

    # While it is on its way: after it was written, when it is to be synced and then read back.
    stopping(bulk, "fsync /.draining-step_7-*/.part-0-", signal.SIGSTOP)
    work = drains(step, bulk)
    monkeypatch.delenv("TUNETOOL_TESTS_STOP")
    until(lambda: stopped(pid_of(work)), "the copy to be written")
    (part,) = bulk.glob(".draining-*/.part-0-*")
    assert part.stat().st_size == size
    flip(part)
    os.kill(pid_of(work), signal.SIGCONT)
    with pytest.raises(CannotJudge) as refused:
        work.wait(PATIENCE)
    assert f"{name}` does not hold what was written to it" in refused.value.message
    assert not (bulk / "step_7").exists()
    # And later.
    drains(step, bulk).wait(PATIENCE)
    verify_drained(bulk / "step_7")
    flip(bulk / "step_7" / name)
    with pytest.raises(CannotJudge) as refused:
        verify_drained(bulk / "step_7")
    assert f"`{name}` has other bytes" in refused.value.message


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 20 MiB."""
    mount_point = tmp_path / "small"
    mount_point.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=20M", "none", mount_point], capture_output=True, check=False
    ).returncode:
        pytest.skip("may not mount a file system")
    yield mount_point
    subprocess.run(["umount", mount_point], check=True)


def test_full_shared_storage_leaves_everything_as_it_was(
    tmp_path: Path, small_disk: Path, drains: Callable[..., Drain]
) -> None:
    scratch = tmp_path / "scratch"
    drains(save(scratch, 1), small_disk).wait(PATIENCE)
    step = save(scratch, 2)
    filler = small_disk / "filler"
    # There is room when it begins; another program uses it up while the drain waits for a save.
    with saving(scratch):
        work = drains(step, small_disk)
        until(lambda: list(small_disk.glob(".draining-*/.part-0-*")), "the copy to begin")
        with filler.open("wb", buffering=0) as stream, contextlib.suppress(OSError):
            while stream.write(bytes(MIB)) == MIB:
                pass
    with pytest.raises(CannotJudge) as full:
        work.wait(PATIENCE)
    assert "cannot be written: it is full" in full.value.message
    assert "the checkpoint on the node is unchanged" in str(full.value.hint)
    with pytest.raises(CannotJudge) as before:
        drains(step, small_disk).wait(PATIENCE)
    assert "of memory, and it is a tmpfs left" in before.value.message or "of space left" in before.value.message
    assert_loads(small_disk / "step_1", 1, 0)
    assert_loads(step, 2, 0)
    filler.unlink()
    drains(step, small_disk).wait(PATIENCE)
    assert_loads(small_disk / "step_2", 2, 0)


def test_each_tier_keeps_its_newest_steps(tmp_path: Path, drains: Callable[..., Drain]) -> None:
    scratch, bulk = tmp_path / "scratch", tmp_path / "bulk"
    for number in (1, 2, 3, 4):
        drains(save(scratch, number), bulk, max_to_keep=2, local_max_to_keep=1).wait(PATIENCE)
        if number == 1:
            save(scratch, 0)
    assert sorted(path.name for path in bulk.iterdir()) == ["step_3", "step_4"]
    # Step 0 was never drained: it may still be needed.
    assert sorted(path.name for path in scratch.glob("step_*")) == ["step_0", "step_4"]
    drains(scratch / "step_4", bulk, local_max_to_keep=1, delete_undrained=True).wait(PATIENCE)
    assert sorted(path.name for path in scratch.glob("step_*")) == ["step_4"]
    # Newer steps that were never drained do not displace the drained one.
    for number in (5, 6):
        save(scratch, number)
    drains(scratch / "step_4", bulk, local_max_to_keep=1, delete_undrained=True).wait(PATIENCE)
    assert sorted(path.name for path in scratch.glob("step_*")) == ["step_4", "step_5", "step_6"]


def test_a_step_that_was_saved_again_replaces_the_drained_one(tmp_path: Path, drains: Callable[..., Drain]) -> None:
    bulk = tmp_path / "bulk"
    drains(save(tmp_path / "first", 3), bulk).wait(PATIENCE)
    old = markers.marker_of(bulk / "step_3")
    again = tmp_path / "again" / "step_3"
    again.mkdir(parents=True)
    dcp.save(state(1, 3), storage_writer=dcp.FileSystemWriter(again))
    drains(again, bulk).wait(PATIENCE)
    assert_loads(bulk / "step_3", 3, 1)
    new = markers.marker_of(bulk / "step_3")
    assert old is not None
    assert new is not None
    assert old.digest != new.digest
    assert sorted(path.name for path in bulk.iterdir()) == ["step_3"]


def test_a_step_that_lacks_only_its_name_counts_and_gets_it(tmp_path: Path, drains: Callable[..., Drain]) -> None:
    step, bulk = save(tmp_path / "scratch", 3), tmp_path / "bulk"
    drains(step, bulk).wait(PATIENCE)
    # The state after the coordinator died between the marker and the rename.
    marker = markers.marker_of(bulk / "step_3")
    assert marker is not None
    sealed = (bulk / "step_3").rename(on_bulk.partial_of(bulk, "step_3", marker.digest))
    newest = latest([bulk])
    assert newest is not None
    assert (newest.step, newest.path) == (3, sealed)
    assert_loads(newest.path, 3, 0)
    assert drains(step, bulk).wait(PATIENCE) == bulk / "step_3"
    assert [path.name for path in bulk.iterdir()] == ["step_3"]


def test_a_step_that_no_drain_has_put_there_is_left_alone(tmp_path: Path, drains: Callable[..., Drain]) -> None:
    step, bulk = save(tmp_path / "scratch", 3), tmp_path / "bulk"
    save(bulk, 3, rank=1)
    with pytest.raises(CannotJudge) as refused:
        drains(step, bulk).wait(PATIENCE)
    assert "was not drained" in refused.value.message
    assert_loads(bulk / "step_3", 3, 1)


def test_a_link_out_of_the_step_is_not_drained_or_resumed_from(tmp_path: Path) -> None:
    step, bulk = save(tmp_path / "scratch", 3), tmp_path / "bulk"
    (data,) = step.glob("*.distcp")
    data.rename(tmp_path / "elsewhere")
    data.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageProblem, match=f"`{data}` leads out of `{step}`"):
        drain(step, bulk, patience=PATIENCE)
    with pytest.raises(CannotJudge, match=f"shard `{data.name}` of rank 0 is a link that leads out of the step"):
        latest([tmp_path / "scratch"])


def test_it_pauses_while_a_save_runs(tmp_path: Path, drains: Callable[..., Drain]) -> None:
    scratch, bulk = tmp_path / "scratch", tmp_path / "bulk"
    step = save(scratch, 1)
    with saving(scratch):
        work = drains(step, bulk)
        until(lambda: list(bulk.glob(".draining-*/.part-0-*")), "the copy to begin")
        time.sleep(0.5)
        assert [path.stat().st_size for path in bulk.glob(".draining-*/.part-0-*")] == [0]
        assert work.running
    assert work.wait(PATIENCE) == bulk / "step_1"


def test_drains_give_way_to_our_own_writer_on_every_rank(tmp_path: Path) -> None:
    seen = []

    class Looking(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            # The coordinator's lock has no effect here, since other nodes do not see it.
            for lock in tmp_path.glob(f"*/{SAVE_LOCK}"):
                os.utime(lock, (0, 0))
            seen.append(bool(savers(tmp_path)))
            return super().resolve_data(write_item)

    with saving(tmp_path):
        pass
    dcp.save(state(0, 1), storage_writer=ours(tmp_path / "step_1"), planner=Looking())
    assert seen
    assert all(seen)
    assert not savers(tmp_path)


def test_a_missing_shard_is_taken_from_the_next_tier_or_named(tmp_path: Path, drains: Callable[..., Drain]) -> None:
    scratch, bulk = tmp_path / "scratch", tmp_path / "bulk"
    step = save(scratch, 1, threads=2)
    assert latest([tmp_path / "nothing"]) is None
    drains(step, bulk).wait(PATIENCE)
    newest = latest([scratch, bulk])
    assert newest is not None
    assert newest.path == step, "the nearest tier"
    shard = sorted(step.glob("*.distcp"))[1]
    with shard.open("r+b") as stream:
        stream.truncate(shard.stat().st_size - 1)
    newest = latest([scratch, bulk])
    assert newest is not None
    assert (newest.step, newest.path) == (1, bulk / "step_1")
    (bulk / "step_1" / shard.name).unlink()
    with pytest.raises(CannotJudge) as refused:
        latest([scratch, bulk])
    assert f"shard `{shard.name}` of rank 0 has " in refused.value.message
    assert f"shard `{shard.name}` of rank 0 from node `{os.uname().nodename}` is missing" in refused.value.message


def test_a_drained_step_that_lost_a_shard_is_drained_anew(tmp_path: Path, drains: Callable[..., Drain]) -> None:
    step, bulk = save(tmp_path / "scratch", 1), tmp_path / "bulk"
    drains(step, bulk).wait(PATIENCE)
    (shard,) = (bulk / "step_1").glob("*.distcp")
    shard.unlink()
    drains(step, bulk).wait(PATIENCE)
    assert_loads(bulk / "step_1", 1, 0)


def test_a_step_without_its_metadata_is_refused(tmp_path: Path) -> None:
    step = save(tmp_path, 1)
    with pytest.raises(UsageProblem):
        drain(step.rename(tmp_path / "final"), tmp_path / "bulk")
    (tmp_path / "final").rename(step)
    with pytest.raises(UsageProblem):
        drain(step, tmp_path)
    with pytest.raises(UsageProblem):
        drain(step, tmp_path / "bulk", max_to_keep=0)
    (step / ".metadata").unlink()
    with pytest.raises(UsageProblem) as refused:
        drain(step, tmp_path / "bulk")
    assert "has no `.metadata`" in refused.value.message
