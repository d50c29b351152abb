"""Plans and layouts that are kept from save to save: whatever changes in between, each checkpoint has its own bytes."""

from __future__ import annotations

import gc
import pickle
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import changing
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.format_utils import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tunetool.checkpoint import DirectSavePlanner, DirectWriter, metadata, packed, planner, rank_layout, saver_lock
from tunetool.checkpoint.commit import Saving
from tunetool.checkpoint.items import Placed
from tunetool.checkpoint.packed import Packed

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
Ask = Callable[..., Any]
MIB = 1 << 20


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    forget()
    yield
    forget()


def forget() -> None:
    planner.forget_plans()
    rank_layout.forget_layouts()
    for name, cache in vars(SavePlanner).items():
        if name.startswith("_cached_"):
            cache.clear()


def loaded(directory: Path) -> dict[str, Any]:
    """The whole checkpoint as torch's reader has it: the metadata decides names, shapes, dtypes and nesting."""
    state: dict[str, Any] = {}
    _load_state_dict(
        state, storage_reader=dcp.FileSystemReader(directory), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    return state


def assert_same(expected: Any, found: Any, where: str) -> None:
    assert type(expected) is type(found) or isinstance(expected, torch.Tensor), where
    if isinstance(expected, dict):
        assert expected.keys() == found.keys(), where
        for key, value in expected.items():
            assert_same(value, found[key], f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(expected) == len(found), where
        for number, (one, other) in enumerate(zip(expected, found, strict=True)):
            assert_same(one, other, f"{where}.{number}")
    elif isinstance(expected, torch.Tensor):
        assert (expected.dtype, expected.shape) == (found.dtype, found.shape), where
        bits = [each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (expected, found)]
        assert torch.equal(*bits), where
    else:
        assert expected == found, where


def copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    if isinstance(value, list):
        return [copied(each) for each in value]
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


class SuccessiveStates(RuleBasedStateMachine):
    """One state that changes in any way between saves, and the checkpoints that it left."""

    def __init__(self) -> None:
        super().__init__()
        forget()
        self.folder = Path(tempfile.mkdtemp(prefix="kept-"))
        self.state: dict[str, Any] = {}
        self.saved: dict[Path, Any] = {}
        self.seed = 0

    def teardown(self) -> None:
        for path, state in self.saved.items():
            assert_same(state, loaded(path), path.name)
        shutil.rmtree(self.folder)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self.seed += 1
        made = torch.Generator().manual_seed(self.seed)
        return torch.randint(-100, 100, shape, generator=made).to(dtype)

    def places(self) -> list[tuple[Any, Any]]:
        """Every tensor's container and key."""
        found: list[tuple[Any, Any]] = []

        def look(inside: Any) -> None:
            for key, value in inside.items() if isinstance(inside, dict) else enumerate(inside):
                if isinstance(value, (dict, list)):
                    look(value)
                elif isinstance(value, torch.Tensor):
                    found.append((inside, key))

        look(self.state)
        return found

    def one(self, pick: int) -> tuple[Any, Any, torch.Tensor]:
        places = self.places()
        inside, key = places[pick % len(places)]
        return inside, key, inside[key]

    @initialize()
    def first(self) -> None:
        self.state = {
            "large": self.tensor((700, 500), torch.float32),
            "model": {"a": self.tensor((30, 40), torch.float32), "b": self.tensor((7,), torch.int64)},
            "steps": [self.tensor((), torch.float32), self.tensor((5, 3), torch.bfloat16)],
            "step": 0,
        }

    @rule(pick=st.integers(0, 99))
    def values(self, pick: int) -> None:
        _, _, tensor = self.one(pick)
        tensor.detach().copy_(self.tensor(tuple(tensor.shape), tensor.dtype))

    @rule(pick=st.integers(0, 99), off=st.integers(0, 3))
    def storage(self, pick: int, off: int) -> None:
        inside, key, tensor = self.one(pick)
        # At another distance from a block, so that it may be written without a copy, or not.
        memory = torch.empty(tensor.numel() + off, dtype=tensor.dtype)[off:].reshape(tensor.shape)
        inside[key] = memory.copy_(self.tensor(tuple(tensor.shape), tensor.dtype))

    @rule(pick=st.integers(0, 99), rows=st.integers(0, 9))
    def shape(self, pick: int, rows: int) -> None:
        inside, key, tensor = self.one(pick)
        inside[key] = self.tensor((rows, *tensor.shape[1:]) if tensor.dim() else (rows,), tensor.dtype)

    @rule(pick=st.integers(0, 99), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int32, torch.bool]))
    def dtype(self, pick: int, dtype: torch.dtype) -> None:
        inside, key, tensor = self.one(pick)
        inside[key] = self.tensor(tuple(tensor.shape), dtype)

    @rule(pick=st.integers(0, 99), how=st.sampled_from(["turned", "parameter", "conjugate"]))
    def kind(self, pick: int, how: str) -> None:
        inside, key, tensor = self.one(pick)
        fresh = self.tensor(tuple(tensor.shape), torch.float32)
        inside[key] = {
            "turned": lambda: fresh.t() if fresh.dim() == 2 else fresh,
            "parameter": lambda: torch.nn.Parameter(fresh),
            "conjugate": lambda: torch.complex(fresh, fresh + 1).conj(),
        }[how]()

    @rule(name=st.sampled_from("abcd"), nested=st.booleans())
    def add(self, name: str, nested: bool) -> None:
        self.state["model"][name] = (
            {"inner": self.tensor((4, 4), torch.float32)} if nested else self.tensor((16,), torch.float32)
        )

    @rule(name=st.sampled_from("abcd"))
    def drop(self, name: str) -> None:
        self.state["model"].pop(name, None)

    @rule(dotted=st.booleans())
    def same_names_from_elsewhere(self, dotted: bool) -> None:
        value = self.tensor((3, 3), torch.float32)
        self.state.pop("x.y", None)
        self.state.pop("x", None)
        self.state.update({"x.y": value} if dotted else {"x": {"y": value}})

    @rule(value=st.one_of(st.integers(), st.text(max_size=20), st.lists(st.integers(), max_size=3), st.none()))
    def thing(self, value: Any) -> None:
        self.state["step"] = value

    @rule(
        behind=st.booleans(),
        in_place=st.booleans(),
        checksums=st.booleans(),
        split=st.sampled_from([100_000, MIB, 1 << 28]),
        caching=st.booleans(),
    )
    def save(self, behind: bool, in_place: bool, checksums: bool, split: int, caching: bool) -> None:
        path = self.folder / ("same" if in_place else f"step_{len(self.saved)}")
        writer = DirectWriter(path, threads=2, checksums=checksums)
        made = DirectSavePlanner(split_above=split, enable_plan_caching=caching)
        if behind:
            expected = copied(self.state)
            future = dcp.async_save(self.state, storage_writer=writer, planner=made, async_stager=writer.stager())
            tensors = {id(inside[key]): inside[key].detach() for inside, key in self.places()}
            for tensor in tensors.values():
                tensor.zero_()
            future.result()
            for (inside, key), (other, _) in zip(self.places(), places_of(expected), strict=True):
                inside[key].detach().copy_(other[key])
        else:
            dcp.save(self.state, storage_writer=writer, planner=made)
        self.saved[path] = copied(self.state)
        assert_same(self.saved[path], loaded(path), path.name)
        read = metadata.read(path)
        assert pickle.loads((path / ".metadata").read_bytes()) == read
        assert {each.name for each in path.iterdir()} == {".metadata", *metadata.files_of(read)}

    @invariant()
    def nothing_of_the_state_is_kept(self) -> None:
        assert not any(
            isinstance(value, torch.Tensor)
            for plan in planner._local_plans
            for value in (*plan.shape.keys, *plan.names)
        )


def places_of(state: Any) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    for key, value in state.items() if isinstance(state, dict) else enumerate(state):
        if isinstance(value, (dict, list)):
            found += places_of(value)
        elif isinstance(value, torch.Tensor):
            found.append((state, key))
    return found


SuccessiveStates.TestCase.settings = settings(max_examples=40, stateful_step_count=14)
TestSuccessiveStates = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")(SuccessiveStates.TestCase)


PLAIN = {"place": "shard0", "shape": [70, 50], "dtype": "float32"}
CHANGES: dict[str, changing.Tensors] = {
    "values": {"a": PLAIN},
    "dtype": {"a": {**PLAIN, "dtype": "bfloat16"}},
    "shape": {"a": {**PLAIN, "shape": [7, 500]}},
    "name": {"b": PLAIN},
    "more": {"a": PLAIN, "b": {**PLAIN, "shape": [3, 9]}},
    "columns": {"a": {**PLAIN, "place": "shard1"}},
    "replicas": {"a": {**PLAIN, "place": "replicate"}},
    "plain": {"a": {**PLAIN, "place": "plain"}},
    "back": {"a": PLAIN},
}


@pytest.mark.parametrize(
    ("world", "how", "caching"),
    [(1, "sync", False), (2, "sync", False), (2, "async", False), (3, "sync", True), (4, "async", False)],
)
def test_ranks_whose_state_changes_between_saves(
    forks: Ask, compiled_read_loop: Path, tmp_path: Path, world: int, how: str, caching: bool
) -> None:
    rest = {"own": {"place": "own", "shape": [20], "dtype": "int64"}, "all": {**PLAIN, "place": "plain"}}
    steps = [{**tensors, **rest} for tensors in (*[CHANGES["values"]] * 3, *CHANGES.values())]
    order = {"path": str(tmp_path), "meet": str(tmp_path / "meet"), "steps": steps, "how": how, "caching": caching}
    order["code"] = str(compiled_read_loop)
    answers = forks(do="save_changing", world=world, **{"with": order})
    assert [answer["status"] for answer in answers] == [0] * world, answers
    assert {answer["value"] > 0 for answer in answers} == {how == "async"}, answers
    for step, tensors in enumerate(steps):
        path = tmp_path / f"step_{step}"
        assert_same(changing.expected(step, tensors, world), loaded(path), path.name)
    assert_same(changing.expected(len(steps) - 1, steps[-1], world), loaded(tmp_path / "same"), "same")


@settings(max_examples=8)
@given(
    changes=st.lists(st.sampled_from(sorted(CHANGES)), min_size=2, max_size=6),
    world=st.integers(1, 3),
    how=st.sampled_from(["sync", "async"]),
)
def test_ranks_whose_state_changes_in_any_order(forks: Ask, changes: list[str], world: int, how: str) -> None:
    steps = [CHANGES[change] for change in changes]
    with tempfile.TemporaryDirectory() as folder:
        order = {"path": folder, "meet": f"{folder}/meet", "steps": steps, "how": how}
        answers = forks(do="save_changing", world=world, **{"with": order})
        assert [answer["status"] for answer in answers] == [0] * world, answers
        for step, tensors in enumerate(steps):
            assert_same(changing.expected(step, tensors, world), loaded(Path(folder) / f"step_{step}"), f"{step}")


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors torch planned, each time that it planned."""
    counts: list[int] = []
    torchs = default_planner.create_default_local_save_plan

    def counting(state: Any, *rest: Any) -> Any:
        counts.append(len(state))
        return torchs(state, *rest)

    monkeypatch.setattr(default_planner, "create_default_local_save_plan", counting)
    return counts


def save(state: Any, path: Path, **settings: Any) -> Any:
    return dcp.save(state, storage_writer=DirectWriter(path), planner=DirectSavePlanner(**settings))


def test_a_state_of_the_same_shape_is_planned_once(tmp_path: Path, planned: list[int]) -> None:
    state = {"m": {"a": torch.ones(9, 9), "b": torch.ones(3)}, "step": 1}
    for step in range(3):
        state["step"] = step
        state["m"]["b"] = torch.full((3,), float(step))
        save(state, tmp_path / f"step_{step}")
        assert_same(state, loaded(tmp_path / f"step_{step}"), f"{step}")
    assert planned == [3]
    state["m"]["a"] = torch.ones(9, 9).double()
    save(state, tmp_path / "other")
    assert planned == [3, 3]
    state["m"]["a"] = torch.zeros(9, 9)
    save(state, tmp_path / "again")
    assert planned == [3, 3]
    assert_same(state, loaded(tmp_path / "again"), "again")


def test_a_tensor_of_another_class_is_planned_at_every_save(tmp_path: Path, planned: list[int]) -> None:
    class Named(torch.Tensor):
        pass

    state = {"a": torch.ones(4, 4).as_subclass(Named)}
    for _ in range(2):
        save(state, tmp_path)
    assert planned == [1, 1]


def test_a_planner_of_another_class_plans_for_itself(tmp_path: Path) -> None:
    class Doubling(DirectSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            value = super().resolve_data(write_item)
            return value * 2 if isinstance(value, torch.Tensor) else value

    state = {"a": torch.ones(4, 4)}
    for made, factor in ((DirectSavePlanner, 1), (Doubling, 2), (DirectSavePlanner, 1), (Doubling, 2)):
        dcp.save(state, storage_writer=DirectWriter(tmp_path), planner=made())
        assert torch.equal(loaded(tmp_path)["a"], state["a"] * factor)


def test_changed_metadata_reaches_no_later_save(tmp_path: Path) -> None:
    state = {"a": torch.ones(4, 4), "b": torch.zeros(2)}
    got = save(state, tmp_path / "1")
    got.state_dict_metadata.clear()
    got.storage_data.clear()
    save(state, tmp_path / "2")
    assert_same(state, loaded(tmp_path / "2"), "2")


def test_threads_that_save_other_names_of_the_same_sizes_at_once(tmp_path: Path) -> None:
    """Their layouts are the same, and their items are not."""
    states = [
        {"m": {f"{thread}.{number}": torch.full((40,), 1.0 * thread) for number in range(30)}} for thread in range(4)
    ]

    def saves(thread: int) -> None:
        for step in range(4):
            path = tmp_path / f"{thread}_{step}"
            dcp.save(states[thread], storage_writer=DirectWriter(path), planner=DirectSavePlanner(), no_dist=True)
            assert_same(states[thread], loaded(path), path.name)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(len(states)) as pool:
            list(pool.map(saves, range(len(states))))
    finally:
        sys.setswitchinterval(interval)


def interrupted(act: Ask, module: Any, other: Ask) -> Any:
    """What ``act`` returns if ``other`` runs before every line of the module that it reaches, as in another thread."""

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != module.__file__:
            return None
        if event in ("line", "return"):
            other()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return act()
    finally:
        sys.settrace(before)


def writes_of(name: str) -> Packed[WriteItem]:
    return Packed([WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)])


def test_the_locations_of_one_thread_are_never_those_of_another() -> None:
    layout = rank_layout.RankLayout(rank_layout.Asked(1, MIB, [9], []), [(0, Placed(0, 0, 9))])
    ours, others = writes_of("ours"), writes_of("others")
    stored = interrupted(lambda: layout.stored(ours), rank_layout, lambda: layout.stored(others))
    assert [index.fqn for index, *_ in stored] == ["ours"]
    assert [index.fqn for index, *_ in layout.stored(others)] == ["others"]


def test_parts_that_another_thread_forgets_are_there() -> None:
    sent = pickle.loads(pickle.dumps(writes_of("ours")))
    assert [item.index.fqn for item in interrupted(sent.parts, packed, sent.forget_parts)] == ["ours"]


def test_a_process_with_another_rank_plans_its_own_part() -> None:
    """The mesh of the new group is equal to that of the old one."""
    offsets = []
    for rank in (0, 1):
        dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
        mesh = init_device_mesh("cpu", (2,))
        state = {"m": {"a": DTensor.from_local(torch.ones(4), mesh, [Shard(0)], run_check=False)}}
        made = DirectSavePlanner()
        made.set_up_planner(state, is_coordinator=True)
        offsets += [tuple(item.index.offset) for item in made.create_local_plan().items]
        dist.destroy_process_group()
    assert offsets == [(0,), (4,)]


def test_the_plans_that_are_kept_take_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "_KEPT_ITEMS", 10)
    for count, kept in ((3, 1), (4, 2), (5, 2), (30, 1), (2, 1), (3, 2)):
        save({"m": {str(number): torch.ones(1) for number in range(count)}}, tmp_path)
        assert len(planner._global_plans) == kept, count


def test_layouts_of_equal_tensors_share_their_constant_bytes(tmp_path: Path) -> None:
    """They are most of what a kept layout of tiny tensors takes."""
    save({"m": {str(number): torch.ones(1 + number % 2) for number in range(40)}}, tmp_path)
    (layout,) = rank_layout._layouts
    assert len(layout.constants) == 4


def test_no_metadata_is_unpickled_to_save_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither to write it nor to remove what is of other saves, the failed ones too."""
    state = {"a": torch.ones(300, 300), "step": 1}
    save(state, tmp_path)
    first = metadata.files_of(metadata.read(tmp_path))
    broken = Saving.open(tmp_path)
    left = tmp_path / broken.data_name(0, 0)
    left.touch()
    held = (tmp_path / saver_lock.NAME).read_text()
    del broken
    (tmp_path / saver_lock.NAME).write_text(held)
    with monkeypatch.context() as patched:
        patched.setattr(metadata, "loads", lambda *_: pytest.fail("metadata is unpickled"))
        opened = Saving.open(tmp_path)
        assert not left.exists()
        assert all((tmp_path / name).exists() for name in first)
        opened.abandon()
        state["step"] = 2
        save(state, tmp_path)
    assert {each.name for each in tmp_path.iterdir()} == {".metadata", *metadata.files_of(metadata.read(tmp_path))}
    assert_same(state, loaded(tmp_path), "")


def collections_of_a_first_save(count: int, directory: Path) -> int:
    """How often Python's garbage collector runs during it."""
    state = {"model": {f"layers.{number}.weight": torch.zeros(4) for number in range(count)}}
    runs: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            runs.append(info["generation"])

    forget()
    gc.collect()
    gc.callbacks.append(note)
    try:
        save(state, directory)
    finally:
        gc.callbacks.remove(note)
    return len(runs)


def test_the_collector_is_off_for_tensors_of_a_first_save(tmp_path: Path) -> None:
    """It would look at the new plans again and again, and once at everything in the process, while the loop waits."""
    collections_of_a_first_save(2, tmp_path / "warm")
    few, many = (collections_of_a_first_save(count, tmp_path / str(count)) for count in (2, 4000))
    assert many <= few + 10, "about 70 where planning by torch and the list of results have collections"
    assert gc.isenabled()


@pytest.mark.usefixtures("one_rank")
def test_a_place_in_the_mesh_may_be_a_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As earlier releases of torch return it."""
    mesh = init_device_mesh("cpu", (1,))
    coordinate = type(mesh).get_coordinate
    monkeypatch.setattr(type(mesh), "get_coordinate", lambda self: list(coordinate(self) or ()))
    state = {
        name: DTensor.from_local(torch.full((4,), value), mesh, [Shard(0)]) for name, value in (("a", 1.0), ("b", 2.0))
    }
    for _ in range(2):
        dcp.save(state, storage_writer=DirectWriter(tmp_path / "step"), planner=DirectSavePlanner())
    assert metadata.read(tmp_path / "step").state_dict_metadata.keys() == {"a", "b"}
