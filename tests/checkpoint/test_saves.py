"""Failed saves leave nothing behind, and cached plans of earlier saves do no harm."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from tunetool.checkpoint import DirectSavePlanner, DirectWriter, drain, metadata, saver_lock, saving
from tunetool.checkpoint.commit import UNFINISHED, Saving
from tunetool.checkpoint.job import Job, Settings, _size_of_buffers
from tunetool.checkpoint.pace import FLAG, savers
from tunetool.checkpoint.rank_layout import Items
from tunetool.checkpoint.stager import memory_of
from tunetool.errors import CannotJudge
from waiting import PATIENCE, until

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
FILLER = "filler"
"""See ``failing_ranks.py``."""
MIB = 1 << 20
Ask = Callable[..., Any]


@pytest.fixture(autouse=True)
def no_cached_plans() -> Iterator[None]:
    """torch keeps the plans in the class as long as the process lives."""
    caches = [value for name, value in vars(SavePlanner).items() if name.startswith("_cached_")]
    assert caches
    for cache in caches:
        cache.clear()
    yield
    for cache in caches:
        cache.clear()


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def data(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("*.distcp"))


def only_the_checkpoint(path: Path) -> bool:
    return names(path) == {".metadata", *metadata.files_of(metadata.read(path))}


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((1000, 1000), value), "n": {"step": int(value), "turned": torch.full((30, 20), value).t()}}


def holds(path: Path, value: float) -> bool:
    loaded = state(-1.0)
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(path))
    expected = state(value)
    return bool(
        torch.equal(loaded["w"], expected["w"])
        and torch.equal(loaded["n"]["turned"], expected["n"]["turned"])
        and loaded["n"]["step"] == expected["n"]["step"]
    )


def torch_s() -> Any:
    return DefaultSavePlanner(enable_plan_caching=True)


def ours() -> Any:
    return DirectSavePlanner(enable_plan_caching=True, split_above=MIB)


def plainly(planner: Any, writer: DirectWriter, value: float) -> None:
    dcp.save(state(value), storage_writer=writer, planner=planner)


def behind(planner: Any, writer: DirectWriter, value: float) -> None:
    dcp.async_save(
        state(value), storage_writer=writer, planner=planner, async_stager=writer.stager()
    ).result()  # fmt: skip


@pytest.mark.parametrize("planner", [torch_s, ours])
@pytest.mark.parametrize("save", [plainly, behind])
@pytest.mark.parametrize("directories", ["one directory", "a directory each"])
@pytest.mark.parametrize("kept", [False, True], ids=["new writers", "one writer"])
def test_a_cached_plan_saves_every_step_s_own_bytes(
    tmp_path: Path, planner: Callable[[], Any], save: Callable[..., None], directories: str, kept: bool
) -> None:
    writer = DirectWriter(tmp_path / "step_0")
    for value in range(3):
        path = tmp_path / ("step_0" if directories == "one directory" else f"step_{value}")
        if kept:
            writer.reset(path)
        else:
            writer = DirectWriter(path)
        save(planner(), writer, value)
        assert holds(path, value)
        assert only_the_checkpoint(path)
    assert SavePlanner._cached_final_save_plan, "plans were cached"
    if directories != "one directory":
        assert all(holds(tmp_path / f"step_{value}", value) for value in range(3))


@pytest.mark.parametrize("planner", ["torch", "ours"])
def test_ranks_that_cache_plans(forks: Ask, tmp_path: Path, planner: str) -> None:
    """Save in place and into new directories; from the third save on, one rank's part has another shape."""
    order = {"path": str(tmp_path), "meet": str(tmp_path / "meet"), "planner": planner}
    answers = forks(do="save_cached", world=3, **{"with": order})
    assert [answer["status"] for answer in answers] == [0, 0, 0], answers
    for step in range(5):
        rows = 7 if step < 2 else 9
        loaded = {f"own{rank}": torch.zeros(rows if rank == 1 else 7, 1000) for rank in range(3)}
        loaded["same"] = torch.zeros(1000, 130)
        path = tmp_path / f"step_{step}"
        dcp.load(loaded, storage_reader=dcp.FileSystemReader(path))
        assert torch.equal(loaded.pop("same"), torch.full((1000, 130), 100.0 * step))
        for name, tensor in loaded.items():
            assert torch.equal(tensor, torch.full_like(tensor, 100.0 * step + int(name[-1]))), (step, name)
    assert only_the_checkpoint(tmp_path / "same")


def test_torch_alone_reads_the_pickles_of_a_save_on_every_rank(forks: Ask, only_torch: Ask, tmp_path: Path) -> None:
    """Some keep the metadata beside their training state, and look into it where tunetool is not installed."""
    answers = forks(
        do="keep_what_saves_return", world=2, **{"with": {"path": str(tmp_path), "meet": str(tmp_path / "meet")}}
    )
    assert [answer["status"] for answer in answers] == [0, 0], answers
    expected = only_torch(do="unpickle", path=str(tmp_path / "step" / ".metadata"))
    assert sorted(expected["tensors"]) == ["own0", "own1", "same", "step"]
    assert len(expected["stored"]) >= 4
    for kept in sorted(tmp_path.glob("*.pickle")):
        found = only_torch(do="unpickle", path=str(kept))
        assert found.get("tensors", found) == expected["tensors"], kept.name
        assert found["stored"] == expected["stored"], kept.name


@pytest.mark.parametrize("planner", [torch_s, ours])
def test_a_planner_that_caches_goes_on_after_a_refused_save(tmp_path: Path, planner: Callable[[], Any]) -> None:
    held = Saving.open(tmp_path)
    with pytest.raises(CheckpointException, match="is being saved to by process"):
        plainly(planner(), DirectWriter(tmp_path), 1)
    held.abandon()
    for value in (2, 3):
        plainly(planner(), DirectWriter(tmp_path), value)
        assert holds(tmp_path, value)


class Keeper(DefaultSavePlanner):
    """A writer that keeps using its first plan, as a copy or as the same object."""

    first: SavePlan | None = None
    copies = False

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        type(self).first = plan = type(self).first or new_plan
        return super().finish_plan(copy.deepcopy(plan) if self.copies else plan)


def test_a_plan_of_another_save_brings_items_and_no_files(tmp_path: Path) -> None:
    class Mine(Keeper):
        pass

    for value in range(2):
        plainly(Mine(), DirectWriter(tmp_path), value)
        assert holds(tmp_path, value)


def test_a_copied_ticket_of_another_save_is_refused_by_name(tmp_path: Path) -> None:
    class Mine(Keeper):
        copies = True

    plainly(Mine(), DirectWriter(tmp_path), 0)
    before = names(tmp_path)
    with pytest.raises(
        CheckpointException, match=r"belongs to the save `[0-9a-f]{16}`, which has already written its files"
    ):
        plainly(Mine(), DirectWriter(tmp_path), 1)
    assert holds(tmp_path, 0)
    DirectWriter(tmp_path)
    assert names(tmp_path) == before


def test_a_file_that_was_there_before_stays_where_a_save_fails(tmp_path: Path) -> None:
    """Create a file under the name that the save is about to use."""
    path = tmp_path / "__0_0.distcp"
    path.write_bytes(b"somebody else's")
    items = Items([None], [io.BytesIO(b"ours")])  # type: ignore[list-item]  # it is not looked at before the end
    job = Job(tmp_path, items, Settings(1, 1, MIB, False), lambda _: path.name, copy_first=False)
    with pytest.raises(CannotJudge, match="File exists"):
        job.run([], lambda: None)
    assert path.read_bytes() == b"somebody else's"


def save_of_two(forks: Ask, paths: list[Path], meet: Path, seed: int, **fault: Any) -> list[dict[str, Any]]:
    """The answers of two ranks after both have ended; they must have saved where there is no ``fault``."""
    order = {"paths": [str(path) for path in paths], "meet": f"{meet}-{seed}", "seed": seed, **fault}
    answers: list[dict[str, Any]] = forks(do="save_own", world=2, exit=True, **{"with": order})
    assert fault or [answer["status"] for answer in answers] == [0, 0], answers
    return answers


def whole(directory: Path, seed: int) -> bool:
    loaded = {f"w{rank}": torch.zeros(6 * MIB) for rank in range(2)}
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(directory))
    return all(torch.equal(loaded[f"w{rank}"], torch.full((6 * MIB,), float(seed + rank))) for rank in range(2))


@contextlib.contextmanager
def small_tmpfs(mount_point: Path, megabytes: int) -> Iterator[Path]:
    mount_point.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(mount_point)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if made.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {made.stderr}")
    try:
        yield mount_point
    finally:
        subprocess.run(["umount", "--lazy", str(mount_point)], check=True)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system: needs root")


FULL = 105
"""MB of a file system that has room for a checkpoint of 48 MiB and one save of as much, but not for the rest of a failed
save beside them."""
EVERY_EXIT: list[dict[str, Any]] = [
    {"what": "EFBIG", "who": 1},
    {"what": "ENOSPC", "who": 1},
    {"what": "EFBIG", "who": 0},
    {"what": "it is killed", "who": 0},
    {"what": "it is killed", "who": 1},
]
"""Failures of a save, after which the process of one rank or of both ends and can run code."""
CAUSES = {"EFBIG": "File too large", "ENOSPC": "No space left"}


@needs_root
def test_a_failed_save_of_two_ranks_leaves_the_old_and_room(forks: Ask, tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "scratch", FULL) as scratch:
        step, meet = scratch / "step_1", tmp_path / "meet"
        save_of_two(forks, [step, step], meet, 0)
        for number, fault in enumerate(EVERY_EXIT):
            committed, seed = data(step), 10 * number
            answers = save_of_two(forks, [step, step], meet, seed + 1, **fault)
            assert 0 not in [answer["status"] for answer in answers], fault
            if fault["what"] in CAUSES:
                assert CAUSES[fault["what"]] in answers[fault["who"]]["error"]
            (scratch / FILLER).unlink(missing_ok=True)
            assert data(step) == committed, fault
            assert not (step / saver_lock.NAME).exists(), fault
            save_of_two(forks, [step, step], meet, seed + 10)
            assert only_the_checkpoint(step), fault
            assert whole(step, seed + 10), fault


@needs_root
def test_what_killed_ranks_left_goes_before_space_is_asked_for(forks: Ask, tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "scratch", FULL) as scratch:
        step, meet = scratch / "step_1", tmp_path / "meet"
        save_of_two(forks, [step, step], meet, 0)
        committed = data(step)
        answers = save_of_two(forks, [step, step], meet, 1, what="all are killed", who=1)
        assert [answer["status"] for answer in answers] == [-signal.SIGKILL] * 2
        left = [step / name for name in data(step) if name not in committed]
        assert sum(path.stat().st_blocks * 512 for path in left) >= 24 * MIB
        assert whole(step, 0)
        save_of_two(forks, [step, step], meet, 5)
        assert only_the_checkpoint(step)
        assert whole(step, 5)


@needs_root
def test_nodes_learn_from_the_next_save_what_failed(forks: Ask, tmp_path: Path) -> None:
    """Node B has no lock and no metadata: its rank cannot know whether its files count."""
    with small_tmpfs(tmp_path / "a", 40) as a, small_tmpfs(tmp_path / "b", 40) as b:
        steps = [a / "step_1", b / "step_1"]
        save_of_two(forks, steps, tmp_path / "meet", 1, what="EFBIG", who=0)
        assert data(steps[0]) == []
        assert len(data(steps[1])) > 0
        save_of_two(forks, steps, tmp_path / "meet", 5)
        assert len(data(steps[1])) == len(
            {name for name in metadata.files_of(metadata.read(steps[0])) if "__1_" in name}
        )
        together = tmp_path / "together"
        together.mkdir()
        for path in (*steps[0].iterdir(), *steps[1].iterdir()):
            (together / path.name).symlink_to(path)
        assert whole(together, 5)


def test_the_lock_ends_with_a_save_that_another_rank_failed(forks: Ask, tmp_path: Path) -> None:
    """The coordinator stays alive and keeps the exception, the writer and the planner."""
    step = tmp_path / "step_1"
    answers = save_of_two(forks, [step, step], tmp_path / "meet", 3, what="EFBIG", who=1, lives_on=True)
    assert [answer.get("value") for answer in answers] == ["1", "1"], answers
    assert only_the_checkpoint(step)
    assert whole(step, 3)
    assert UNFINISHED not in names(step)


def test_a_save_that_fails_first_ends_though_its_error_is_kept(tmp_path: Path) -> None:
    """And nobody looks at the stack of a thread that runs: with Python 3.11 that damages memory."""
    script = """
import sys, time, warnings
from pathlib import Path
import torch, torch.distributed.checkpoint as dcp
from tunetool.checkpoint import DirectWriter, saver_lock
warnings.simplefilter("ignore")
looks = []
sys.addaudithook(lambda event, _: looks.append(event) if event == "sys._current_frames" else None)
lock = Path(sys.argv[1], saver_lock.NAME)
class Failing(dcp.DefaultSavePlanner):
    def finish_plan(self, plan):
        assert lock.exists()
        raise OSError("a planner's fault")
try:
    dcp.save({"w": torch.ones(9)}, storage_writer=DirectWriter(sys.argv[1]), planner=Failing())
except dcp.CheckpointException as error:
    kept = error
while lock.exists():
    time.sleep(0.02)
print(len(looks))
"""
    run = [sys.executable, "-c", script, str(tmp_path)]
    assert subprocess.run(run, check=True, capture_output=True, text=True, timeout=PATIENCE).stdout == "0\n"


def test_a_save_that_is_not_called_by_torch_ends_with_its_thread(tmp_path: Path) -> None:
    begun, end = threading.Event(), threading.Event()

    def call() -> None:
        writer = DirectWriter(tmp_path)
        writer.set_up_storage_writer(is_coordinator=True)
        writer.prepare_local_plan(SavePlan([]))
        begun.set()
        end.wait(PATIENCE)

    thread = threading.Thread(target=call)
    thread.start()
    assert begun.wait(PATIENCE)
    # A save that is whole, elsewhere and in the meantime, ends no other.
    plainly(torch_s(), DirectWriter(tmp_path / "other"), 1)
    time.sleep(1)
    assert (tmp_path / saver_lock.NAME).exists()
    end.set()
    thread.join()
    until(lambda: not (tmp_path / saver_lock.NAME).exists())


def test_a_child_of_a_fork_that_exits_ends_no_save_of_its_parent(tmp_path: Path) -> None:
    script = """
import os, sys, warnings, torch, torch.distributed.checkpoint as dcp
from tunetool.checkpoint import DirectWriter
warnings.simplefilter("ignore")
class Forking(dcp.DefaultSavePlanner):
    def resolve_data(self, item):
        if os.fork() == 0:
            sys.exit(0)
        os.wait()
        return super().resolve_data(item)
dcp.save({"w": torch.ones(9)}, storage_writer=DirectWriter(sys.argv[1]), planner=Forking())
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, capture_output=True, timeout=PATIENCE)
    assert only_the_checkpoint(tmp_path)


def test_a_process_that_is_ended_in_a_save_leaves_nothing(tmp_path: Path) -> None:
    """SIGTERM with a handler, as scripts often treat a scheduler's warning."""
    script = """
import signal, sys, time, warnings, torch, torch.distributed.checkpoint as dcp
from tunetool.checkpoint import DirectWriter
warnings.simplefilter("ignore")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
class Slow(dcp.DefaultSavePlanner):
    def finish_plan(self, plan):
        print("saving", flush=True)
        time.sleep(6000)
dcp.save({"w": torch.ones(9)}, storage_writer=DirectWriter(sys.argv[1]), planner=Slow())
"""
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "saving\n"
        assert names(tmp_path) == {saver_lock.NAME}
        process.send_signal(signal.SIGTERM)
        # torch wraps the exit into its own exception.
        assert process.wait(timeout=PATIENCE) != 0
    assert names(tmp_path) == set()


@pytest.mark.parametrize("how", ["our writer", "another writer"])
def test_who_waits_for_a_drain_hears_for_whom_it_waits(tmp_path: Path, how: str) -> None:
    scratch = tmp_path / "scratch"
    dcp.save(state(1), storage_writer=dcp.FileSystemWriter(scratch / "step_1"))
    file = scratch / FLAG if how == "another writer" else scratch / "step_2" / saver_lock.NAME
    with contextlib.ExitStack() as held:
        if how == "another writer":
            held.enter_context(saving(scratch))
        else:
            saved = Saving.open(scratch / "step_2")
            held.callback(saved.abandon)
            (scratch / "step_2" / saved.data_name(0, 0)).touch()
        work = drain(scratch / "step_1", tmp_path / "bulk")
        held.callback(work.stop)
        with pytest.raises(TimeoutError) as caught:
            work.wait(2)
        message = str(caught.value)
        assert f"it pauses for a save, `{file}`: process {os.getpid()} on `{os.uname().nodename}`" in message
        assert ("last sign of life " in message) == (how == "our writer")
    assert not savers(scratch)


def test_a_dead_saver_s_lock_holds_nobody_up_whatever_its_time(tmp_path: Path) -> None:
    (tmp_path / "step_1").mkdir()
    script = "import os, sys; from pathlib import Path; from tunetool.checkpoint.saver_lock import Lock\n"
    script += "held = Lock.take(Path(sys.argv[1]), '0a'); os._exit(0)"
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "step_1")], check=True, timeout=PATIENCE)
    left = tmp_path / "step_1" / saver_lock.NAME
    assert left.exists()
    (tmp_path / "step_1" / "__0_0.0a.distcp").touch()
    for seconds in (0.0, 3600.0, 10 * 365 * 86400.0):
        os.utime(left, (time.time() + seconds, time.time() + seconds))
        assert not savers(tmp_path), seconds


@pytest.mark.parametrize("base", [DefaultSavePlanner, DirectSavePlanner])
def test_a_planner_may_use_one_buffer_for_all_objects(base: type[DefaultSavePlanner], tmp_path: Path) -> None:
    class OneBuffer(base):  # type: ignore[misc, valid-type]
        buffer = io.BytesIO()

        def resolve_data(self, write_item: Any) -> Any:
            value = self.lookup_object(write_item.index)
            if isinstance(value, torch.Tensor):
                return value
            self.buffer.seek(0)
            self.buffer.truncate()
            torch.save(value, self.buffer)
            return self.buffer

    state = {"a": "first", "b": "the second object", "tensor": torch.ones(3)}
    dcp.save(state, storage_writer=DirectWriter(tmp_path / "step"), planner=OneBuffer())
    found = {"a": "", "b": "", "tensor": torch.zeros(3)}
    dcp.load(found, checkpoint_id=tmp_path / "step")
    assert (found["a"], found["b"]) == (state["a"], state["b"])


def test_a_state_that_contains_itself_ends_its_search() -> None:
    state: dict[str, Any] = {"tensor": torch.ones(3)}
    state["self"] = [state]
    assert memory_of(state)[0] == set()


def test_memory_of_a_tensor_in_parts_is_that_of_its_parts() -> None:
    class Holder(torch.Tensor):  # as Megatron-core has them
        @staticmethod
        def __new__(cls, part: torch.Tensor) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, part.shape)  # type: ignore[attr-defined]

        def __init__(self, part: torch.Tensor) -> None:
            self.part = part

        __torch_dispatch__ = None  # it does not compute

        def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
            return [ChunkStorageMetadata(torch.Size([0]), self.part.size())]

        def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
            assert index.offset == torch.Size([0])
            return self.part

    part = torch.ones(3)
    assert list(memory_of({"weight": Holder(part)})[1]) == [part.untyped_storage().data_ptr()]


def test_small_buffers_are_whole_blocks(tmp_path: Path) -> None:
    """Of a size whose half is none."""
    state = {"a": torch.rand(300_000)[:299_999], "b": torch.rand(1000, 200).t()}
    writer = DirectWriter(tmp_path / "step", threads=2, buffer_bytes=MIB + 4096)
    dcp.save(state, storage_writer=writer, planner=DirectSavePlanner())
    found = {name: torch.zeros(tensor.shape) for name, tensor in state.items()}
    dcp.load(found, checkpoint_id=tmp_path / "step")
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


@given(asked=st.integers(1, 1 << 13), threads=st.integers(1, 64), total=st.integers(0, 1 << 34))
def test_buffers_of_any_size_are_whole_blocks(asked: int, threads: int, total: int) -> None:
    size = _size_of_buffers(asked * 4096, threads, total)
    assert 0 < size <= asked * 4096
    assert size % 4096 == 0
