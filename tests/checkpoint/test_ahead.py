"""A copy that begins before the plan: the bytes are those of the state at the call, whatever saves before brought."""

from __future__ import annotations

import gc
import shutil
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan

from tunetool.checkpoint import DirectReader, DirectSavePlanner, DirectWriter, Saver, compiled, release_buffers
from tunetool.checkpoint.ahead import Ahead
from tunetool.checkpoint.host_buffers import POOL
from tunetool.checkpoint.rank_layout import forget_layouts

pytestmark = pytest.mark.usefixtures("one_rank")
State = dict[str, Any]
MIB = 1 << 20


@pytest.fixture(autouse=True)
def compiled_code(compiled_read_loop: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    library = compiled.load_library(compiled_read_loop)
    monkeypatch.setattr(compiled, "library", lambda: library)
    forget_layouts()
    yield
    forget_layouts()
    release_buffers()


class Run:
    """Saves asynchronously, and compares what is read back with what the state held when the call was made."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder, 0

    def save(self, state: State, planner: Any = None, expected: State | None = None) -> bool:
        """Whether the copy began ahead. The state gets other values as soon as training goes on."""
        self.number += 1
        path = self.folder / f"step_{self.number}"
        held = {name: value.clone() for name, value in (expected or state).items()}
        writer = DirectWriter(path, threads=3, buffer_bytes=MIB)
        saving = dcp.async_save(
            state,
            storage_writer=writer,
            planner=planner or DirectSavePlanner(),
            async_stager=writer.stager(),
        )
        for value in state.values():
            value.zero_()
        saving.result()
        back = {name: torch.full_like(value, 3) for name, value in held.items()}
        dcp.load(back, storage_reader=DirectReader(path))
        for name, value in held.items():
            assert torch.equal(back[name], value), name
        assert writer.last is not None
        return writer.last.ahead


def fill(state: State) -> State:
    for value in state.values():
        value.copy_(torch.randn(value.shape) * 100)
    return state


def model() -> State:
    its = {f"layer.{number}": torch.zeros(40_000 + 999 * number) for number in range(40)}
    its |= {f"twin.{number}": torch.zeros(50_000) for number in range(2)}
    its["step"] = torch.zeros(())
    its["none"] = torch.zeros(0)
    its["columns"] = torch.zeros(300, 500).t()
    return its


def test_the_third_save_of_the_same_memory_begins_ahead(tmp_path: Path) -> None:
    run, state = Run(tmp_path), model()
    assert [run.save(fill(state)) for _ in range(5)] == [False, False, True, True, True]


def test_torchs_planner_may_begin_ahead_too(tmp_path: Path) -> None:
    run, state = Run(tmp_path), model()
    assert [run.save(fill(state), DefaultSavePlanner()) for _ in range(3)] == [False, False, True]


def test_a_saver_begins_ahead_too(tmp_path: Path) -> None:
    state, ahead = model(), []
    with Saver([tmp_path], threads=3, buffer_bytes=MIB) as saver:
        for step in range(4):
            held = {name: value.clone() for name, value in fill(state).items()}
            saver.save_async(state, step)
            for value in state.values():
                value.zero_()
            saver.wait()
            assert saver.last is not None
            ahead.append(saver.last.ahead)
            back = {name: torch.full_like(value, 3) for name, value in held.items()}
            dcp.load(back, storage_reader=DirectReader(tmp_path / f"step_{step}"))
            assert all(torch.equal(back[name], value) for name, value in held.items())
    assert ahead == [False, False, True, True]


def test_no_copy_goes_on_once_its_save_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training may free the tensors then; and the buffers are kept for the next save."""
    lost, state, copying = tmp_path / "lost", model(), set[threading.Thread]()
    saver = Saver([lost], threads=3, buffer_bytes=MIB, on_failure=lambda _: None)
    for step in range(3):
        saver.save_async(state, step)
        saver.wait()
    idle = POOL.idle_bytes(MIB, pinned=False)
    copy = Ahead._copy

    def slow(*arguments: Any) -> None:
        copying.add(threading.current_thread())
        time.sleep(0.3)
        copy(*arguments)

    monkeypatch.setattr(Ahead, "_copy", slow)
    shutil.rmtree(lost)
    saver.save_async(fill(state), 3)
    assert copying
    assert not any(thread.is_alive() for thread in copying)
    assert saver.wait() is None
    assert POOL.idle_bytes(MIB, pinned=False) == idle > 0


def replaced(state: State) -> None:
    state["layer.7"] = torch.zeros(state["layer.7"].shape)


def resized(state: State) -> None:
    state["layer.7"] = torch.zeros(state["layer.7"].numel() + 1)


def removed(state: State) -> None:
    del state["layer.7"]


def added(state: State) -> None:
    state["another"] = torch.zeros(12_345)


def exchanged(state: State) -> None:
    """The same memory under other names, and of other shapes."""
    state["layer.7"], state["layer.8"] = state["layer.8"], state["layer.7"]


def exchanged_alike(state: State) -> None:
    """The same memory under other names, in the same layout."""
    state["twin.0"], state["twin.1"] = state["twin.1"], state["twin.0"]


def other_type(state: State) -> None:
    """The same bytes."""
    state["layer.8"] = state["layer.8"].view(torch.int32)


def part(state: State) -> None:
    state["layer.9"] = state["layer.9"][100:]


def other_order(state: State) -> None:
    state["columns"] = state["columns"].t()


@pytest.mark.parametrize(
    "change", [replaced, resized, removed, added, exchanged, exchanged_alike, other_type, part, other_order]
)
def test_a_changed_state_is_saved_as_it_is(tmp_path: Path, change: Callable[[State], None]) -> None:
    run, state = Run(tmp_path), model()
    kept = dict(state)  # so that nothing else gets the memory
    for _ in range(3):
        ahead = run.save(fill(state))
    assert ahead
    change(state)
    run.save(fill(state))
    for _ in range(2):
        ahead = run.save(fill(state))
    assert ahead, "it is known again"
    assert kept


def test_freed_memory_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, state = Run(tmp_path), model()
    for _ in range(3):
        run.save(fill(state))
    state["layer.9"].untyped_storage().resize_(0)
    state["layer.9"] = torch.zeros_like(state["layer.9"], memory_format=torch.contiguous_format)
    monkeypatch.setattr("tunetool.checkpoint.ahead.Ahead", lambda *_: pytest.fail("a copy began"))
    assert not run.save(fill(state))


def test_a_part_of_the_state_may_be_saved_in_turn(tmp_path: Path) -> None:
    run, state = Run(tmp_path), model()
    some = {name: state[name] for name in ("layer.1", "layer.2", "step")}
    ahead = [(run.save(fill(state)), run.save(fill(some))) for _ in range(4)]
    assert ahead[2:] == [(True, True)] * 2


class Doubling(DirectSavePlanner):
    """Changes what the state holds on its way, at the same address."""

    def create_local_plan(self) -> Any:
        for value in self.state_dict.values():
            value.mul_(2)
        return super().create_local_plan()


def test_a_planner_of_another_class_has_its_way(tmp_path: Path) -> None:
    run, state = Run(tmp_path), model()
    for _ in range(4):
        fill(state)
        expected = {name: value * 2 for name, value in state.items()}
        assert not run.save(state, Doubling(), expected)


class Failing(DirectSavePlanner):
    def create_local_plan(self) -> Any:
        raise ValueError("no plan")


def test_a_save_that_fails_gives_its_buffers_back(tmp_path: Path) -> None:
    run, state = Run(tmp_path), model()
    for _ in range(3):
        run.save(fill(state))
    before = threading.active_count()
    for number in range(3):
        writer = DirectWriter(tmp_path / f"failed_{number}", threads=3, buffer_bytes=MIB)
        saving = dcp.async_save(state, storage_writer=writer, planner=Failing(), async_stager=writer.stager())
        with pytest.raises(CheckpointException, match="no plan"):
            saving.result()
    assert run.save(fill(state)), "all buffers are idle"
    assert threading.active_count() <= before + 1  # the thread of async_save ends by itself


def test_objects_are_those_of_their_save(tmp_path: Path) -> None:
    state: State = {"model": model(), "notes": {"epoch": 0}}
    for epoch in range(4):
        state["notes"]["epoch"] = epoch
        fill(state["model"])
        writer = DirectWriter(tmp_path / f"step_{epoch}", threads=3, buffer_bytes=MIB)
        dcp.async_save(state, storage_writer=writer, planner=DirectSavePlanner(), async_stager=writer.stager()).result()
        back: State = {"model": {name: torch.zeros_like(value) for name, value in state["model"].items()}}
        back["notes"] = {"epoch": -1}
        dcp.load(back, storage_reader=DirectReader(tmp_path / f"step_{epoch}"))
        assert back["notes"] == {"epoch": epoch}
        assert all(torch.equal(back["model"][name], value) for name, value in state["model"].items())
    assert writer.last is not None
    assert writer.last.ahead


def test_a_failing_copy_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, state = Run(tmp_path), model()
    for _ in range(3):
        run.save(fill(state))
    library = compiled.library()

    class Refusing:
        calls = 0

        def tunetool_copy_runs(self, *given: Any) -> int:
            self.calls += 1
            return 1 if self.calls == 1 else int(library.tunetool_copy_runs(*given))

    refusing = Refusing()
    monkeypatch.setattr(compiled, "library", lambda: refusing)
    assert not run.save(fill(state))
    assert refusing.calls > 1


def test_without_idle_buffers_the_plan_comes_first(tmp_path: Path) -> None:
    run, state = Run(tmp_path), model()
    for _ in range(3):
        run.save(fill(state))
    release_buffers()
    assert not run.save(fill(state))
    assert run.save(fill(state))


class Interrupted(Exception):
    """Of a signal's handler, as of Ctrl-C."""


class Late(DirectWriter):
    """Waits for ``go`` before the planner looks at the state."""

    go = threading.Event()

    def storage_meta(self) -> StorageMeta:
        assert self.go.wait(30)
        return super().storage_meta()


class LateWithPlan(DirectWriter):
    """Waits for ``go`` once it has the plan."""

    go = threading.Event()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        assert self.go.wait(30)
        return super().prepare_local_plan(plan)


@pytest.fixture
def interruption() -> Iterator[Callable[[], None]]:
    """A function that has the main thread interrupted soon."""

    def interrupt(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)

    def begin() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.3)

    yield begin
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def wait_for_threads() -> None:
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join(30)


def test_memory_freed_by_an_interrupted_loop_is_kept_while_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interruption: Callable[[], None]
) -> None:
    """It may belong to nobody any more: reading it ended the process."""
    library = compiled.library()
    go, reads = threading.Event(), threading.Event()

    class Slow:
        def tunetool_copy_runs(self, *args: Any) -> int:
            reads.set()
            assert go.wait(30)
            return int(library.tunetool_copy_runs(*args))

    memory = np.zeros(500_000, np.float32)
    gone = weakref.ref(memory)
    state: State = {"model": {"weight": torch.from_numpy(memory)}}
    del memory
    for number in range(2):
        writer = Late(tmp_path / f"step_{number}", buffer_bytes=MIB)
        writer.go.set()
        dcp.async_save(state, storage_writer=writer, planner=DirectSavePlanner(), async_stager=writer.stager()).result()
    monkeypatch.setattr(compiled, "library", Slow)
    writer.go.clear()
    interruption()
    with pytest.raises(Interrupted):
        dcp.async_save(state, storage_writer=writer, planner=DirectSavePlanner(), async_stager=writer.stager())
    try:
        state["model"].clear()
        gc.collect()
        assert reads.is_set()
        assert gone() is not None
    finally:
        go.set()
        writer.go.set()
    wait_for_threads()
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("kind", [Late, LateWithPlan])
def test_an_interrupted_loop_leaves_no_save_of_two_states(
    tmp_path: Path, interruption: Callable[[], None], kind: type[Late | LateWithPlan]
) -> None:
    """The loop may go on and change what is not copied yet."""
    state: State = {"weight": torch.full((500_000,), 1.0)}
    writer = kind(tmp_path, buffer_bytes=MIB)
    writer.go.set()
    dcp.save(state, storage_writer=writer, planner=DirectSavePlanner())
    writer.go.clear()
    state["weight"].fill_(2)
    interruption()
    with pytest.raises(Interrupted):
        dcp.async_save(state, storage_writer=writer, planner=DirectSavePlanner(), async_stager=writer.stager())
    state["weight"].fill_(3)
    writer.go.set()
    wait_for_threads()
    dcp.load(state, storage_reader=DirectReader(tmp_path))
    assert state["weight"].unique().tolist() == [1]
    dcp.async_save(state, storage_writer=writer, planner=DirectSavePlanner(), async_stager=writer.stager()).result()
