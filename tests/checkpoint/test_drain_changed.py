"""A step is saved again while it drains: a mixture of two saves never counts as a checkpoint."""

from __future__ import annotations

import fcntl
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the checkpoints are torch's own")

from small_steps import data_of, overwrite, save, values

from tunetool.checkpoint import Drain, latest, markers, saving, verify_drained
from tunetool.checkpoint import bulk as on_bulk
from tunetool.checkpoint.transfer import copy_file
from tunetool.errors import CannotJudge, UsageProblem
from waiting import PATIENCE, until

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning"),
]


def held_at_its_first_byte(begin: Callable[[], Drain], scratch: Path, bulk: Path, harm: Callable[[], object]) -> Drain:
    """A drain that has opened its first file and then waits, as it does for a save, until ``harm`` is done."""
    with saving(scratch):
        work = begin()
        until(lambda: list(bulk.glob(".draining-*/.part-0-*")) or not work.running)
        harm()
    return work


@pytest.mark.parametrize("number", [0, 1])
def test_a_shard_that_is_overwritten_while_it_drains_is_named(
    tmp_path: Path, drains: Callable[..., Drain], number: int
) -> None:
    scratch, bulk = tmp_path / "scratch", tmp_path / "bulk"
    step, other = save(scratch / "step_7", 1.0), save(tmp_path / "other" / "step_7", 2.0)
    shard = data_of(step)[number]

    def harm() -> None:
        overwrite(shard, data_of(other)[number])

    with pytest.raises(CannotJudge) as failed:
        held_at_its_first_byte(lambda: drains(step, bulk), scratch, bulk, harm).wait(PATIENCE)
    assert f"`{shard}` changed" in failed.value.message
    assert list(bulk.glob("step_*")) == []
    assert [markers.marker_of(path) for path in bulk.iterdir()] == [None]
    with pytest.raises(CannotJudge):
        latest([bulk])
    # `.metadata` is still that of the first save, half of the data is from the second: no later drain accepts that.
    with pytest.raises(CannotJudge) as again:
        drains(step, bulk).wait(PATIENCE)
    assert f"`{shard}` changed" in again.value.message
    with pytest.raises(CannotJudge):
        latest([bulk])
    # After a complete save it is a checkpoint like any other.
    save(step, 3.0)
    assert drains(step, bulk).wait(PATIENCE) == bulk / "step_7"
    assert values(bulk / "step_7") == (3.0, 3.0)
    assert [path.name for path in bulk.iterdir()] == ["step_7"]


@pytest.mark.parametrize("name", ["a shard with its old time", "metadata"])
def test_a_file_that_a_rename_replaces_while_it_drains_is_seen(
    tmp_path: Path, drains: Callable[..., Drain], name: str
) -> None:
    scratch, bulk = tmp_path / "scratch", tmp_path / "bulk"
    step, other = save(scratch / "step_7", 1.0), save(tmp_path / "other" / "step_7", 2.0)
    file, new = (each / ".metadata" if name == "metadata" else data_of(each)[1] for each in (step, other))
    if name != "metadata":
        os.utime(new, ns=(file.stat().st_mtime_ns, file.stat().st_mtime_ns))
    with pytest.raises(CannotJudge) as failed:
        held_at_its_first_byte(lambda: drains(step, bulk), scratch, bulk, lambda: new.replace(file)).wait(PATIENCE)
    assert f"`{file}` changed" in failed.value.message
    assert list(bulk.glob("step_*")) == []


def test_a_whole_new_save_while_it_drains_is_seen(tmp_path: Path, drains: Callable[..., Drain]) -> None:
    scratch, bulk = tmp_path / "scratch", tmp_path / "bulk"
    step = save(scratch / "step_7", 1.0)
    with pytest.raises(CannotJudge) as failed:
        held_at_its_first_byte(lambda: drains(step, bulk), scratch, bulk, lambda: save(step, 2.0)).wait(PATIENCE)
    assert "changed" in failed.value.message
    assert list(bulk.glob("step_*")) == []
    assert drains(step, bulk).wait(PATIENCE) == bulk / "step_7"
    assert values(bulk / "step_7") == (2.0, 2.0)


def test_metadata_replaced_before_the_drain_gives_no_marker(tmp_path: Path, drains: Callable[..., Drain]) -> None:
    step, bulk = save(tmp_path / "scratch" / "step_7", 1.0), tmp_path / "bulk"
    handle = os.open(step / ".metadata", os.O_RDONLY)
    try:
        # The drain's process stops here before it reads anything of the step.
        fcntl.flock(handle, fcntl.LOCK_EX)
        work = drains(step, bulk)
        save(step, 2.0)
    finally:
        os.close(handle)
    with pytest.raises(CannotJudge) as failed:
        work.wait(PATIENCE)
    assert f"`{step / '.metadata'}` changed" in failed.value.message
    assert not (bulk / "step_7").exists()
    assert drains(step, bulk).wait(PATIENCE) == bulk / "step_7"
    assert values(bulk / "step_7") == (2.0, 2.0)


def test_a_killed_drain_is_not_completed_with_another_save(tmp_path: Path, drains: Callable[..., Drain]) -> None:
    scratch, bulk = tmp_path / "scratch", tmp_path / "bulk"
    step, other = save(scratch / "step_7", 1.0), save(tmp_path / "other" / "step_7", 2.0)
    with saving(scratch):
        work = drains(step, bulk)
        until(lambda: list(bulk.glob(".draining-*/.part-0-*")))
        work.stop()
    # A save dies after the first of its two files.
    overwrite(data_of(step)[1], data_of(other)[1])
    with pytest.raises(CannotJudge) as failed:
        drains(step, bulk).wait(PATIENCE)
    assert f"`{data_of(step)[1]}` changed" in failed.value.message
    assert list(bulk.glob("step_*")) == []


def test_a_file_that_changes_during_its_copy_is_refused(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"1" * 9 * 2**20)
    pieces = []

    def in_the_middle(count: int) -> None:
        pieces.append(count)
        if len(pieces) == 2:
            with source.open("r+b") as stream:
                stream.write(b"2")

    with pytest.raises(CannotJudge) as failed:
        copy_file(source, target, in_the_middle)
    assert f"`{source}` changed" in failed.value.message
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_the_same_metadata_is_not_the_same_save(tmp_path: Path, drains: Callable[..., Drain]) -> None:
    # Writers that put no identity of the save into `.metadata`, as torch before 2.3.
    step, bulk = save(tmp_path / "scratch" / "step_7", 1.0), tmp_path / "bulk"

    loaded = pickle.loads((step / ".metadata").read_bytes())
    loaded.storage_meta = None
    same = pickle.dumps(loaded)
    (step / ".metadata").write_bytes(same)
    drains(step, bulk).wait(PATIENCE)
    first = markers.marker_of(bulk / "step_7")
    save(step, 2.0)
    (step / ".metadata").write_bytes(same)
    drains(step, bulk).wait(PATIENCE)
    second = markers.marker_of(bulk / "step_7")
    assert first is not None
    assert second is not None
    assert first.digest == second.digest, "else this shows nothing"
    assert values(bulk / "step_7") == (2.0, 2.0)


def test_a_step_that_landed_mixed_is_refused(tmp_path: Path, drains: Callable[..., Drain]) -> None:
    scratch, bulk = tmp_path / "scratch", tmp_path / "bulk"
    drains(save(scratch / "step_7", 1.0), bulk).wait(PATIENCE)
    assert verify_drained(bulk / "step_7") > 0
    shutil.copy(save(tmp_path / "other" / "step_7", 2.0) / ".metadata", bulk / "step_7")
    with pytest.raises(CannotJudge) as failed:
        verify_drained(bulk / "step_7")
    assert "`.metadata` belongs to another save" in failed.value.message
    with pytest.raises(CannotJudge) as none:
        latest([bulk])
    assert "`.metadata` belongs to another save" in none.value.message
    # A new drain does not accept it either.
    drains(scratch / "step_7", bulk).wait(PATIENCE)
    assert verify_drained(bulk / "step_7") > 0


def test_a_step_that_was_partly_overwritten_is_not_read(tmp_path: Path, drains: Callable[..., Drain]) -> None:
    scratch, bulk = tmp_path / "scratch", tmp_path / "bulk"
    step, other = save(scratch / "step_7", 1.0), save(tmp_path / "other" / "step_7", 2.0)
    drains(step, bulk).wait(PATIENCE)
    newest = latest([scratch, bulk])
    assert newest is not None
    assert newest.path == step
    overwrite(data_of(step)[0], data_of(other)[0])
    newest = latest([scratch, bulk])
    assert newest is not None
    assert newest.path == bulk / "step_7"
    assert values(newest.path) == (1.0, 1.0)


def test_a_step_that_was_moved_drains_on(tmp_path: Path, drains: Callable[..., Drain]) -> None:
    scratch, bulk = tmp_path / "scratch", tmp_path / "bulk"
    step = save(scratch / "step_7", 1.0)
    with saving(scratch):
        work = drains(step, bulk)
        until(lambda: list(bulk.glob(".draining-*/.part-0-*")))
        work.stop()
    moved = tmp_path / "elsewhere" / "step_7"
    shutil.copytree(step, moved, copy_function=shutil.copyfile)
    assert drains(moved, bulk).wait(PATIENCE) == bulk / "step_7"
    assert values(bulk / "step_7") == (1.0, 1.0)


@pytest.mark.parametrize("kind", ["complete", "on its way", "beside it"])
def test_two_names_of_one_step_are_refused(tmp_path: Path, drains: Callable[..., Drain], kind: str) -> None:
    scratch, bulk = tmp_path / "scratch", tmp_path / "bulk"
    first = save(tmp_path / "earlier" / "step_7", 1.0)
    step = save(scratch / "step_0007", 2.0)
    if kind == "complete":
        drains(first, bulk).wait(PATIENCE)
    elif kind == "on its way":
        drains(first, bulk).wait(PATIENCE)
        marker = markers.marker_of(bulk / "step_7")
        assert marker is not None
        (bulk / "step_7").rename(on_bulk.partial_of(bulk, "step_7", marker.digest))
    else:
        save(scratch / "step-7", 1.0)
    with pytest.raises((CannotJudge, UsageProblem)) as refused:
        drains(step, bulk).wait(PATIENCE)
    assert "are the same step" in refused.value.message
    assert "step_0007" in refused.value.message
    assert not list(bulk.glob("*0007*"))
