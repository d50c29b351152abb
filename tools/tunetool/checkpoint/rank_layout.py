"""What a rank writes in one save: each item of its plan with its data, and the layout of the files for a set of items.

A layout is kept from save to save: it holds offsets and the bytes around the tensors, and numbers instead of data, so
each save brings its own.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from tunetool.checkpoint import loadable, sums_table
from tunetool.checkpoint.checksums import Sums, digest_of, first_sums, key_of
from tunetool.checkpoint.collections_off import without_collections
from tunetool.checkpoint.columns import Numbers
from tunetool.checkpoint.filling import HOST, LATE, ODD, Contents
from tunetool.checkpoint.host_buffers import Source, dispatch_keys, is_flat, is_plain
from tunetool.checkpoint.items import Archive, Placed, archive, place, round_up
from tunetool.checkpoint.layout import ZEROS, Block, Runs, Tiles, cut, share_out
from tunetool.checkpoint.packed import Packed, PackedItems, PackedStored, Stored
from tunetool.checkpoint.planner import DirectSavePlanner
from tunetool.checkpoint.raw_bytes import BLOCK
from tunetool.checkpoint.state_shape import PLAIN

FILE_BYTES = 32 << 20
"""Bytes. A small state is written to fewer files, each of at least this size, since each file costs an fsync."""


class _Row(NamedTuple):
    """Of an item; see ``Items``."""

    content: Archive | bytes
    length: int
    where: int = ODD
    address: int = 0
    held: torch.UntypedStorage | Source | None = None


class Items:
    """What a rank writes: of each of ``writes`` a tensor's archive, or the bytes of an object, and its length in the
    file. ``where``, ``addresses``: of the raw bytes; see ``filling.Contents``. ``held``: the memory of a tensor,
    whatever becomes of the caller's tensor meanwhile, or a source where it has no address."""

    def __init__(self, writes: Sequence[WriteItem], data: Iterable[torch.Tensor | io.BytesIO]) -> None:
        """Raises ``CannotJudge`` for a tensor that cannot be saved."""
        gpus: dict[torch.device, int] = {}
        rows: list[tuple[Any, ...]] = []
        for number, each in enumerate(data):
            try:
                row = _by_address(each, gpus) if type(each) in PLAIN else None
                rows.append(row or _in_any_way(each, gpus))
            except Exception as error:  # what a tensor's own class raises
                raise loadable.refused(writes[number].index.fqn, type(each).__name__, str(error)) from error
        self.writes, self.gpus = writes, list(gpus)
        columns: list[list[Any]] = [*map(list, zip(*rows, strict=True))] or [[] for _ in _Row._fields]
        self.contents: list[Archive | bytes] = columns[0]
        self.lengths: list[int] = columns[1]
        self.where: list[int] = columns[2]
        self.addresses: list[int] = columns[3]
        self.held: list[torch.UntypedStorage | Source | None] = columns[4]

    def source(self, number: int) -> bytes | Source:
        """See ``filling.Contents``."""
        content, held = self.contents[number], self.held[number]
        if isinstance(content, bytes):
            return content
        if isinstance(held, torch.UntypedStorage):
            raw = torch.empty(0, dtype=torch.uint8, device=held.device)
            raw.set_(held, self.addresses[number] - held.data_ptr(), (content.data_bytes,), (1,))
            return Source(raw)
        assert held is not None  # noqa: S101  (every tensor has one)
        return held

    def sums(self) -> Sums:
        """The checksums of the items that have none beside their data."""
        return {
            key_of(self.writes[number].index): digest_of(content)
            for number, content in enumerate(self.contents)
            if isinstance(content, bytes)
        }


def items_of(writes: Sequence[WriteItem], planner: SavePlanner) -> Items:
    """The items with their data from the planner. Raises ``CannotJudge`` for a tensor that cannot be saved."""
    if isinstance(planner, DirectSavePlanner):
        return Items(writes, planner.data_of(writes))
    loadable.refuse_items(writes)
    # One after the other: a planner may use one buffer for all its objects.
    return Items(writes, map(planner.resolve_data, writes))


class _Kind(NamedTuple):
    """What contiguous tensors with the same dispatch keys, dtype and shape have in common."""

    archive: Archive
    length: int
    bytes: int
    on_gpu: bool


_kinds: dict[Any, _Kind | None] = {}
_KEPT_KINDS = 4096
"""A model has few different shapes."""


def _kind_of(tensor: torch.Tensor) -> _Kind | None:
    """None if its bytes have no address. Raises ``ValueError`` as ``is_plain``."""
    if not is_plain(tensor) or not is_flat(tensor) or not (tensor.is_cpu or tensor.is_cuda):
        return None
    size = tensor.numel() * tensor.element_size()
    its = archive(loadable.name_of(tensor.dtype), tensor.shape, size)
    return _Kind(its, its.length, size, tensor.is_cuda)


def _by_address(tensor: torch.Tensor, gpus: dict[torch.device, int]) -> tuple[Any, ...] | None:
    """The row of a tensor by its address; None if that is not all, or if its memory does not hold it. Made for tens of
    thousands: a ``_Row`` takes longer. ``gpus``: the number of each."""
    if dispatch_keys is None:
        return None
    try:
        if not tensor.is_contiguous():
            return None
        key = dispatch_keys(tensor).raw_repr(), tensor.dtype, tensor.shape
    except RuntimeError:
        # A nested tensor has no shape.
        return None
    try:
        kind = _kinds[key]
    except KeyError:
        if len(_kinds) >= _KEPT_KINDS:
            _kinds.clear()
        kind = _kinds[key] = _kind_of(tensor)
    if kind is None:
        return None
    its, length, count, on_gpu = kind
    # Holds the memory, whatever becomes of the caller's tensor meanwhile.
    storage = tensor.untyped_storage()
    address = 0
    if count:
        address, begin = tensor.data_ptr(), storage.data_ptr()
        if not 0 < begin <= address <= begin + storage.nbytes() - count:
            return None
    return its, length, gpus.setdefault(tensor.device, len(gpus) + 1) if on_gpu else HOST, address, storage


def _in_any_way(data: torch.Tensor | io.BytesIO, gpus: dict[torch.device, int]) -> _Row:
    """The row of anything."""
    if isinstance(data, io.BytesIO):
        return _Row(data.getvalue(), data.getbuffer().nbytes)
    # An alias with a hold of its own on the memory.
    tensor = data.detach()
    if not is_plain(tensor):
        saved = loadable.as_torch_saves(tensor)
        return _Row(saved, len(saved))
    its = archive(loadable.name_of(tensor.dtype), tensor.shape, tensor.numel() * tensor.element_size())
    where = gpus.setdefault(tensor.device, len(gpus) + 1) if tensor.is_cuda else HOST
    if not is_flat(tensor) or not (tensor.is_cpu or tensor.is_cuda):
        return _Row(its, its.length, held=Source(tensor))
    return _Row(its, its.length, where, tensor.data_ptr(), tensor.untyped_storage())


_KEPT = 4
"""Number of layouts that are kept: a job may save a model and an optimizer in turns."""


@dataclass
class Asked:
    """All that a layout depends on: at most ``files`` files of each group, blocks of at most ``limit`` bytes, for each
    item its archive or the length of an object, and the items whose memory is written without a copy. ``checksums``:
    whether files end with a table of them; ``groups``: that of each item, where there are several."""

    files: int
    limit: int
    items: list[Archive | int]
    zero_copy: list[int]
    checksums: bool = False
    groups: list[int] = field(default_factory=list)


@dataclass
class FileTable:
    """What the table of checksums of a file is about: the numbers of its tensors, in their order, where their raw bytes
    are, how many, the number of the first sum of each, and where the table is. An empty range: there is none."""

    items: Numbers
    places: Numbers
    lengths: Numbers
    firsts: list[int]
    where: tuple[int, int]
    _rows: tuple[Sequence[WriteItem], bytes] | None = None

    def rows(self, writes: Sequence[WriteItem]) -> bytes:
        """The first part of the table; made once for the same ``writes``."""
        known = self._rows
        if known is not None and known[0] is writes:
            return known[1]
        indexes = [writes[item].index for item in self.items.tolist()]
        keys = [sums_table.key_of(index.fqn, index.offset) for index in indexes]
        rows = sums_table.rows(self.places, self.lengths, keys)
        if isinstance(writes, Packed):
            self._rows = writes, rows
        return rows


@dataclass
class RankLayout:
    """``locations``: by item, the number of the file and the position in it. ``runs``: what the blocks hold: items by
    their numbers, tables of files by those after them, and ``constants`` by negative numbers, the last one first.
    ``tables``: of each file."""

    asked: Asked
    locations: list[tuple[int, Placed]]
    sizes: list[int] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    runs: Runs = field(default_factory=lambda: cut(Tiles(*np.zeros((2, 0), np.int64)), (), BLOCK)[1])
    constants: list[bytes] = field(default_factory=list)
    tables: list[FileTable] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    """That of each file."""
    _stored: tuple[Sequence[WriteItem], Packed[Stored]] | None = None
    seen: object = None
    """What saves brought; see ``ahead``."""
    _own: list[int] | None = None
    """Addresses of the constants."""

    @property
    def buffers(self) -> int:
        """Number of host buffers that hold everything which is not written without a copy."""
        return sum(not block.zero_copy for block in self.blocks)

    def contents(self, items: Items) -> Contents:
        """What these items bring, by the numbers in the layout."""
        tables, constants = len(self.tables), self.constants
        where = [*items.where, *[LATE] * tables, *[HOST] * (len(constants) + 1)]
        if self._own is None:
            self._own = [np.frombuffer(constant, np.uint8).ctypes.data for constant in reversed(constants)]
        addresses = np.array([*items.addresses, *[0] * tables, *self._own, 0], np.int64)
        return Contents(np.array(where, np.int8), addresses, items.gpus, items.source)

    def stored(self, writes: Sequence[WriteItem]) -> Packed[Stored]:
        """Where each item is; the same object for the same ``writes``."""
        # Read once: another thread may save other items of the same sizes, and put these here.
        known = self._stored
        if known is not None and known[0] is writes:
            return known[1]
        stored: Packed[Stored]
        with without_collections():
            if isinstance(writes, PackedItems):
                files, placed = zip(*self.locations, strict=True) if self.locations else ((), ())
                stored = PackedStored.of(writes, files, [at.offset for at in placed], [at.length for at in placed])
            else:
                located = zip(writes, self.locations, strict=True)
                stored = Packed((write.index, file, at.offset, at.length) for write, (file, at) in located)
        if isinstance(writes, Packed):
            self._stored = writes, stored
        return stored


# Only replaced as a whole, so threads that save at the same time need no lock.
_layouts: tuple[RankLayout, ...] = ()


def kept() -> tuple[RankLayout, ...]:
    """The layouts of the last saves, the last one first."""
    return _layouts


def forget_layouts() -> None:
    """Forget the layouts of earlier saves, and the memory that they take."""
    global _layouts  # noqa: PLW0603  (one memory for each process)
    _layouts = ()


def layout_for(asked: Asked, lengths: Sequence[int]) -> RankLayout:
    """The layout of items of these lengths, from an earlier save that asked for the same."""
    global _layouts  # noqa: PLW0603  (one memory for each process)
    layout = next((known for known in _layouts if known.asked == asked), None) or _lay_out(asked, lengths)
    _layouts = (layout, *(each for each in _layouts if each is not layout))[:_KEPT]
    return layout


def _lay_out(asked: Asked, lengths: Sequence[int]) -> RankLayout:
    layout = RankLayout(asked, [(0, Placed(0, 0, 0))] * len(asked.items))
    around = _Around(layout.constants)
    tiles: list[Numbers] = []
    shares = _shares(asked, lengths)
    layout.groups = [group for group, _ in shares]
    for file, (_, share) in enumerate(shares):
        contents = [asked.items[number] for number in share]
        placed, size = place(contents)
        for number, at in zip(share, placed, strict=True):
            layout.locations[number] = file, at
        end = _add_table(layout, share, contents, placed, size)
        tiles.append(_tiles(share, contents, placed, around, (size, end, len(asked.items) + file)))
        layout.sizes.append(end)
    columns = np.concatenate(tiles) if tiles else np.zeros((0, 2), np.int64)
    layout.blocks, layout.runs = cut(Tiles(columns[:, 0], columns[:, 1]), layout.sizes, asked.limit, asked.zero_copy)
    return layout


def _shares(asked: Asked, lengths: Sequence[int]) -> list[tuple[int, list[int]]]:
    """The group and the items of each file."""
    by_group: dict[int, list[int]] = {}
    for number, group in enumerate(asked.groups or [0] * len(lengths)):
        by_group.setdefault(group, []).append(number)
    shares = []
    for group, numbers in sorted(by_group.items()):
        sizes = [lengths[number] for number in numbers]
        files = max(1, min(asked.files, -(-sum(sizes) // FILE_BYTES)))
        shares += [(group, [numbers[at] for at in share]) for share in share_out(sizes, files)]
    return shares


class _Around:
    """The bytes around the data of each kind of tensor: their numbers among the ``constants``, and lengths."""

    def __init__(self, constants: list[bytes]) -> None:
        self._constants = constants
        self._known: dict[int, tuple[int, int, int, int]] = {}

    def of(self, content: Archive | int) -> tuple[int, int, int, int]:
        if isinstance(content, int):
            return 0, 0, 0, 0
        known = self._known.get(id(content))
        if known is None:
            number = ZEROS - 1 - len(self._constants)
            self._constants += content.head, content.tail
            known = self._known[id(content)] = len(content.head), number, len(content.tail), number - 1
        return known


def _tiles(
    share: Sequence[int],
    contents: Sequence[Archive | int],
    placed: Sequence[Placed],
    around: _Around,
    table: tuple[int, int, int],
) -> Numbers:
    """Length and content of all ranges of a file: of each item the gap before it, what is before its data, the data and
    what is after them; then the rest up to the size, and the ``table``: its range, and the number of its content."""
    head, before, tail, after = np.array([around.of(content) for content in contents], np.int64).T
    offsets, _, lengths = np.array(placed, np.int64).T
    size, end, late = table
    ends = np.append(0, offsets + lengths)
    tiles = np.full((len(share) + 1, 4, 2), ZEROS, np.int64)
    tiles[:, 0, 0] = np.append(offsets, size) - ends
    tiles[:-1, 1:, 0] = np.column_stack([head, lengths - head - tail, tail])
    tiles[:-1, 1:, 1] = np.column_stack([before, share, after])
    tiles[-1, 1:] = (end - size, late), (0, ZEROS), (0, ZEROS)
    return tiles.reshape(-1, 2)


def _add_table(
    layout: RankLayout, share: Sequence[int], contents: Sequence[Archive | int], placed: Sequence[Placed], size: int
) -> int:
    """Add what follows a file's items; returns the file's size."""
    tensors = [
        (number, at.data, content.data_bytes)
        for number, at, content in zip(share, placed, contents, strict=True)
        if not isinstance(content, int)
    ]
    numbers, places, lengths = np.array(tensors, np.int64).reshape(-1, 3).T
    firsts = first_sums(lengths.tolist())
    end = size
    if layout.asked.checksums and tensors:
        end = round_up(size + sums_table.bytes_of(len(tensors), firsts[-1]))
    layout.tables.append(FileTable(numbers, places, lengths, firsts, (size, end)))
    return end
