"""The XXH3 checksum (64 bits) of a tensor's raw bytes, which several threads read in parts."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tunetool.errors import CannotJudge, UsageProblem

if TYPE_CHECKING:
    from typing_extensions import Buffer

Sums = dict[tuple[str, tuple[int, ...] | None], str]
"""Checksums of items, by ``key_of`` their index."""


def key_of(index: Any) -> tuple[str, tuple[int, ...] | None]:
    """Name and offset of torch's index of an item."""
    return index.fqn, None if index.offset is None else tuple(index.offset)


def hasher() -> Any:
    """A hash object with ``update(bytes)`` and ``hexdigest()``, which returns 16 lower-case hexadecimal digits.

    Raises ``UsageProblem`` if xxhash is not installed.
    """
    try:
        return importlib.import_module("xxhash").xxh3_64()
    except ImportError:
        from tunetool.origin import install_hint  # noqa: PLC0415  few need the hint

        raise UsageProblem(
            "checksums of tensors need the package `xxhash`",
            f"{install_hint('checkpoint')}, or turn checksums and `verify` off",
        ) from None


def digest_of(content: bytes) -> str:
    """The checksum of ``content``."""
    hashed = hasher()
    hashed.update(content)
    return str(hashed.hexdigest())


def seal(digest: str, save: str | None, tensor: str, offset: Sequence[int]) -> str:
    """A digest that binds a checksum to its save and its offset in a tensor, so that swapped data files are noticed."""
    hashed = hasher()
    hashed.update("\0".join((digest, save or "", tensor, *map(str, offset))).encode("utf-8", "surrogatepass"))
    return str(hashed.hexdigest())


class Stopped(Exception):
    """Another thread failed; report the error of that thread instead."""


class Digest:
    """xxh3_64 of one tensor's raw bytes, which several threads add in pieces, in order."""

    def __init__(self, total: int) -> None:
        import xxhash  # noqa: PLC0415  only who asks for checksums needs it

        self._hash = xxhash.xxh3_64()
        self._total, self._position = total, 0
        self._moved = threading.Condition()
        self._stopped = False

    def feed(self, position: int, view: memoryview) -> None:
        """Add the bytes from ``position`` on; waits until all bytes before it were added."""
        self._wait(position)
        self._hash.update(view)
        with self._moved:
            self._position += len(view)
            self._moved.notify_all()

    def result(self) -> str:
        self._wait(self._total)
        return str(self._hash.hexdigest())

    def stop(self) -> None:
        with self._moved:
            self._stopped = True
            self._moved.notify_all()

    def _wait(self, position: int) -> None:
        with self._moved:
            self._moved.wait_for(lambda: self._stopped or self._position == position)
            if self._stopped:
                raise Stopped


class Chain:
    """The checksum of one tensor whose parts are read by several threads; each thread waits for the parts before its
    own.

    Parts must be assigned to threads in order, or the threads wait for each other forever.
    """

    def __init__(self, expected: str, length: int, tensor: str, location: str) -> None:
        self._expected, self._length, self._tensor, self._location = expected, length, tensor, location
        self._hasher = hasher()
        self._next = 0
        self._turn = threading.Condition()

    def feed(self, start: int, part: Buffer, stopped: threading.Event) -> None:
        """Add the bytes that begin at ``start``. Raises ``CannotJudge`` after the last part if the checksum is
        wrong."""
        with self._turn:
            while self._next != start:
                if stopped.is_set():
                    return
                self._turn.wait(0.1)
        # Only the thread whose turn it is gets here, so hashing needs no lock.
        self._hasher.update(part)
        stop = start + memoryview(part).nbytes
        if stop == self._length and self._hasher.hexdigest() != self._expected:
            raise CannotJudge(
                f"`{self._tensor}` is damaged: its {self._length} bytes {self._location} have checksum "
                f"{self._hasher.hexdigest()}, and were saved with {self._expected}",
                "load another checkpoint, and look at the health of the drives: `tunetool verify`",
            )
        with self._turn:
            self._next = stop
            self._turn.notify_all()
