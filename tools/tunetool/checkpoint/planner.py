"""``DirectSavePlanner``: torch's save planner, which distributes replicated tensors, cuts large ones, and plans anew
only what has changed since an earlier save."""

from __future__ import annotations

import dataclasses
import io
import itertools
import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.tensor import DTensor

from tunetool.checkpoint import column_plan, global_plan, loadable
from tunetool.checkpoint.collections_off import without_collections
from tunetool.checkpoint.columns import PackedTable
from tunetool.checkpoint.global_plan import GroupedPlan, share_out
from tunetool.checkpoint.holders import TOGETHER, Groups
from tunetool.checkpoint.metadata_pickle import Described
from tunetool.checkpoint.packed import PackedItems
from tunetool.checkpoint.state_shape import PLAIN, StateShape, leaves_of, values_of
from tunetool.checkpoint.tensor_table import TensorTable

SPLIT_ABOVE = 256 << 20
"""Bytes. Small enough to distribute 8 GB evenly over 16 files, large enough for readers to see few chunks."""
_KEPT = 4
"""Number of plans that are kept: a job may save a model and an optimizer in turns."""
_KEPT_ITEMS = 1 << 20
"""Items of all global plans that are kept, about 1 KB each. The newest plan is kept whatever its size."""

T = TypeVar("T")
Cut = tuple[tuple[int, int, int], ...] | None
"""How an item's data are cut from the tensor of its name: dimension, start and length of each narrowing. None: only
torch's planner knows."""


@dataclass
class _Cuts:
    """The name of each item, and by item the cuts of those that are not all of their tensor."""

    names: list[str]
    others: dict[int, Cut]


@dataclass
class _LocalPlan:
    """A rank's plan for states of this shape. Holds no tensor."""

    shape: StateShape
    coordinates: bool
    names: list[str]
    mappings: dict[str, Any]
    sent_mappings: PackedTable
    items: PackedItems
    finished: list[tuple[PackedItems, _Cuts]] = field(default_factory=list)
    """What the coordinator made of it, the newest first."""


@dataclass
class _GlobalPlan:
    """What the coordinator has made of the ranks' plans."""

    split_above: int
    asked: list[tuple[PackedItems, Any]]
    """By rank: its items, and where in the state each name comes from."""
    answered: list[PackedItems]
    metadata: Metadata
    size: int
    """Number of items."""
    groups: list[Groups | None]
    """By rank: who holds what it writes."""
    described: list[Described] = field(default_factory=list)
    """The metadata's tables as bytes, once they were written."""

    def answers(self, plans: Sequence[SavePlan]) -> bool:
        """Whether the ranks ask for the same again."""
        return len(plans) == len(self.asked) and all(
            items.same_as(plan.items) and (mappings is plan.planner_data or mappings == plan.planner_data)
            for (items, mappings), plan in zip(self.asked, plans, strict=True)
        )


# Lists are only replaced as a whole, so threads that save at the same time need no lock.
_local_plans: tuple[_LocalPlan, ...] = ()
_global_plans: tuple[_GlobalPlan, ...] = ()


def forget_plans() -> None:
    """Forget the plans of earlier saves, and the memory that they take."""
    global _local_plans, _global_plans  # noqa: PLW0603  (one memory for each process)
    _local_plans = _global_plans = ()


def _with(plans: tuple[T, ...], plan: T) -> tuple[T, ...]:
    return (plan, *(each for each in plans if each is not plan))[:_KEPT]


def _within_memory(plans: tuple[_GlobalPlan, ...]) -> tuple[_GlobalPlan, ...]:
    sizes = itertools.accumulate(plan.size for plan in plans)
    return plans[: max(1, sum(size <= _KEPT_ITEMS for size in sizes))]


def kept_bytes(metadata: Metadata) -> list[Described] | None:
    """Where the bytes of the metadata's tables are kept, which saves with the same plan share. None for tables that no
    ``DirectSavePlanner`` made, or whose plan is not kept."""
    tables = metadata.state_dict_metadata
    for plan in _global_plans:
        known = plan.metadata.state_dict_metadata
        if isinstance(known, TensorTable) or isinstance(tables, TensorTable):
            if (
                isinstance(tables, TensorTable)
                and tables.is_of(known)
                and plan.metadata.planner_data is metadata.planner_data
            ):
                return plan.described
            continue
        if (
            plan.metadata.planner_data is metadata.planner_data
            and len(known) == len(tables)
            and all(map(operator.is_, known.values(), tables.values()))
            and list(known) == list(tables)
        ):
            return plan.described
    return None


class DirectSavePlanner(DefaultSavePlanner):
    """torch's planner with three additions: tensors that several ranks hold are distributed among them by bytes; a
    tensor (or shard) of more than ``split_above`` bytes is saved as several chunks along dimension 0, which different
    ranks and files can take; and the process keeps its plans. A state with the same keys, shapes, dtypes, placements
    and devices as in an earlier save gets the plan of that save, and everything else is planned anew. Values are never
    kept.

    The metadata has torch's format: a cut tensor looks like a sharded one, so DefaultLoadPlanner with any reader loads
    it into any layout. The plan depends only on the ranks' plans. ``ValueError`` unless ``split_above`` is positive.

    ``enable_plan_caching``: as in torch's planner, ranks whose part of the state has kept its shape since the last save
    send no plan. ``TypeError`` if torch is too old for it.
    """

    global_plan: list[SavePlan]

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        *,
        split_above: int = SPLIT_ABOVE,
        enable_plan_caching: bool = False,
    ) -> None:
        caching = {"enable_plan_caching": True} if enable_plan_caching else {}
        super().__init__(flatten_state_dict, flatten_sharded_tensors, **caching)
        # torch caches plans in the class under this key: a planner with another `split_above` must not use them.
        self._cached_plans_key = f"{type(self).__name__}-{split_above}"
        if split_above < 1:
            raise ValueError(f"split_above must be a positive number of bytes, not {split_above}")
        self.split_above = split_above
        self._torch_caches = enable_plan_caching
        # A planner of another class may plan differently, and torch's caching has lists of its own.
        self._keeps = type(self) is DirectSavePlanner and not enable_plan_caching
        self._keeps_local = self._keeps and flatten_state_dict and flatten_sharded_tensors
        self._local: _LocalPlan | None = None
        self._shape: StateShape | None = None
        self._planned: Sequence[WriteItem] = ()
        self._whole: dict[str, list[WriteItem]] = {}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self._local = self._shape = None
        values: list[Any] = []
        if self._keeps_local:
            with without_collections():
                keys, values = values_of(state_dict)
                leaves = leaves_of(values)
            self._shape = None if leaves is None else StateShape(keys, leaves)
        if self._shape is not None and self._use_plan_of_earlier_save(values, is_coordinator):
            return
        with without_collections():
            super().set_up_planner(state_dict=state_dict, storage_meta=storage_meta, is_coordinator=is_coordinator)
        if [*map(id, self.state_dict.values())] != [*map(id, values)]:
            # This torch flattens in another way than `values_of`.
            self._shape = None

    def _use_plan_of_earlier_save(self, values: list[Any], is_coordinator: bool) -> bool:
        global _local_plans  # noqa: PLW0603  (one memory for each process)
        for known in _local_plans:
            if known.coordinates == is_coordinator and known.shape == self._shape:
                _local_plans = _with(_local_plans, known)
                self._local, self.mappings, self.is_coordinator = known, known.mappings, is_coordinator
                self.state_dict = dict(zip(known.names, values, strict=True))
                return True
        return False

    def create_local_plan(self) -> SavePlan:
        global _local_plans  # noqa: PLW0603  (one memory for each process)
        self._whole = {}
        if self._local is not None:
            self._planned = self._local.items
            self.plan = SavePlan(self._local.items, planner_data=self._local.sent_mappings)
            return self.plan
        loadable.refuse_state(self.state_dict)
        with without_collections():
            plan = self._planned_by_torch() if self._shape is None else self._planned_by_kinds(self._shape.leaves)
        # Not the items of `plan`, which is empty if torch has cached an equal plan.
        self._planned = self.plan.items
        if self._shape is not None:
            items, sent, names = PackedItems(plan.items), PackedTable(self.mappings), list(self.state_dict)
            self._local = _LocalPlan(self._shape, self.is_coordinator, names, self.mappings, sent, items)
            _local_plans = _with(_local_plans, self._local)
            plan = self.plan = dataclasses.replace(plan, items=items, planner_data=sent)
        return plan

    def _planned_by_kinds(self, leaves: Sequence[Any]) -> SavePlan:
        """As torch plans, which is asked for one tensor of each kind."""
        state = self.state_dict
        firsts: dict[Any, str] = {}
        alike = {
            name: firsts.setdefault(leaf, name)
            for (name, value), leaf in zip(state.items(), leaves, strict=True)
            if isinstance(value, torch.Tensor)
        }
        try:
            self.state_dict = {name: value for name, value in state.items() if alike.get(name, name) == name}
            plan = super().create_local_plan()
        finally:
            self.state_dict = state
        by_name: dict[str, list[WriteItem]] = {}
        for item in plan.items:
            by_name.setdefault(item.index.fqn, []).append(item)
        items: list[WriteItem] = []
        for name in state:
            first = alike.get(name, name)
            its = by_name.get(first, [])
            items += its if first == name else [global_plan.renamed(item, fqn=name) for item in its]
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def _planned_by_torch(self) -> SavePlan:
        before = SavePlanner._cached_save_plan.get(self._cached_plans_key) if self._torch_caches else None
        plan = super().create_local_plan()
        if before is not None and plan is not self.plan and _differ(before, self.plan):
            # torch compares neither dtypes nor where a name comes from: the metadata would be that of the old state.
            SavePlanner._cached_save_plan.pop(self._cached_plans_key, None)
            plan = super().create_local_plan()
        return plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        if self._torch_caches:
            before = SavePlanner._cached_global_plan.get(self._cached_plans_key, ())
            # It calls `_create_global_plan` with all plans if one has changed.
            plans, metadata = super().create_global_plan(all_plans)
            # torch compares items alone: a rank would go on with who held these in an earlier save.
            for rank, (known, now) in enumerate(zip(before, self.global_plan, strict=False)):
                if getattr(known, "groups", None) != getattr(now, "groups", None):
                    plans[rank] = now
            return plans, metadata
        self.global_plan, self.metadata = self._create_global_plan(all_plans)
        return self.global_plan, self.metadata

    def _create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        global _global_plans  # noqa: PLW0603  (one memory for each process)
        keeps = self._keeps and all(isinstance(plan.items, PackedItems) for plan in all_plans)
        known = None
        if keeps:
            known = next(
                (each for each in _global_plans if each.split_above == self.split_above and each.answers(all_plans)),
                None,
            )
        if known is None:
            with without_collections():
                plans, metadata = self._planned_together(all_plans)
                setattr(metadata, TOGETHER, global_plan.held_together(plans))
                if self.flatten_state_dict:
                    metadata.planner_data = global_plan.merged(plan.planner_data for plan in plans)
            if not keeps:
                return plans, metadata
            asked = [(plan.items, plan.planner_data) for plan in all_plans]
            answered = [
                plan.items if isinstance(plan.items, PackedItems) else PackedItems(plan.items) for plan in plans
            ]
            size = sum(map(len, answered))
            groups = [plan.groups if isinstance(plan, GroupedPlan) else None for plan in plans]
            known = _GlobalPlan(self.split_above, asked, answered, metadata, size, groups)
        for items in (*(items for items, _ in known.asked), *known.answered):
            items.forget_parts()
        _global_plans = _within_memory(_with(_global_plans, known))
        # Tables of its own, so that a caller who changes them changes no other save.
        tables = known.metadata.state_dict_metadata
        tables = tables.fresh() if isinstance(tables, TensorTable) else dict(tables)
        answers = zip(all_plans, known.answered, known.groups, strict=True)
        metadata = dataclasses.replace(known.metadata, state_dict_metadata=tables)
        setattr(metadata, TOGETHER, getattr(known.metadata, TOGETHER))
        return [global_plan.with_groups(*answer) for answer in answers], metadata

    def _planned_together(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        planned = None
        if len(all_plans) > 1:
            asked = [plan.items.columns() if isinstance(plan.items, PackedItems) else None for plan in all_plans]
            columns = [each for each in asked if each is not None]
            planned = column_plan.plan(columns, self.split_above) if len(columns) == len(asked) else None
        if planned is not None:
            answers, tables, groups = planned
            shares = [
                global_plan.with_groups(plan, PackedItems(None, None, answer), held)
                for plan, answer, held in zip(all_plans, answers, groups, strict=True)
            ]
            return shares, Metadata(tables)
        plans, metadata = global_plan.describe(share_out(all_plans, self.split_above))
        global_plan.check(plans, metadata)
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan: SavePlan = super().finish_plan(new_plan)
        if self._local is not None and isinstance(plan.items, PackedItems):
            for items, _ in self._local.finished:
                if items.same_as(plan.items):
                    plan = self.plan = dataclasses.replace(plan, items=items)
                    break
        return plan

    def data_of(self, items: Sequence[WriteItem]) -> Iterable[torch.Tensor | io.BytesIO]:
        """``resolve_data`` of every item. Raises ``CannotJudge`` for a layout that no reader loads."""
        if type(self) is not DirectSavePlanner:
            loadable.refuse_items(items)
            return map(self.resolve_data, items)  # each is used before the next is asked for
        cuts = self._cuts(items)
        values = map(self.state_dict.__getitem__, cuts.names)
        data: list[Any] = [value._local_tensor if type(value) is DTensor else value for value in values]
        for number, cut in cuts.others.items():
            if cut is None:
                data[number] = self.resolve_data(items[number])
                continue
            for dimension, start, length in cut:
                data[number] = data[number].detach().narrow(dimension, start, length)
        return data

    def _cuts(self, items: Sequence[WriteItem]) -> _Cuts:
        local = self._local
        for known, cuts in local.finished if local else ():
            if known is items:
                return cuts
        loadable.refuse_items(items)
        planned = {each.index.fqn: each.tensor_data for each in self._planned}
        names = [item.index.fqn for item in items]
        others = {}
        for number, (name, item) in enumerate(zip(names, items, strict=True)):
            value: Any = self.state_dict.get(name)
            plain = type(value._local_tensor if type(value) is DTensor else value) in PLAIN
            # torch plans such a tensor as one item; most of them stay as they are.
            if plain and item.tensor_data is not None and planned[name] is item.tensor_data:
                continue
            cut = self._cut(item) if plain and item.tensor_data is not None else None
            if cut != ():
                others[number] = cut
        made = _Cuts(names, others)
        if local is not None and isinstance(items, PackedItems):
            local.finished = [(items, made), *local.finished][:_KEPT]
        return made

    def _cut(self, item: WriteItem) -> Cut:
        data, whole = item.tensor_data, self._around(item).tensor_data.chunk
        return tuple(
            (dimension, start - whole.offsets[dimension], size)
            for dimension, (start, size) in enumerate(zip(data.chunk.offsets, data.chunk.sizes, strict=True))
            if size != whole.sizes[dimension]
        )

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        data = write_item.tensor_data
        if data is None:
            return super().resolve_data(write_item)
        whole = self._around(write_item)
        tensor = self.lookup_object(whole.index).detach()
        for dimension, start in enumerate(data.chunk.offsets):
            first, length = start - whole.tensor_data.chunk.offsets[dimension], data.chunk.sizes[dimension]
            # Some tensors, such as those with a scale for each row, can only be taken whole.
            if length != whole.tensor_data.chunk.sizes[dimension]:
                tensor = tensor.narrow(dimension, first, length)
        return self.transform_object(write_item, tensor)

    def _around(self, item: WriteItem) -> WriteItem:
        """The item of this rank's plan of which ``item`` is all or a part."""
        if not self._whole:
            self._whole = defaultdict(list)
            for planned in self._planned:
                self._whole[planned.index.fqn].append(planned)
        return next(whole for whole in self._whole[item.index.fqn] if _inside(item.tensor_data.chunk, whole))


def _differ(before: SavePlan, now: SavePlan) -> bool:
    """Whether plans that torch takes for equal have other dtypes, or take names from elsewhere in the state."""
    return before.planner_data != now.planner_data or any(
        one.tensor_data is not None and one.tensor_data.properties != other.tensor_data.properties
        for one, other in zip(before.items, now.items, strict=True)
    )


def _inside(chunk: ChunkStorageMetadata, whole: WriteItem) -> bool:
    around = whole.tensor_data.chunk
    return all(
        begin <= start and start + size <= begin + length
        for start, size, begin, length in zip(chunk.offsets, chunk.sizes, around.offsets, around.sizes, strict=True)
    )
