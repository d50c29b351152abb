"""Every engine of `bench checkpoint`: a save is durable, replaces the one before, and is restored bit by bit."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if not find_spec("torch"):
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_programs import run_ranks
from torch.distributed.checkpoint import CheckpointException

from tunetool.bench.checkpoint.engines import ENGINES, REFERENCE
from tunetool.bench.checkpoint.engines.base import Context, Done, Engine, State
from tunetool.bench.checkpoint.engines.tensors import blank, build, equal
from tunetool.bench.checkpoint.states import Shape, shape

PAIR = Path(__file__).with_name("engines_pair.py")
# One of each kind: other numbers of threads use the same code, and the tests cannot observe a writer's own process.
_NOT_OBSERVED = ("dcp-t2-", "dcp-t8-", "dcp-t16-", "dcp-async-process", "nvidia-resiliency-ext", "megatron-dist")
KINDS = [name for name in ENGINES if not name.startswith(_NOT_OBSERVED)]
pytestmark = [
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
    pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning"),  # JAX's, once Orbax is imported
]


@pytest.fixture(scope="module")
def small(model: str) -> Shape:
    return shape(model)


@pytest.fixture(scope="module")
def states(small: Shape) -> list[State]:
    """Two states of the same shape."""
    return [build(small, "cpu", seed=seed) for seed in (1, 2)]


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """One rank, as torchrun starts it."""
    made = not dist.is_initialized()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        if made:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield
        if made:
            dist.destroy_process_group()


def excused(name: str, reason: str) -> bool:
    """Whether what the engine misses is really absent."""
    if reason == ENGINES[name].missing():
        return True
    if ENGINES[name].family == "deepspeed" and not find_spec("deepspeed"):
        return True
    if name == "direct-gds":
        return not torch.cuda.is_available() and reason == "it is for a state on a GPU"
    return name.startswith("deepspeed-fast") and ("tunetool build-ops" in reason or "RLIMIT_MEMLOCK" in reason)


@pytest.fixture
def engine(request: pytest.FixtureRequest, small: Shape, tmp_path: Path) -> Iterator[Engine]:
    """An engine that can run here; the test is skipped, with the engine's own reason, if its library is not installed."""
    name = request.param
    if missing := ENGINES[name].missing():
        pytest.skip(missing)
    made = ENGINES[name]()
    assert made.name == name
    reason = made.unavailable(Context(0, 1, "cpu", tmp_path, small.bytes))
    if reason:
        assert excused(name, reason), reason
        pytest.skip(reason)
    yield made
    made.close()


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
def test_what_is_saved_comes_back_and_the_next_save_replaces_it(
    engine: Engine, states: list[State], tmp_path: Path
) -> None:
    directory = tmp_path / "step"
    like = blank(states[0])
    for state in states:
        pending = engine.save(state, directory)
        assert isinstance(pending, Done) is not ENGINES[engine.name].asynchronous
        kept = {name: tensor.clone() for name, tensor in state.items()}
        for tensor in state.values():
            tensor.add_(1)  # the loop goes on, before anything is waited for
        pending.wait()
        for name, tensor in state.items():
            tensor.copy_(kept[name])
        loaded = engine.load(like, directory)
        assert equal(state, loaded) is None
        assert all(loaded[name] is tensor for name, tensor in like.items())
    assert equal(states[0], loaded) is not None


def test_the_process_is_handed_more_tensors_than_open_files(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    engine = ENGINES["dcp-async-process"]()
    state = {f"{number}": torch.full((3,), float(number)) for number in range(300)}
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        engine.save(state, tmp_path).wait()
        assert equal(state, engine.load(blank(state), tmp_path)) is None
    finally:
        engine.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("engine", ["nvidia-resiliency-ext"], indirect=True)
def test_an_engine_with_caches_saves_what_the_state_is_now(engine: Engine, states: list[State], tmp_path: Path) -> None:
    # It keeps the plan once two saves have had the same one, and the tensors' handles from the second save on.
    for number, state in enumerate([*states, *states]):
        engine.save(state, tmp_path / f"{number}").wait()
    like = blank(states[0])
    for number, state in enumerate([*states, *states]):
        assert equal(state, engine.load(like, tmp_path / f"{number}")) is None, number


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """The operations of this process for durability, in order: ("fsync", inode, bytes then) and ("rename", 0, 0)."""
    seen: list[tuple[str, int, int]] = []
    really = {name: getattr(os, name) for name in ("fsync", "rename", "replace")}

    def fsync(handle: int) -> None:
        really["fsync"](handle)
        status = os.fstat(handle)
        seen.append(("fsync", status.st_ino, status.st_size))

    def renaming(name: str) -> Any:
        def act(*arguments: Any, **more: Any) -> None:
            really[name](*arguments, **more)
            seen.append(("rename", 0, 0))

        return act

    monkeypatch.setattr(os, "fsync", fsync)
    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, renaming(name))
    return seen


def lost_at_power_loss(directory: Path, seen: list[tuple[str, int, int]]) -> list[str]:
    """Files below ``directory`` that were not fsynced completely, or whose directory was not fsynced after the rename."""
    lost = []
    for path in [path for path in directory.rglob("*") if path.is_file()]:
        status = path.stat()
        whole = [at for at, did in enumerate(seen) if did == ("fsync", status.st_ino, status.st_size)]
        named = [at for at, did in enumerate(seen) if did[:2] == ("fsync", path.parent.stat().st_ino)]
        given = [at for at, did in enumerate(seen) if did[0] == "rename"]
        if not whole or not named or max(named) < max(given, default=0):
            lost.append(path.name)
    return lost


def difference(engine: Engine, state: State, directory: Path) -> str:
    """The difference between the saved and the restored state, or why the engine refuses to restore."""
    try:
        loaded = engine.load(blank(state), directory)
    except (Exception, CheckpointException) as error:  # the latter is none of the former
        return str(error)
    return equal(state, loaded) or "none"


@pytest.mark.parametrize("engine", KINDS, indirect=True)
def test_a_save_is_on_the_medium_with_its_names(
    engine: Engine, states: list[State], tmp_path: Path, synced: list[tuple[str, int, int]]
) -> None:
    # A small state too: bytes that stay in a buffer are not on the medium.
    for name, state in (("step", states[0]), ("small", {"a": torch.ones(3)})):
        engine.save(state, tmp_path / name).wait()
        assert lost_at_power_loss(tmp_path / name, synced) == []
        assert ("fsync", tmp_path.stat().st_ino, tmp_path.stat().st_size) in synced


def test_torch_alone_leaves_names_and_metadata_to_luck(tmp_path: Path, synced: list[tuple[str, int, int]]) -> None:
    # Why `finish` in engines/dcp.py does more: when torch mends both, it may do less.
    dcp.save({"a": torch.zeros(3)}, storage_writer=dcp.FileSystemWriter(tmp_path / "step", sync_files=True))
    metadata = (tmp_path / "step" / ".metadata").stat()
    assert metadata.st_size > 0
    assert [size for did, inode, size in synced if did == "fsync" and inode == metadata.st_ino] == [0]
    assert not [did for did in synced if did[1] == (tmp_path / "step").stat().st_ino]


@pytest.mark.parametrize("engine", KINDS, indirect=True)
def test_a_flipped_bit_on_the_medium_is_found_in_its_tensor(
    engine: Engine, states: list[State], tmp_path: Path
) -> None:
    if ENGINES[engine.name].compression != "none":
        pytest.skip("it compresses: the tensor's bytes cannot be found in its files")
    name = "optimizer.model.layers.1.mlp.up_proj.weight.exp_avg"
    engine.save(states[0], tmp_path).wait()
    pattern = states[0][name].flatten()[:64].numpy().tobytes()
    holding = [path for path in tmp_path.iterdir() if path.is_file() and pattern in path.read_bytes()]
    assert len(holding) == 1
    content = bytearray(holding[0].read_bytes())
    content[content.index(pattern) + 5] ^= 1
    holding[0].write_bytes(content)
    reason = difference(engine, states[0], tmp_path)
    refused = "checksum" in reason.lower() or "crc" in reason.lower()  # by an engine that has them
    assert refused or reason == f"`{name}` differs from byte 5 of {states[0][name].nbytes}"


@pytest.mark.parametrize("name", ["dcp-async-thread", "dcp-async-process", "fsdp-consolidated", "torch-save-zip"])
def test_an_engine_that_does_not_fit_into_memory_says_so_before(name: str, tmp_path: Path) -> None:
    reason = ENGINES[name]().unavailable(Context(0, 2, "cpu", tmp_path, 2**50))
    assert reason is None if name == "torch-save-zip" else "PiB" in str(reason)


def test_equality_names_what_differs() -> None:
    state = {"a": torch.tensor([0.0, float("nan")]), "b": torch.zeros((), dtype=torch.bfloat16), "c": torch.zeros(0, 3)}
    same = {name: tensor.clone() for name, tensor in state.items()}
    assert equal(state, same) is None
    assert equal(state, {**same, "a": torch.tensor([-0.0, float("nan")])}) == "`a` differs from byte 3 of 8"
    assert equal(state, {**same, "b": torch.zeros((), dtype=torch.float16)}) == "`b` is float16 () and was bfloat16 ()"
    assert equal(state, {**same, "c": torch.zeros(3, 0)}) == "`c` is float32 (3, 0) and was float32 (0, 3)"
    assert equal(state, {name: same[name] for name in "ab"}) == "`c` is missing"
    assert equal(state, {**same, "d": same["a"]}) == "`d` was not in the state"


def test_a_state_is_the_same_for_the_same_seed_only(small: Shape, states: list[State]) -> None:
    assert equal(states[0], build(small, "cpu", seed=1)) is None
    assert equal(states[0], states[1]) is not None
    assert sum(tensor.nbytes for tensor in states[0].values()) == small.bytes
    weight = states[0]["model.model.embed_tokens.weight"]
    assert weight.dtype == torch.bfloat16
    assert weight.float().std().item() == pytest.approx(0.02, rel=0.05)


def test_a_checkpoint_of_another_state_is_refused_by_name(states: list[State], tmp_path: Path) -> None:
    engine = ENGINES[REFERENCE]()
    engine.save({"a": torch.zeros(3)}, tmp_path).wait()
    with pytest.raises(Exception, match="has no tensor `b`"):
        engine.load({"b": torch.zeros(3)}, tmp_path)
    with pytest.raises(Exception, match=r"another shape, \(3,\), of `a`"):
        engine.load({"a": torch.zeros(4)}, tmp_path)


def test_two_ranks_save_and_restore_with_every_engine(model: str, tmp_path: Path) -> None:
    for rank in run_ranks(PAIR, model, str(tmp_path)):
        assert rank.code == 0, rank.stderr[-3000:]
        results = json.loads(rank.stdout.splitlines()[-1])
        assert {what.split()[1] for what in results if what.startswith("sharded ")} == set(ENGINES)
        for what, result in results.items():
            name = what.split()[1]
            assert result == "equal" or excused(name, result.removeprefix("unavailable: ")), f"{what}: {result}"


def test_a_stager_that_torch_closed_is_made_anew(states: list[State], tmp_path: Path) -> None:
    engine = ENGINES["dcp-async-thread"]()
    like = blank(states[0])
    for number, state in enumerate(states):
        engine.save(state, tmp_path / str(number)).wait()
        assert equal(state, engine.load(like, tmp_path / str(number))) is None
        engine._stager.close()  # type: ignore[attr-defined]  # as torch 2.11 does
    engine.close()
