"""The bytes of a checkpoint are those of its step, though an optimizer reuses its storage as soon as ``save`` returns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tunetool.bench.checkpoint import stamps
from tunetool.bench.checkpoint.child import Rank
from tunetool.bench.checkpoint.engines import tensors
from tunetool.bench.checkpoint.engines.base import Done, Pending, Plain, State, Waiting
from tunetool.bench.checkpoint.engines.direct import DirectAsync
from tunetool.checkpoint import release_buffers

KINDS = (torch.bfloat16, torch.float32)


class Kept(Plain):
    """An engine that keeps its checkpoints in memory: what matters is when it copies."""

    name = "kept"

    def __init__(self) -> None:
        self.saved: State = {}

    def save(self, state: State, directory: Path) -> Pending:
        self.saved = {name: tensor.clone() for name, tensor in state.items()}
        return Waiting(lambda: None)

    def load(self, like: State, directory: Path) -> State:
        for name, tensor in like.items():
            tensor.copy_(self.saved[name])
        return like


class Synchronous(Kept):
    def save(self, state: State, directory: Path) -> Pending:
        super().save(state, directory)
        return Done()


class Late(Kept):
    """It returns, and copies only then; ``first``: the first save too."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.on_time = not first

    def save(self, state: State, directory: Path) -> Pending:
        if self.on_time:
            self.on_time = False
            return super().save(state, directory)

        def copy() -> None:
            self.saved = {name: tensor.clone() for name, tensor in state.items()}

        return Waiting(copy)


class Stale(Kept):
    """Its buffers are filled once."""

    def save(self, state: State, directory: Path) -> Pending:
        return super().save(state, directory) if not self.saved else Waiting(lambda: None)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def rank(alone: None) -> Rank:
    state = {f"w.{number}": torch.randn(3, 5).to(KINDS[number % 2]) for number in range(100)}
    state["step"] = torch.tensor(1.0)
    return Rank(0, 1, state=state, like=tensors.blank(state))


def rounds(rank: Rank, engine: Any, tmp_path: Path, count: int = 3, first: bool = True) -> list[str | None]:
    """What each restore says, as the benchmark goes on: one save whose state is all overwritten, then the rounds."""
    rank.engines["kept"] = engine
    order = {"engine": "kept", "directory": str(tmp_path / "saved")}
    said = []
    for number in range(count):
        rank.save({**order, "overwrite": first and number == 0})
        said.append(rank.load(order)["different"])
    return said


@pytest.mark.parametrize("engine", [Kept, Synchronous])
def test_an_engine_that_copies_in_time_is_equal_in_every_round(rank: Rank, engine: type[Kept], tmp_path: Path) -> None:
    before = {name: tensor.clone() for name, tensor in rank.state.items()}
    assert rounds(rank, engine(), tmp_path) == [None, None, None]
    # The numbers are in a few places, and the rest is as it was.
    assert tensors.equal(before, rank.state) is not None
    same = [name for name in before if torch.equal(before[name], rank.state[name])]
    assert len(before) - len(same) <= stamps.MARKED


@pytest.mark.parametrize(("first", "whole"), [(True, True), (True, False), (False, True)])
def test_a_late_snapshot_is_named_in_whichever_save(rank: Rank, first: bool, whole: bool, tmp_path: Path) -> None:
    said = rounds(rank, Late(first), tmp_path, first=whole)
    for line in said if first else said[1:]:
        assert line is not None
        assert "differs from byte 0" in line
        assert "after `save` had returned: the engine takes its snapshot too late" in line
        assert "\n" not in line
    if not first:
        assert said[0] is None


def test_a_stale_snapshot_is_named_with_its_save(rank: Rank, tmp_path: Path) -> None:
    said = rounds(rank, Stale(), tmp_path)
    assert said[0] is None
    assert "it holds the bytes of save 1, and save 2 was restored: its snapshot is stale" in str(said[1])
    assert "it holds the bytes of save 1, and save 3 was restored" in str(said[2])


def test_another_difference_is_not_called_a_snapshot(rank: Rank, tmp_path: Path) -> None:
    engine = Kept()
    rank.engines["kept"] = engine
    order = {"engine": "kept", "directory": str(tmp_path)}
    rank.save(order)
    engine.saved["w.1"].view(-1)[-1] = 7.0
    assert "`w.1` differs from byte" in str(rank.load(order)["different"])
    assert "snapshot" not in str(rank.load(order)["different"])


@pytest.mark.parametrize("number", [1, 255, 256, 2**31])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stamp_and_its_opposite_are_ordinary_numbers(number: int, kind: torch.dtype) -> None:
    state = {"w": torch.zeros(16, dtype=kind)}
    stamps.mark(state, number)
    for _ in range(2):
        assert torch.isfinite(state["w"]).all()
        assert (state["w"].abs()[: 8 // kind.itemsize] > 1e-3).all()
        stamps.turn_over(state)
    assert stamps.moment(state, number) is None
    assert "too late" not in str(stamps.moment(state, number + 1))


def test_adam_in_place_after_every_save_of_ours(alone: None, tmp_path: Path) -> None:
    """A real optimizer, whose moments and weights keep their storage from step to step."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 32))
    adam = torch.optim.Adam(model.parameters(), lr=0.1)

    def step() -> None:
        adam.zero_grad()
        model(torch.randn(8, 64)).square().sum().backward()  # type: ignore[no-untyped-call]
        adam.step()

    step()
    state: State = dict(model.state_dict())
    for number, moments in enumerate(adam.state.values()):
        state |= {f"adam.{number}.{key}": value for key, value in moments.items()}
    engine = DirectAsync()
    try:
        for number in range(4):
            expected = {name: tensor.detach().clone() for name, tensor in state.items()}
            where = {name: tensor.data_ptr() for name, tensor in state.items()}
            pending = engine.save(state, tmp_path / str(number))
            for _ in range(3):
                step()
            pending.wait()
            assert {name: tensor.data_ptr() for name, tensor in state.items()} == where, "the optimizer reuses storage"
            assert tensors.equal(expected, state) is not None
            like = tensors.blank(expected)
            assert tensors.equal(expected, engine.load(like, tmp_path / str(number))) is None
    finally:
        release_buffers()


def test_torchs_own_async_save_without_stager_is_held_to_it_too(rank: Rank, tmp_path: Path) -> None:
    """torch's ``async_save`` copies before it returns: an engine of nobody's making."""

    class Torch(Kept):
        def save(self, state: State, directory: Path) -> Pending:
            self.directory = directory / str(rank.saves)
            future = dcp.async_save(state, checkpoint_id=self.directory)
            return Waiting(lambda: future.result() and None)

        def load(self, like: State, directory: Path) -> State:
            dcp.load(like, checkpoint_id=self.directory)
            return like

    assert rounds(rank, Torch(), tmp_path, count=2) == [None, None]
