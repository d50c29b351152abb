"""``tunetool.loading.iterate``: all tensors in the order of the files, each valid for as long as it is held, and no more
ahead than was allowed."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_loading import SMALL, STATES, made, same, sharded, write_index
from torch.distributed.tensor import Shard
from torch.multiprocessing.reductions import StorageWeakRef

from tunetool.errors import CannotJudge, UsageProblem
from tunetool.loading import Progress, ShardPlan, iterate, iteration, load
from tunetool.loading.iteration import cut
from tunetool.loading.safetensors_files import list_tensors
from tunetool.loading.standing_reads import Job
from tunetool.loading.wanted import wanted_of
from waiting import PATIENCE


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("tunetool-read")}


def _open_files(directory: Path) -> list[str]:
    handles = Path("/proc/self/fd")
    return [
        target for each in handles.iterdir() if each.exists() and str(directory) in (target := str(each.readlink()))
    ]


def _ended(directory: Path) -> bool:
    return not _threads() and not _open_files(directory)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two files of 40 tensors of 4 KiB to 300 KiB, in names whose order is not that of the offsets."""
    files = {
        f"model-{file}.safetensors": {
            f"{name * 7 % 20}.weight": made((1 + name * 4000 % 75_001,), torch.float32, 100 * file + name)
            for name in range(20 * (file - 1), 20 * file)
        }
        for file in (1, 2)
    }
    files["model-2.safetensors"] = {f"second.{name}": each for name, each in files["model-2.safetensors"].items()}
    for file, tensors in files.items():
        save_file(tensors, tmp_path / file)
    write_index(tmp_path, files)
    return tmp_path


def whole(directory: Path) -> dict[str, torch.Tensor]:
    return {name: each for path in sorted(directory.glob("*.safetensors")) for name, each in load_file(path).items()}


@settings(max_examples=40, deadline=None)
@given(
    state=STATES,
    threads=st.integers(1, 3),
    ahead=st.sampled_from([1, 600, 5000, 70_000, 1 << 20, 1 << 30]),
    held=st.booleans(),
)
def test_each_tensor_comes_once_in_the_order_of_the_files(
    state: dict[str, Any], threads: int, ahead: int, held: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("drawn")
    files: dict[str, dict[str, torch.Tensor]] = {}
    for number, (name, (shape, dtype, file)) in enumerate(state.items()):
        files.setdefault(f"model-{file}.safetensors", {})[name] = made(shape, dtype, number)
    if not files:
        return
    for file, tensors in files.items():
        save_file(tensors, directory / file)
    write_index(directory, files)
    theirs, names = whole(directory), []
    kept: dict[str, torch.Tensor] = {}
    for name, tensor in iterate(directory, ahead_bytes=ahead, threads=threads, buffer_bytes=SMALL):
        names.append(name)
        same({name: tensor}, {name: theirs[name]})
        if held:
            kept[name] = tensor
        else:
            tensor.zero_()
    assert names == list(list_tensors(directory).tensors)
    same(kept, theirs if held else {})


def test_files_come_by_name_and_tensors_by_offset(model: Path) -> None:
    names = [name for name, _ in iterate(model, ahead_bytes=100_000)]
    at = [(each.file, each.start) for each in map(list_tensors(model).tensors.__getitem__, names)]
    assert at == sorted(at)
    assert len(names) == 40


@pytest.mark.parametrize("held", [False, True])
def test_no_more_is_ahead_than_was_allowed(model: Path, monkeypatch: pytest.MonkeyPatch, held: bool) -> None:
    """Of the memory that was taken and lives, what was not handed out. A tensor larger than the bound comes alone."""
    really_empty, taken = torch.empty, []

    def empty(*size: Any, **more: Any) -> torch.Tensor:
        tensor = really_empty(*size, **more)
        taken.append((StorageWeakRef(tensor.untyped_storage()), tensor.untyped_storage().nbytes()))
        return tensor

    monkeypatch.setattr(torch, "empty", empty)
    bound, largest, ahead = 400_000, 300_004, []
    kept: list[torch.Tensor] = []
    for _, tensor in iterate(model, ahead_bytes=bound, threads=2, buffer_bytes=SMALL):
        kept = [*kept, tensor] if held else [tensor]
        mine = sum(each.nbytes for each in kept)
        # A thread may hold a tensor for a moment after its last read.
        until = time.monotonic() + PATIENCE
        while (alive := sum(size for each, size in taken if not each.expired())) - mine > bound:
            assert time.monotonic() < until, (alive, mine)
            time.sleep(0.001)
        ahead.append(alive - mine)
    assert largest < bound
    # Not only in the beginning.
    assert all(bound / 2 < max(some) <= bound for some in (ahead[:10], ahead[10:20], ahead[20:30]))
    kept.clear()
    del tensor
    gc.collect()
    assert all(each.expired() for each, _ in taken)


def test_batches_hold_what_fits_or_one_that_is_larger(model: Path) -> None:
    tensors = wanted_of(list_tensors(model), None)
    for most in (1, 4096, 100_000, 1 << 30):
        batches = list(cut(tensors, most))
        assert [each for batch in batches for each in batch.tensors] == tensors
        assert all(batch.bytes <= most or len(batch.tensors) == 1 for batch in batches)
        for first, second in itertools.pairwise(batches):
            assert first.bytes + cut_size(second.tensors[0]) > most


def cut_size(tensor: Any) -> int:
    (batch,) = cut([tensor], 1)
    return batch.bytes


def test_nothing_is_read_before_the_first_tensor_is_asked_for(model: Path) -> None:
    tensors = iterate(model, ahead_bytes=SMALL)
    assert _ended(model)
    next(tensors)
    assert _threads()
    tensors.close()
    assert _ended(model)


def _close_early(tensors: Any) -> None:
    next(tensors)
    tensors.close()


def _fail_in_the_loop(tensors: Any) -> None:
    with contextlib.suppress(ZeroDivisionError):
        for name, _ in tensors:
            assert name == "never", 1 / 0


def _forget(tensors: Any) -> None:
    next(tensors)


def _take_all(tensors: Any) -> None:
    assert len(list(tensors)) == 40


@pytest.mark.parametrize("way", [_close_early, _fail_in_the_loop, _forget, _take_all])
def test_threads_and_files_end_however_it_ends(model: Path, way: Callable[[Any], None]) -> None:
    way(iterate(model, ahead_bytes=200_000, threads=3, buffer_bytes=SMALL))
    gc.collect()
    assert _ended(model)
    same(dict(iterate(model)), whole(model))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: os.truncate(path, path.stat().st_size // 2), "it is cut short"),
        (lambda path: os.utime(path, (1, 1)), "changed while it was loaded"),
        (Path.unlink, "model-2.safetensors"),
    ],
    ids=["truncated", "written", "removed"],
)
def test_a_file_that_changes_meanwhile_is_refused_by_name(
    model: Path, change: Callable[[Path], object], words: str
) -> None:
    tensors = iterate(model, ahead_bytes=SMALL, threads=2, buffer_bytes=SMALL)
    came = [next(tensors)[0] for _ in range(3)]
    change(model / "model-2.safetensors")
    with pytest.raises(CannotJudge) as caught:
        came.extend(name for name, _ in tensors)
    assert "/model-2.safetensors`" in caught.value.message
    assert words in caught.value.message
    assert len(came) < 40
    assert list(tensors) == []
    del caught
    gc.collect()
    assert _ended(model)


def test_an_interrupted_wait_ends_the_threads(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really_read = os.preadv

    def read(handle: int, buffers: Any, offset: int, *flags: int) -> int:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.05)
        return really_read(handle, buffers, offset, *flags)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "preadv", read)
    monkeypatch.setattr("tunetool.loading.iteration.Job.wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        next(iterate(model, threads=2, buffer_bytes=SMALL))
    gc.collect()
    assert _ended(model)


def test_a_closed_iterator_reads_no_more(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really_read, reads = os.preadv, list[int]()

    def read(*call: Any) -> int:
        time.sleep(0.01)
        reads.append(call[2])
        return really_read(*call)

    monkeypatch.setattr(os, "preadv", read)
    tensors = iterate(model, ahead_bytes=4 << 20, threads=1, buffer_bytes=SMALL)
    next(tensors)
    before = len(reads)
    tensors.close()
    # The one that was under way, and one that the thread began meanwhile.
    assert len(reads) <= before + 2


def test_files_are_closed_when_their_tensors_have_come(tmp_path: Path) -> None:
    files = {
        f"model-{number:02}.safetensors": {f"t{number}": made((30_000,), torch.int8, number)} for number in range(20)
    }
    for file, tensors in files.items():
        save_file(tensors, tmp_path / file)
    write_index(tmp_path, files)
    names = []
    for name, _ in iterate(tmp_path, ahead_bytes=100_000, threads=2, buffer_bytes=SMALL):
        names.append(name)
        assert len({Path(each).name for each in _open_files(tmp_path)}) <= 4
    assert len(names) == 20


def test_buffers_that_the_system_refuses_are_named(model: Path) -> None:
    with pytest.raises(CannotJudge, match="a host buffer of"):
        # The kernel has no address space of that size.
        list(iterate(model, buffer_bytes=1 << 60, threads=2))
    gc.collect()
    assert _ended(model)


def test_threads_that_cannot_begin_say_why(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __init__(self, *_: object) -> None:
            raise MemoryError("no room for a thread's buffers")

    monkeypatch.setattr("tunetool.loading.iteration.Buffers", Broken)
    with pytest.raises(MemoryError, match="no room"):
        list(iterate(model, threads=2))
    gc.collect()
    assert _ended(model)


def test_a_wrong_call_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="holds no weights"):
        iterate(tmp_path)
    sharded(tmp_path)
    for wrong in (0, -1, 1.5, "1", None):
        with pytest.raises(UsageProblem, match="`ahead_bytes="):
            iterate(tmp_path, ahead_bytes=wrong)  # type: ignore[arg-type]
    for more in ({"threads": 0}, {"buffer_bytes": 1000}):
        with pytest.raises(UsageProblem, match="at least one thread"):
            iterate(tmp_path, **more)
    with pytest.raises(UsageProblem, match="is not a device"):
        iterate(tmp_path, "gpu")


def test_a_model_without_tensors_ends_at_once(tmp_path: Path) -> None:
    save_file({}, tmp_path / "model.safetensors")
    assert list(iterate(tmp_path)) == []
    assert _ended(tmp_path)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_parts_come_one_after_another(model: Path, rank: int) -> None:
    """Three ranks of which each takes rows; the bytes that were read are those of the parts and of their last blocks."""
    came: list[Progress] = []
    plan = ShardPlan({"**": Shard(0)}, rank, 3)
    ours = dict(iterate(model, shard=plan, ahead_bytes=SMALL, buffer_bytes=SMALL, progress=came.append))
    same(ours, load(model, shard=plan))
    mine = sum(tensor.nbytes for tensor in ours.values())
    assert came[-1].bytes == came[-1].total == mine
    assert mine <= came[-1].read < sum(path.stat().st_size for path in model.glob("*.safetensors"))
    with pytest.raises(UsageProblem, match="matches no tensor"):
        iterate(model, shard=ShardPlan({"missing": Shard(0)}, 0, 2))


def test_progress_ends_with_everything(model: Path) -> None:
    came: list[Progress] = []
    total = sum(tensor.nbytes for _, tensor in iterate(model, ahead_bytes=SMALL, progress=came.append))
    assert came[-1].bytes == came[-1].total == came[-1].read == total
    assert "GB/s" in str(came[-1])


UNFINISHED = """
import os, sys
from tunetool.loading import iterate
tensors = iterate(sys.argv[1], ahead_bytes=1)
next(tensors)
"""
FORKED = """
child = os.fork()
del tensors
if child:
    sys.exit(os.waitpid(child, 0)[1])
"""


@pytest.mark.parametrize(
    ("more", "code"), [("", 0), ("raise SystemExit(3)", 3), (FORKED, 0)], ids=["end", "exit", "fork"]
)
def test_a_process_ends_whatever_of_an_iterator_is_left(model: Path, more: str, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", UNFINISHED + more, str(model)], timeout=PATIENCE, check=False)
    assert done.returncode == code


def test_a_collection_in_a_thread_that_reads_ends_an_iterator(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[Any] = [iterate(model, ahead_bytes=1, threads=2)]
    next(held[0])
    collected = threading.Event()
    carry_out = iteration._ReadAhead._carry_out

    def collect(self: Any, *order: Any) -> None:
        held.clear()  # the last that refers to it, as the collector may find in any thread
        carry_out(self, *order)
        collected.set()

    monkeypatch.setattr(iteration._ReadAhead, "_carry_out", collect)
    with contextlib.suppress(IndexError):
        for _ in range(40):
            next(held[0])
    assert collected.wait(PATIENCE)
    deadline = time.monotonic() + PATIENCE
    while not _ended(model):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_gpu_that_fails_as_buffers_are_given_back_ends_all(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_back = iteration.Buffers.__exit__

    def fail(self: Any, *error: Any) -> None:
        give_back(self, *error)
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(iteration.Buffers, "__exit__", fail)
    same(dict(iterate(model)), whole(model))
    assert _ended(model)


def test_whoever_waits_hears_of_a_gpu_that_records_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(torch.cuda, "Event", fail)
    job = Job(None, object())
    job.left = 1
    job.finished(None)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        job.wait()


def test_a_file_that_was_replaced_before_it_is_opened(model: Path) -> None:
    tensors = iterate(model, ahead_bytes=1)
    next(tensors)
    second = model / "model-2.safetensors"
    save_file(load_file(second), model / "new")
    (model / "new").replace(second)
    with pytest.raises(CannotJudge, match=r"`.*model-2.safetensors` was replaced by another file meanwhile"):
        list(tensors)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"threads": "3"}, "`threads='3'`"),
        ({"buffer_bytes": 1.5}, "`buffer_bytes=1.5`"),
        ({"shard": {"**.q_proj": Shard(0)}}, "`shard` is a `dict`"),
        ({"device": None}, "`None` is not a device"),
    ],
)
def test_arguments_of_another_kind_are_refused_by_name(model: Path, arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageProblem, match=re.escape(why)):
        iterate(model, **arguments)
