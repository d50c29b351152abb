"""Compares two checkpoints, whoever saved them in whichever parts, a few of their tensors at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tunetool.checkpoint.box_reader import Box, BoxReader
from tunetool.checkpoint.contents import matching
from tunetool.checkpoint.raw_bytes import ITEM_SIZES
from tunetool.checkpoint.regions import blocks
from tunetool.errors import ExitCode

if TYPE_CHECKING:
    from tunetool.measure.progress import MovingProgress

AT_ONCE = 128 << 20
"""Bytes of tensors that are in memory of each checkpoint. A tensor with more is compared in slices."""
_MOST = 10_000
"""Tensors and objects that are read at a time."""
_PIECE = 1 << 20
"""Elements whose differences are computed at a time, as float64."""
State = Literal[
    "equal", "different", "only in A", "only in B", "other shape", "other dtype", "other kind", "not compared"
]


@dataclass
class Compared:
    """A name in one of the checkpoints or in both. ``a`` and ``b``: dtype and shape, or `object`; None if not there.

    Not compared is what is quantized or of a dtype that torch itself hardly knows.
    """

    name: str
    state: State
    a: str | None
    b: str | None
    elements: int = 0
    """Those of which the bytes differ."""
    largest_change: float = 0.0
    """Of the elements that are numbers in both."""
    largest_relative: float = 0.0
    """Of the same, by the larger of the two numbers."""
    nan_a: int = 0
    nan_b: int = 0


def code_of(compared: Sequence[Compared]) -> ExitCode:
    """The exit code of a command that found this."""
    states = {each.state for each in compared}
    if states - {"equal", "not compared"}:
        return ExitCode.FALLS_SHORT
    return ExitCode.NOT_JUDGED if "not compared" in states else ExitCode.OK


def compare(a: Path, b: Path, glob: str | None, progress: MovingProgress) -> list[Compared]:
    """Everything in ``a`` or ``b`` whose name matches ``glob``, in the order of ``a``.

    Tensors are equal if all of their bytes are; objects, if their pickles are.

    Raises ``UsageProblem`` if one is no checkpoint or no name matches, ``CannotJudge`` if one is damaged.
    """
    sides = BoxReader(a), BoxReader(b)
    names = matching([*sides[0].entries, *sides[1].entries], glob, f"`{a}` and `{b}`")
    compared = [_first_look(name, *(side.entries.get(name) for side in sides)) for name in names]
    by_name = {each.name: each for each in compared if each.state == "equal"}
    boxes = (box for name in by_name for box in _boxes(name, sides[0].entries[name]))
    done = 0
    with progress.moving(f"compare {a} with {b}", sum(_bytes(sides[0].entries[name]) for name in by_name)) as tick:
        for some in _batches(boxes):
            for box, left, right in zip(some, *(side.read(some) for side in sides), strict=True):
                _compare(by_name[box.name], left, right)
            done += sum(box.bytes for box in some)
            tick(done)
    return compared


def _first_look(name: str, a: Any, b: Any) -> Compared:
    """By the metadata alone; equal, unless these say that it is not."""
    state: State = "equal"
    if a is None or b is None:
        state = "only in A" if b is None else "only in B"
    elif type(a) is not type(b):
        state = "other kind"
    elif isinstance(a, TensorStorageMetadata) and a.size != b.size:
        state = "other shape"
    elif isinstance(a, TensorStorageMetadata) and a.properties.dtype != b.properties.dtype:
        state = "other dtype"
    elif isinstance(a, TensorStorageMetadata) and _dtype(a) not in ITEM_SIZES:
        state = "not compared"
    return Compared(name, state, _words(a), _words(b))


def _words(about: Any) -> str | None:
    if about is None:
        return None
    if not isinstance(about, TensorStorageMetadata):
        return "object"
    return f"{_dtype(about)} {list(about.size)}"


def _dtype(about: Any) -> str:
    return str(about.properties.dtype).removeprefix("torch.")


def _bytes(about: Any) -> int:
    """Of a tensor; 0 for an object."""
    return math.prod(about.size) * about.properties.dtype.itemsize if isinstance(about, TensorStorageMetadata) else 0


def _boxes(name: str, about: Any) -> Iterator[Box]:
    """The parts of a tensor in which it is compared, or the object."""
    if not isinstance(about, TensorStorageMetadata):
        yield Box(name, (), (), 0)
        return
    item, nowhere = about.properties.dtype.itemsize, (0,) * len(about.size)
    for block in blocks(tuple(about.size), item, nowhere, tuple(about.size), AT_ONCE):
        yield Box(name, block.offsets, block.lengths, math.prod(block.lengths) * item)


def _batches(boxes: Iterable[Box]) -> Iterator[list[Box]]:
    some: list[Box] = []
    held = 0
    for box in boxes:
        if some and (held + box.bytes > AT_ONCE or len(some) == _MOST):
            yield some
            some, held = [], 0
        some.append(box)
        held += box.bytes
    if some:
        yield some


def _compare(compared: Compared, a: Any, b: Any) -> None:
    if isinstance(a, bytes):
        compared.state = "equal" if a == b else "different"
        return
    a, b = (tensor.reshape(-1) for tensor in (a, b))
    nan_a, same = _nans(a), _same(a, b)
    compared.nan_a += nan_a
    compared.nan_b += nan_a if same else _nans(b)
    if same:
        return
    compared.state = "different"
    for left, right in zip(a.split(_PIECE), b.split(_PIECE), strict=True):
        if not _same(left, right):
            _add_changes(compared, left, right)


def _add_changes(compared: Compared, a: Any, b: Any) -> None:
    unequal = a.view(torch.uint8) != b.view(torch.uint8)
    compared.elements += int(unequal.reshape(-1, a.dtype.itemsize).any(1).sum())
    change = _change(a, b)
    a, b = _numbers(a), _numbers(b)
    relative = change / torch.maximum(a.abs(), b.abs())
    both = ~(torch.isnan(a) | torch.isnan(b)) & (change > 0)
    if both.any():
        compared.largest_change = max(compared.largest_change, float(change[both].max()))
        # Infinity by infinity is no number.
        compared.largest_relative = max(compared.largest_relative, float(relative[both].nan_to_num(math.inf).max()))


def _change(a: Any, b: Any) -> Any:
    """By how much the elements differ, as float64."""
    if a.dtype in (torch.int64, torch.uint64):
        # Above 2^53 two neighbours are one float64. With the sign turned over, the order is that of signed integers.
        a, b = (t.view(torch.int64) ^ (-(2**63) if t.dtype == torch.uint64 else 0) for t in (a, b))
        change = torch.maximum(a, b) - torch.minimum(a, b)
        return change.to(torch.float64) + (change < 0) * 2.0**64
    a, b = _numbers(a), _numbers(b)
    return torch.where(a == b, 0.0, (a - b).abs())


def _same(a: Any, b: Any) -> bool:
    """Whether all bytes are equal."""
    a, b = a.view(torch.uint8), b.view(torch.uint8)
    # Eight bytes at a time take an eighth of the time.
    even = len(a) - len(a) % 8
    return bool(torch.equal(a[:even].view(torch.int64), b[:even].view(torch.int64)) and torch.equal(a[even:], b[even:]))


_QUICK = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""What torch itself sums."""


def _nans(tensor: Any) -> int:
    if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        return 0
    if tensor.dtype not in _QUICK:
        return sum(int(torch.isnan(_numbers(piece)).count_nonzero()) for piece in tensor.split(_PIECE))
    # The sum, which takes little time, is a number where none of them is a NaN.
    return int(torch.isnan(tensor).count_nonzero()) if torch.isnan(tensor.sum()) else 0


def _numbers(tensor: Any) -> Any:
    """As float64, or as two of them for a complex number."""
    if tensor.dtype.is_complex:
        return torch.view_as_real(tensor.to(torch.complex128)).reshape(-1)
    return tensor.to(torch.float64)
