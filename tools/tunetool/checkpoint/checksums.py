"""Checksums of objects, and of tensors' raw bytes by blocks: XXH3 (64 bits) of each. ``sums_table`` keeps the latter.

Blocks are summed in any order, by several threads or by a GPU (``gpu_sums``), and a part of a tensor can be verified
without the rest. XXH3: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

from __future__ import annotations

import importlib
import itertools
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tunetool.errors import CannotJudge, UsageProblem

Sums = dict[tuple[str, tuple[int, ...] | None], str]
"""Checksums of items, by ``key_of`` their index."""
BLOCK_BYTES = 256 << 10
"""Of a tensor with fewer than ``_MOST`` such blocks."""
SUM_BYTES = 8
"""Bytes of one sum, little-endian."""
_MOST = 1 << 16
SHORTEST_OF_GPU = 241
"""Bytes that a GPU can sum. The algorithm for shorter inputs is another one."""


def key_of(index: Any) -> tuple[str, tuple[int, ...] | None]:
    """Name and offset of torch's index of an item."""
    return index.fqn, None if index.offset is None else tuple(index.offset)


@cache
def _xxhash() -> Any:
    try:
        return importlib.import_module("xxhash")
    except ImportError:
        from tunetool.origin import install_hint  # noqa: PLC0415  few need the hint

        raise UsageProblem(
            "checksums of tensors need the package `xxhash`",
            f"{install_hint('checkpoint')}, or turn checksums and `verify` off",
        ) from None


def hasher() -> Any:
    """A hash object with ``update(bytes)`` and ``hexdigest()``, which returns 16 lower-case hexadecimal digits.

    Raises ``UsageProblem`` if xxhash is not installed.
    """
    return _xxhash().xxh3_64()


def digest_of(content: bytes) -> str:
    """The checksum of ``content``."""
    return str(_xxhash().xxh3_64_hexdigest(content))


def number_of(content: bytes | memoryview) -> int:
    """The same as a number."""
    return int(_xxhash().xxh3_64_intdigest(content))


def block_bytes(length: int) -> int:
    """The size of a block, but of the last one, in a tensor of ``length`` bytes."""
    size = BLOCK_BYTES
    while length >= size * _MOST:
        size *= 2
    return size


def number_of_blocks(length: int) -> int:
    """The last block takes the rest, so that it has less than twice the size; a short tensor is one block."""
    return 1 if length < BLOCK_BYTES else length // block_bytes(length)


def first_sums(lengths: Sequence[int]) -> list[int]:
    """The number of the first sum of each tensor, where those of one follow those of another; and of all."""
    return [0, *itertools.accumulate(map(number_of_blocks, lengths))]


def block_range(number: int, length: int) -> tuple[int, int]:
    """First byte of a block, and the one after its last."""
    size, last = block_bytes(length), number_of_blocks(length) - 1
    return number * size, length if number == last else (number + 1) * size


def whole_blocks(start: int, stop: int, length: int) -> tuple[int, int]:
    """The range of the blocks that have bytes of [start, stop), which is not empty."""
    size, last = block_bytes(length), number_of_blocks(length) - 1
    return min(start // size, last) * size, block_range(min((stop - 1) // size, last), length)[1]


class Stopped(Exception):
    """Another thread failed; report the error of that thread instead."""


class Turns:
    """Where threads that sum wait for each other, until one of them fails."""

    def __init__(self) -> None:
        self._moved = threading.Condition()
        self._stopped = False

    def stop(self) -> None:
        """End all waits."""
        with self._moved:
            self._stopped = True
            self._moved.notify_all()

    def tell(self) -> None:
        """What others may wait for has changed."""
        with self._moved:
            self._moved.notify_all()

    def wait(self, ready: Callable[[], bool]) -> None:
        """Wait until it is ``ready``. Raises ``Stopped``."""
        with self._moved:
            self._moved.wait_for(lambda: self._stopped or ready())
            if self._stopped:
                raise Stopped


class Summing:
    """Sums the blocks of tensors, which several threads add in pieces.

    Whoever adds a piece that begins within a block waits for the bytes of that block before it. So pieces must be
    assigned to threads in order, or the threads wait for each other forever.
    """

    __slots__ = ("_begun", "_turns")

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._begun: dict[tuple[int, int], tuple[Any, int]] = {}
        """By tensor and block: the hash of its first bytes, and the first byte that is not in it."""

    def finish(self, tensor: int, block: int, value: int) -> None:
        """Called with the sum of each block."""
        raise NotImplementedError

    def add(self, tensor: int, length: int, position: int, piece: memoryview) -> None:
        """Add the bytes from ``position`` on of a tensor of ``length`` bytes. Raises ``Stopped``."""
        if 0 < length == len(piece) < BLOCK_BYTES:
            self.finish(tensor, 0, number_of(piece))
            return
        size, last, at = block_bytes(length), number_of_blocks(length) - 1, 0
        while at < len(piece):
            block = min((position + at) // size, last)
            start, stop = block * size, length if block == last else (block + 1) * size
            part = piece[at : at + stop - position - at]
            if len(part) == stop - start:
                self.finish(tensor, block, number_of(part))
            else:
                self._continue(tensor, block, position + at - start, part, stop - start)
            at += len(part)

    def _continue(self, tensor: int, block: int, at: int, part: memoryview, whole: int) -> None:
        begun, key = self._begun, (tensor, block)
        if at:
            self._turns.wait(lambda: key in begun and begun[key][1] == at)
        # Only the thread whose turn it is gets here, so hashing needs no lock.
        hashed = begun[key][0] if at else hasher()
        hashed.update(part)
        if at + len(part) == whole:
            begun.pop(key, None)
            self.finish(tensor, block, hashed.intdigest())
            return
        begun[key] = hashed, at + len(part)
        self._turns.tell()


class FileSums(Summing):
    """The sums of all blocks of tensors of ``lengths`` bytes, one tensor after another: those of one data file."""

    def __init__(self, lengths: Sequence[int], turns: Turns, firsts: Sequence[int] | None = None) -> None:
        """``firsts``: those of ``first_sums``, where they are known."""
        super().__init__(turns)
        self._lengths = lengths
        self._first = first_sums(lengths) if firsts is None else firsts
        self._sums = bytearray(SUM_BYTES * self._first[-1])
        self._missing = self._first[-1]
        self._counting = threading.Lock()
        if 0 in lengths:
            for tensor, length in enumerate(lengths):
                if not length:
                    self.finish(tensor, 0, number_of(b""))

    def feed(self, tensor: int, position: int, piece: memoryview) -> None:
        """See ``add``."""
        self.add(tensor, self._lengths[tensor], position, piece)

    def finish(self, tensor: int, block: int, value: int) -> None:
        """Keep the sum."""
        at = SUM_BYTES * (self._first[tensor] + block)
        self._put(at, value.to_bytes(SUM_BYTES, "little"))

    def put(self, tensor: int, sums: bytes) -> None:
        """Keep the sums of all blocks of one tensor, or of several from that one on."""
        self._put(SUM_BYTES * self._first[tensor], sums)

    def _put(self, at: int, sums: bytes) -> None:
        self._sums[at : at + len(sums)] = sums
        with self._counting:
            self._missing -= len(sums) // SUM_BYTES
            is_last = not self._missing
        if is_last:
            self._turns.tell()

    def result(self) -> bytes:
        """All sums, once all bytes were added. Raises ``Stopped``."""
        self._turns.wait(lambda: not self._missing)
        return bytes(self._sums)


class Saved:
    """The sums that a tensor was saved with: ``sums`` of its ``length`` bytes, which begin at ``start`` in the file
    ``name`` of a directory."""

    __slots__ = ("_place", "_tensor", "length", "start", "sums")

    def __init__(self, sums: bytes, length: int, tensor: str, directory: Path, name: str, start: int) -> None:
        self.sums, self.length, self.start = sums, length, start
        self._tensor, self._place = tensor, (directory, name)

    def compare(self, block: int, value: int) -> None:
        """Raises ``CannotJudge`` if the block has another sum now."""
        saved = self.sums[SUM_BYTES * block : SUM_BYTES * (block + 1)]
        if value.to_bytes(SUM_BYTES, "little") == saved:
            return
        (start, stop), file = block_range(block, self.length), Path(*self._place)
        which = f"its {self.length} bytes" if len(self.sums) == SUM_BYTES else f"bytes {start} to {stop - 1}"
        raise CannotJudge(
            f"`{self._tensor}` is damaged: {which} from {self.start} on in `{file}` have checksum {value:016x}, "
            f"and were saved with {int.from_bytes(saved, 'little'):016x}",
            "load another checkpoint, and look at the health of the drives: `tunetool verify`",
        )

    def compare_all(self, sums: bytes) -> None:
        """The same of all blocks."""
        if sums == self.sums:
            return
        for at in range(0, len(sums), SUM_BYTES):
            self.compare(at // SUM_BYTES, int.from_bytes(sums[at : at + SUM_BYTES], "little"))


class Verified(Summing):
    """``Summing`` of one tensor that is read, or of a part of it in whole blocks."""

    __slots__ = ("_saved",)

    def __init__(self, saved: Saved, turns: Turns) -> None:
        super().__init__(turns)
        self._saved = saved

    def feed(self, position: int, piece: memoryview) -> None:
        """See ``add``. Raises also ``CannotJudge`` for a block that is not as saved."""
        self.add(0, self._saved.length, position, piece)

    def finish(self, tensor: int, block: int, value: int) -> None:
        """Compare the sum."""
        self._saved.compare(block, value)
