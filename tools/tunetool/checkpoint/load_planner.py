"""``DirectLoadPlanner``: torch's load planner, which plans tensors that were saved whole without comparing chunks."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list, create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from tunetool.checkpoint.collections_off import without_collections
from tunetool.checkpoint.state_shape import PLAIN

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

_TABLES = frozenset({dict, collections.OrderedDict})
_SCALARS = frozenset({int, float, str, bool, type(None)})
KeyPath = tuple[str, ...]
Chunks = dict[Any, list[ChunkStorageMetadata]]
"""Of DTensors whose local tensors are plain, by shape, mesh and placements."""


class DirectLoadPlanner(DefaultLoadPlanner):
    """torch's planner with the same arguments and the same plan, made in less time.

    >>> dcp.load(state, storage_reader=DirectReader("/scratch/step-100"), planner=DirectLoadPlanner())

    A tensor that was saved whole and is loaded whole gets its item at once; which part of a DTensor this rank holds is
    found out once for all of a shape. Torch plans everything else, and the whole state where it lacks names that the
    checkpoint has, since older versions of torch named some in another way. Any reader takes the plan.
    """

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """As torch's planner."""
        if self.flatten_state_dict and self.flatten_sharded_tensors and type(state_dict) in _TABLES:
            with without_collections():
                leaves = [] if _merges(state_dict) else list(_leaves((), state_dict))
                flat = {".".join(path): value for path, value in leaves}
                # Two values of one name, or something that torch changes, flattens or refuses.
                if leaves and len(flat) == len(leaves) and all(map(_is_leaf, flat.values())):
                    self.original_state_dict, self.state_dict = state_dict, flat
                    self.mappings = {".".join(path): path for path, _ in leaves}
                    self.metadata, self.is_coordinator = metadata, is_coordinator
                    return
        super().set_up_planner(state_dict, metadata, is_coordinator)

    def create_local_plan(self) -> LoadPlan:
        """As torch's planner."""
        metadata = self.metadata
        if metadata is None or (
            self.flatten_state_dict and metadata.state_dict_metadata.keys() - self.state_dict.keys()
        ):
            return super().create_local_plan()
        items: list[ReadItem] = []
        chunks: Chunks = {}
        with without_collections():
            for name, value in self.state_dict.items():
                described = metadata.state_dict_metadata.get(name)
                item = _item(name, value, described)
                if item is not None:
                    items.append(item)
                elif type(value) is DTensor and type(described) is TensorStorageMetadata and _fits(value, described):
                    items += create_read_items_for_chunk_list(name, described, chunks_of(value, chunks))
                else:
                    plan = create_default_local_load_plan({name: value}, metadata, not self.allow_partial_load)
                    items += plan.items
        return LoadPlan(items)


def _fits(value: DTensor, described: TensorStorageMetadata) -> bool:
    return _is_plain(value) and value.device_mesh.get_coordinate() is not None and value.shape == described.size


def _is_plain(value: Any) -> bool:
    """Whether a DTensor's placements say what this rank holds. Another local tensor may have chunks of its own."""
    return type(value) is DTensor and type(value._local_tensor) in PLAIN


def chunks_of(value: Any, known: Chunks) -> list[ChunkStorageMetadata]:
    """What this rank holds of a value. ``known``: the same of DTensors, of which torch makes it in 40 us each time."""
    if not _is_plain(value):
        return list(_create_chunk_list(value))
    key = value.shape, value.device_mesh, value.placements
    if key not in known:
        known[key] = _create_chunk_list(value)
    return known[key]


def _merges(table: Any) -> bool:
    """Whether two keys have the same text, so that torch makes one table of what is below them."""
    if len(set(map(str, table))) != len(table):
        return True
    return any(type(value) in _TABLES and _merges(value) for value in table.values())


def _leaves(path: KeyPath, table: Any) -> Iterator[tuple[KeyPath, Any]]:
    """Every value of the tables with its path, in the order in which torch flattens them."""
    for key, value in table.items():
        below = (*path, str(key))
        if type(value) in _TABLES:
            yield from _leaves(below, value)
        else:
            yield below, value


def _is_leaf(value: Any) -> bool:
    kind = type(value)
    return kind in _SCALARS or ((kind in PLAIN or kind is DTensor) and not value.is_meta)


def _item(name: str, value: Any, described: Any) -> ReadItem | None:
    """The only item of a tensor that was saved whole; None if torch has to plan it."""
    if type(value) not in PLAIN or type(described) is not TensorStorageMetadata or len(described.chunks) != 1:
        return None
    (chunk,), size = described.chunks, value.shape
    # Of an empty tensor nothing is read.
    if not size == described.size == chunk.sizes or any(chunk.offsets) or 0 in size:
        return None
    # torch makes two indexes and three offsets, which are equal, and of which none changes.
    item, where, at = object.__new__(ReadItem), object.__new__(MetadataIndex), chunk.offsets
    where.__dict__.update(fqn=name, index=0, offset=at)
    item.__dict__.update(
        type=LoadItemType.TENSOR,
        dest_index=where,
        dest_offsets=at,
        storage_index=where,
        storage_offsets=at,
        lengths=size,
    )
    return item
