"""``global_plan`` for plans that are columns: the same answers, with arrays of all ranks' items instead of objects."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from tunetool.checkpoint import global_plan
from tunetool.checkpoint.columns import SHARD, Columns, Form, Numbers, Structure, narrow, runs, structure_of
from tunetool.checkpoint.holders import Groups, HolderSets
from tunetool.checkpoint.tensor_table import TensorTable

_LARGEST = 1 << 62
_FEW = 32
"""Chunks of a tensor, up to which Python checks them sooner than numpy."""


class _Unusual(Exception):
    """Something that ``global_plan`` must judge."""


@dataclasses.dataclass
class _All:
    """The items of all ranks, one rank after another. ``begins``: by item, where its offsets and sizes begin."""

    names: list[str]
    forms: list[Form]
    rank: Numbers
    name: Numbers
    form: Numbers
    dimensions: Numbers
    begins: Numbers
    offsets: Numbers
    sizes: Numbers
    bytes: Numbers
    key: Numbers
    """Equal for the same part of the same tensor, and only then."""


def plan(asked: Sequence[Columns], split_above: int) -> tuple[list[Columns], TensorTable, list[Groups]] | None:
    """What each rank writes, the table of tensors, and by rank who holds what it writes. None for plans that
    ``global_plan`` must judge: those that torch refuses, and those whose ranks disagree about a tensor."""
    try:
        together = _together(asked)
        source, rank, first, rows, groups = _shared_out(together, len(asked), split_above)
        return *_described(asked, together, source, rank, first, rows), groups
    except _Unusual:
        return None


class _Names:
    """The names, forms and shapes of all structures, each once."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.shapes: list[torch.Size | None] = []
        self.bases: list[int] = []
        self.end = 0
        self.forms: list[Form] = []
        self._form_numbers: dict[Any, int] = {}

    def form(self, form: Form) -> int:
        kind, its, whole = form
        flags = its and (its.dtype, its.layout, its.requires_grad, its.memory_format, its.pin_memory)
        number = self._form_numbers.setdefault((kind, flags, whole), len(self.forms))
        if number == len(self.forms):
            self.forms.append(form)
        return number

    def name(self, name: str, whole: torch.Size | None) -> int:
        number = self.numbers.setdefault(name, len(self.shapes))
        if number == len(self.shapes):
            self.shapes.append(whole)
            self.bases.append(self.end)
            self.end += math.prod(length + 1 for length in whole or ())
            # Every key, and the bytes of every chunk, are integers of 64 bits.
            if self.end >= _LARGEST // 16:
                raise _Unusual
        elif self.shapes[number] != whole:
            raise _Unusual
        return number


@dataclasses.dataclass
class _Known:
    """A structure in the numbers of all structures. ``steps``: by dimension of all items, what an offset counts."""

    name: Numbers
    form: Numbers
    base: Numbers
    item_bytes: Numbers
    lengths: Numbers
    steps: Numbers


def _known(structure: Structure, names: _Names) -> _Known:
    forms = np.array([names.form(form) for form in structure.forms], np.int64)
    steps, lengths, sizes = [], [], []
    for _, properties, whole in structure.forms:
        of_form: list[int] = []
        step = 1
        for length in reversed(whole or ()):
            of_form.append(step)
            step *= length + 1
        steps.append(of_form[::-1])
        lengths.append(list(whole or ()))
        sizes.append(1 if properties is None else properties.dtype.itemsize)
    which = structure.which.tolist()
    shapes = [whole for _, _, whole in structure.forms]
    name = [names.name(each, shapes[form]) for each, form in zip(structure.names, which, strict=True)]
    return _Known(
        np.array(name, np.int64),
        forms[structure.which],
        np.array([names.bases[number] for number in name], np.int64),
        np.array(sizes, np.int64)[structure.which],
        np.array([length for form in which for length in lengths[form]], np.int64),
        np.array([step for form in which for step in steps[form]], np.int64),
    )


def _together(asked: Sequence[Columns]) -> _All:
    names = _Names()
    known: dict[int, _Known] = {}
    for each in asked:
        if id(each.structure) not in known:
            known[id(each.structure)] = _known(each.structure, names)
    structures = [known[id(each.structure)] for each in asked]
    dimensions = np.concatenate([each.structure.dimensions for each in asked])
    offsets = np.concatenate([each.offsets for each in asked]).astype(np.int64)
    sizes = np.concatenate([each.sizes for each in asked]).astype(np.int64)
    lengths = np.concatenate([each.lengths for each in structures])
    if len(offsets) != len(lengths) or len(sizes) != len(lengths):
        raise _Unusual
    if (offsets < 0).any() or (sizes < 0).any() or (offsets + sizes > lengths).any():
        raise _Unusual
    begins = np.cumsum(dimensions) - dimensions
    key = np.concatenate([each.base for each in structures])
    data = np.concatenate([each.item_bytes for each in structures])
    deep = dimensions > 0
    if deep.any():
        at = begins[deep]
        key[deep] += np.add.reduceat(offsets * np.concatenate([each.steps for each in structures]), at)
        data[deep] *= np.multiply.reduceat(sizes, at)
    return _All(
        list(names.numbers),
        names.forms,
        np.repeat(np.arange(len(asked)), [len(each) for each in asked]),
        np.concatenate([each.name for each in structures]),
        np.concatenate([each.form for each in structures]),
        dimensions,
        begins,
        offsets,
        sizes,
        data,
        key,
    )


def _shared_out(every: _All, ranks: int, split_above: int) -> tuple[Numbers, Numbers, Numbers, Numbers, list[Groups]]:
    """As ``global_plan.share_out``, for every piece in the order of the ranks: the item of which it is, the rank that
    writes it, its first row within that item, and its number of rows (-1: it is the item); and the ranks' groups."""
    order = np.argsort(every.key, kind="stable")
    ordered = every.key[order]
    new = np.ones(len(ordered), bool)
    new[1:] = ordered[1:] != ordered[:-1]
    starts = np.flatnonzero(new)
    stops = np.append(starts[1:], len(ordered))
    winners = order[starts]
    # Items are in the order of the ranks, so the first and the last holder say whether there are several.
    several = every.rank[order[stops - 1]] != every.rank[winners] if len(starts) else np.zeros(0, bool)
    alone, _, first, rows = _cut(every, np.sort(winners[~several]), split_above)
    rank = every.rank[alone]
    sets = HolderSets()
    own = np.bincount(rank, minlength=ranks).tolist()
    if not several.any():
        return alone, rank, first, rows, [sets.groups(count, ()) for count in own]
    by_appearance = np.argsort(winners[several])
    shared = np.flatnonzero(several)[by_appearance]
    holders = [
        tuple(dict.fromkeys(every.rank[order[start:stop]].tolist()))
        for start, stop in zip(starts[shared].tolist(), stops[shared].tolist(), strict=True)
    ]
    numbers = np.array([sets.number(each) for each in holders], np.int64)
    source, of, low, count = _cut(every, winners[shared], split_above)
    weights = _bytes(every, source, count)
    held = np.zeros(ranks, np.int64)
    np.add.at(held, rank, _bytes(every, alone, rows))
    loads = held.tolist()
    lightest = global_plan.Lightest(loads)
    largest_first = np.argsort(-weights, kind="stable")
    chosen = []
    for which, size in zip(of[largest_first].tolist(), weights[largest_first].tolist(), strict=True):
        to = lightest.of(global_plan.takers(holders[which], size))
        chosen.append(to)
        loads[to] += size
    rank = np.concatenate([rank, np.array(chosen, np.int64)])
    group = np.concatenate([np.full(len(alone), -1), numbers[of[largest_first]]])
    arranged = np.lexsort((group, rank))
    joined = [
        np.concatenate([ours, theirs[largest_first]])[arranged]
        for ours, theirs in ((alone, source), (first, low), (rows, count))
    ]
    rank, group = rank[arranged], group[arranged]
    theirs = np.split(group, np.searchsorted(rank, np.arange(1, ranks)))
    groups = [sets.groups(count, each[count:].tolist()) for count, each in zip(own, theirs, strict=True)]
    return joined[0], rank, joined[1], joined[2], groups


def _bytes(every: _All, source: Numbers, rows: Numbers) -> Numbers:
    weights = every.bytes[source]
    cut = np.flatnonzero(rows >= 0)
    whole = every.sizes[every.begins[source[cut]]]
    weights[cut] = weights[cut] // whole * rows[cut]
    return weights


def _cut(every: _All, items: Numbers, split_above: int) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """As ``global_plan.pieces``: for every piece its item, the position of that in ``items``, its first row and its
    number of rows (-1: it is the item)."""
    large = (every.bytes[items] > split_above) & (every.dimensions[items] > 0)
    large[large] = every.sizes[every.begins[items[large]]] > 1
    counts = np.ones(len(items), np.int64)
    rows = every.sizes[every.begins[items[large]]]
    pairs = zip(rows.tolist(), every.bytes[items[large]].tolist(), strict=True)
    counts[large] = [-(-long // max(1, split_above * long // size)) for long, size in pairs]
    of = np.repeat(np.arange(len(items)), counts)
    first, height = np.zeros(len(of), np.int64), np.full(len(of), -1, np.int64)
    cut = large[of]
    part = runs(np.zeros(len(rows), np.int64), counts[large])
    long, count = np.repeat(rows, counts[large]), np.repeat(counts[large], counts[large])
    first[cut] = long * part // count
    height[cut] = long * (part + 1) // count - first[cut]
    return items[of], of, first, height


@dataclasses.dataclass
class _Pieces:
    """What all ranks write, one rank after another. The fields are those of ``_All``."""

    source: Numbers
    rank: Numbers
    whole: Numbers
    """Whether the piece is its whole item."""
    name: Numbers
    form: Numbers
    dimensions: Numbers
    offsets: Numbers
    sizes: Numbers
    hints: Numbers


def _described(
    asked: Sequence[Columns], every: _All, source: Numbers, rank: Numbers, first: Numbers, rows: Numbers
) -> tuple[list[Columns], TensorTable]:
    name, form, dimensions = every.name[source], every.form[source], every.dimensions[source]
    entries = runs(every.begins[source], dimensions)
    offsets, sizes = every.offsets[entries], every.sizes[entries]
    begins = np.cumsum(dimensions) - dimensions
    cut = np.flatnonzero(rows >= 0)
    offsets[begins[cut]] += first[cut]
    sizes[begins[cut]] = rows[cut]
    forms = every.forms
    if len(cut):
        # A TENSOR must be the only item of its name; its pieces are each a SHARD.
        form[cut] += len(forms)
        forms = [*forms, *((SHARD.name, properties, whole) for _, properties, whole in forms)]
    by_name = np.argsort(name, kind="stable")
    counts = np.bincount(name, minlength=len(every.names))
    number = np.empty(len(name), np.int64)
    number[by_name] = runs(np.zeros(len(counts), np.int64), counts)
    is_shard = np.array([kind == SHARD.name for kind, _, _ in forms], bool)[form]
    if (number[~is_shard] > 0).any():
        # Planned twice.
        raise _Unusual
    hints = np.concatenate([each.hints for each in asked]).astype(np.int64)[source]
    is_tensor = np.array([whole is not None for _, _, whole in forms], bool)[form]
    hints[is_tensor] = number[is_tensor] + 1
    entries = runs(begins[by_name], dimensions[by_name])
    firsts = by_name[np.cumsum(counts) - counts]
    table = TensorTable(
        every.names, [forms[each][1:] for each in form[firsts].tolist()], counts, offsets[entries], sizes[entries]
    )
    _check(table, len(asked))
    pieces = _Pieces(source, rank, rows < 0, name, form, dimensions, offsets, sizes, hints)
    return list(_answers(asked, every.names, forms, pieces)), table


def _answers(asked: Sequence[Columns], names: list[str], forms: list[Form], pieces: _Pieces) -> Iterator[Columns]:
    bounds = np.searchsorted(pieces.rank, np.arange(len(asked) + 1)).tolist()
    ends = np.append(0, np.cumsum(pieces.dimensions))
    begin = 0
    for each, low, high in zip(asked, bounds, bounds[1:], strict=False):
        of_rank = slice(low, high)
        hints = narrow(pieces.hints[of_rank])
        asked_for = np.arange(begin, begin + len(each))
        begin += len(each)
        if pieces.whole[of_rank].all() and np.array_equal(pieces.source[of_rank], asked_for):
            yield dataclasses.replace(each, hints=hints)
            continue
        numbers = pieces.form[of_rank]
        used = np.unique(numbers)
        numbered = structure_of(
            [names[number] for number in pieces.name[of_rank].tolist()],
            np.searchsorted(used, numbers),
            [forms[number] for number in used.tolist()],
        )
        inside = slice(int(ends[low]), int(ends[high]))
        yield Columns(numbered, narrow(pieces.offsets[inside]), narrow(pieces.sizes[inside]), hints)


def _check(table: TensorTable, ranks: int) -> None:
    """``global_plan.check``: only tensors whose chunks form no grid become objects."""
    for name in table:
        size, offsets, sizes = table.bounds(name)
        if size and not _is_grid(size, offsets, sizes):
            global_plan.check([SavePlan([])] * ranks, Metadata({name: table[name]}))


def _is_grid(size: torch.Size, offsets: Numbers, sizes: Numbers) -> bool:
    """``global_plan.is_grid`` for chunks that lie within the tensor."""
    if len(sizes) <= _FEW:
        return global_plan.is_grid(size, [*zip(map(tuple, offsets.tolist()), map(tuple, sizes.tolist()), strict=True)])
    filled = sizes.all(axis=1)
    offsets, sizes = offsets[filled].astype(np.int64), sizes[filled].astype(np.int64)
    cells = 1
    corner = np.zeros(len(sizes), np.int64)
    for dimension, length in enumerate(size):
        starts, which = np.unique(offsets[:, dimension], return_inverse=True)
        long = np.zeros(len(starts), np.int64)
        long[which] = sizes[:, dimension]
        if (long[which] != sizes[:, dimension]).any():
            return False
        if not np.array_equal(starts, np.cumsum(long) - long) or int(long.sum()) != length:
            return False
        cells *= len(starts)
        corner = corner * len(starts) + which
    return cells == len(sizes) == len(np.unique(corner))
