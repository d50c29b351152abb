"""Reads saved bytes into tensors: several threads make large aligned reads and copy the data to its target."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from tunetool.checkpoint import host_buffers, read_loop
from tunetool.checkpoint.checksums import Stopped, Turns, whole_blocks
from tunetool.checkpoint.host_buffers import POOL, Buffer, is_flat, use_gpu
from tunetool.checkpoint.raw_bytes import BLOCK, ITEM_SIZES, Plain, memory_at, strides
from tunetool.checkpoint.read_loop import Ring, Run
from tunetool.checkpoint.regions import GAP, Block, Read, blocks, merge, pieces, span
from tunetool.checkpoint.source import Files
from tunetool.checkpoint.workers import Workers

if TYPE_CHECKING:
    from tunetool.checkpoint.checksums import Verified

BUFFERS = 2
"""Host buffers per thread for a GPU: one is read into while the other is copied from."""

_TICK_SECONDS = 0.2

FILES_AT_A_TIME = 32
"""Files that are read concurrently. Each is open from its first to its last read."""


class Want:
    """A box (element ``offsets`` and ``lengths``) of the saved tensor ``plain`` to be read, and its target.

    ``start``: offset of the raw bytes in the file ``file``; ``target`` has the shape ``lengths``, any strides, dtype
    and device; ``sums`` verifies what is read here, unless it is left to the GPU. Where a part is read, the rest of its
    blocks is read for that as well.
    """

    # Many are made at a time.
    __slots__ = (
        "_as_bytes",
        "address",
        "by_address",
        "bytes",
        "dtype",
        "file",
        "is_whole",
        "lengths",
        "name",
        "offsets",
        "plain",
        "start",
        "sums",
        "target",
    )

    def __init__(
        self,
        name: str,
        file: str,
        start: int,
        plain: Plain,
        offsets: tuple[int, ...],
        lengths: tuple[int, ...],
        target: Any,
        sums: Verified | None = None,
    ) -> None:
        self.name, self.file, self.start, self.plain = name, file, start, plain
        self.offsets, self.lengths, self.target, self.sums = offsets, lengths, target, sums
        self.dtype, self.is_whole, self.bytes, in_one_run = _box(plain.dtype, plain.shape, offsets, lengths)
        self.by_address = in_one_run and target.dtype == self.dtype and is_flat(target)
        """Whether the bytes of the file, from the first to the last one, are those of the target's memory."""
        self.address = target.data_ptr() if self.by_address else 0

        self._as_bytes: torch.Tensor | None = None

    @property
    def as_bytes(self) -> Any:
        """The target's memory, if it is ``by_address``. Made when it is asked for: few need it, and it takes long."""
        if self._as_bytes is None and self.by_address:
            self._as_bytes = self.target.reshape(-1).view(torch.uint8)
        return self._as_bytes


@functools.lru_cache(4096)
def _box(
    name: str, shape: tuple[int, ...], offsets: tuple[int, ...], lengths: tuple[int, ...]
) -> tuple[torch.dtype, bool, tuple[int, int], bool]:
    """Of a box of a tensor: the dtype, whether it is all of the tensor, the bytes that span it, and whether these are
    nothing else. Kept: a model has few different ones."""
    item, count = ITEM_SIZES[name], math.prod(lengths)
    is_whole = lengths == shape and not any(offsets)
    inside = (0, count * item) if is_whole or not count else span(shape, item, offsets, lengths)
    return getattr(torch, name), is_whole, inside, count > 0 and inside[1] - inside[0] == count * item


class Part(NamedTuple):
    """Raw bytes of a tensor from ``start`` on: a contiguous range (``block`` None), or the range that spans a block.
    ``wanted``: False for bytes that are only read for the sum of their block."""

    want: Want
    start: int
    block: Block | None
    wanted: bool = True


class DirectRead(NamedTuple):
    """An aligned range [start, stop) of a file that is read directly into the target in host memory."""

    want: Want
    start: int
    stop: int


FileRead: TypeAlias = "tuple[str, Read[Part] | DirectRead]"
"""The name of a file, and what is read from it."""


def plan_reads(wants: Sequence[Want], files: Files, buffer_bytes: int) -> list[FileRead]:
    """All reads as (file, read), of at most ``buffer_bytes``, or ``read_loop.READ_BYTES`` where compiled code will
    read: ordered within a file, alternating between files so that several are read at a time."""
    per_file: dict[str, list[tuple[int, Read[Part] | DirectRead]]] = {}
    grouped: dict[str, list[Want]] = {}
    for want in wants:
        grouped.setdefault(want.file, []).append(want)
    largest = max(buffer_bytes, read_loop.READ_BYTES)
    alignment = files.memory_alignment(next(iter(grouped))) if grouped else 1
    for file, group in grouped.items():
        through: list[tuple[int, int, Part]] = []
        by_ring: list[tuple[int, int, Part]] = []
        reads: list[tuple[int, Read[Part] | DirectRead]] = []
        for want in group:
            by_code = (
                files.in_memory and want.by_address and want.sums is None and read_loop.is_there(want.target.device)
            )
            some, limit = (by_ring, largest) if by_code else (through, buffer_bytes)
            start, stop = want.start, want.start + want.bytes[1]
            if want.by_address and want.is_whole and stop - start <= GAP and stop <= start - start % BLOCK + limit:
                # What follows comes to the same for so few bytes.
                some.append((start, stop, Part(want, 0, None)))
                continue
            low, high = _aligned_run(want, alignment, BLOCK if files.direct else 1)
            reads += [(start, DirectRead(want, start, stop)) for start, stop in pieces(low, high, buffer_bytes)]
            some += _through_buffers(want, low, high, limit)
        for some, limit in ((through, buffer_bytes), (by_ring, largest)):
            reads += [(read.start, read) for read in merge(some, limit)]
        per_file[file] = sorted(reads, key=lambda entry: entry[0])
    return [*in_turn({file: [read for _, read in reads] for file, reads in sorted(per_file.items())})]


def in_turn(per_file: Mapping[str, Sequence[Read[Part] | DirectRead]]) -> Iterator[FileRead]:
    """The reads of all files, alternating between ``FILES_AT_A_TIME`` of them."""
    names = list(per_file)
    for first in range(0, len(names), FILES_AT_A_TIME):
        some = names[first : first + FILES_AT_A_TIME]
        for row in itertools.zip_longest(*(per_file[name] for name in some)):
            yield from ((name, read) for name, read in zip(some, row, strict=True) if read is not None)


def _aligned_run(want: Want, memory_alignment: int, block: int) -> tuple[int, int]:
    """The range [low, high) of the file that can be read directly into the target; empty if low equals high."""
    start, stop = want.start + want.bytes[0], want.start + want.bytes[1]
    low, high = start + -start % block, stop - stop % block
    # Larger than the gap over which reads are merged, so that no merged read spans it.
    if not want.by_address or want.target.device.type != "cpu" or high - low <= GAP + 2 * BLOCK:
        return stop, stop
    if (want.address + low - start) % memory_alignment:
        return stop, stop
    return low, high


def _through_buffers(want: Want, low: int, high: int, limit: int) -> Iterator[tuple[int, int, Part]]:
    first = want.start
    if want.by_address:
        for start, stop in ((first + want.bytes[0], low), (high, first + want.bytes[1])):
            for begin, end in pieces(start, stop, limit):
                yield begin, end, Part(want, begin - first, None)
        if want.sums is not None:
            start, stop = whole_blocks(*want.bytes, want.plain.length)
            for before, after in ((start, want.bytes[0]), (want.bytes[1], stop)):
                for begin, end in pieces(first + before, first + after, limit):
                    yield begin, end, Part(want, begin - first, None, wanted=False)
        return
    item = ITEM_SIZES[want.plain.dtype]
    # A read that is widened to whole blocks at both ends must still fit into a host buffer.
    for block in blocks(want.plain.shape, item, want.offsets, want.lengths, limit - 2 * BLOCK):
        yield first + block.start, first + block.stop, Part(want, block.start, block)


class Fetch:
    """Carries out the reads of ``plan_reads`` for tensors on one device.

    Uses ``threads`` host buffers of ``buffer_bytes`` bytes; for a GPU, ``BUFFERS`` times as many, pinned, but a ring of
    ``read_loop.RING_BYTES`` for each thread where compiled code can read.
    """

    def __init__(self, files: Files, device: Any, threads: int, buffer_bytes: int, turns: Turns | None = None) -> None:
        """``turns``: of all ``Want.sums``; stopped once a read failed."""
        self.files, self._device, self._buffer_bytes = files, device, buffer_bytes
        self._threads = threads
        self._stopped = threading.Event()
        self._turns = turns
        self._errors: list[BaseException] = []
        self._lock = threading.Lock()
        self.read_bytes = 0
        """Of the reads that were carried out."""

    def run(self, reads: Sequence[FileRead], tick: Callable[[int], None] | None = None) -> None:
        """Read everything; all tensors are filled on return. ``tick`` gets the number of bytes read so far, several
        times a second, from this thread. Raises ``CannotJudge`` for the first read that failed."""
        with self.running(reads) as workers:
            while not workers.wait(_TICK_SECONDS if tick else None):
                if tick:
                    tick(self.read_bytes)

    @contextlib.contextmanager
    def running(
        self, reads: Sequence[FileRead], done: Callable[[FileRead, Any], None] = lambda read, stream: None
    ) -> Iterator[Workers]:
        """Read everything while the block runs and, at its end, until all tensors are filled.

        ``done``: called by the thread that carried out a read, with the CUDA stream on which its copies are queued, or
        None. Raises ``CannotJudge`` for the first read that failed.
        """
        self.files.expect(name for name, _ in reads)
        queue = iter(reads)
        # Earlier GPU work on the tensors must be complete before they are filled.
        stream = None
        if self._device.type == "cuda":
            # Here, without the interpreter's lock, which threads that start copies by address have.
            torch.cuda.current_stream(self._device).synchronize()
            stream = torch.cuda.Stream(self._device)
        works = [functools.partial(self._work, queue, stream, done)] * min(self._threads, len(reads))
        workers = Workers(works, "tunetool-read", daemon=True)
        try:
            workers.start()
            yield workers
            workers.wait()
        except BaseException:
            self.stop()
            try:
                workers.wait()
            finally:
                # A second interruption ends the wait for threads that still read.
                if workers.are_running:
                    self.files.leave_open()
            raise
        if self._errors:
            raise self._errors[0]

    def _work(self, queue: Iterator[FileRead], stream: Any, done: Callable[[FileRead, Any], None]) -> None:
        try:
            if stream is None:
                with Buffers(1, self._buffer_bytes, None) as buffers:
                    self._carry_out(queue, buffers, lambda read: done(read, None))
                return
            use_gpu(self._device)
            with torch.cuda.stream(stream), Buffers(BUFFERS, self._buffer_bytes, stream) as buffers:
                self._carry_out(queue, buffers, lambda read: done(read, stream))
        except Stopped:
            pass
        except BaseException as error:  # carried to the thread that waits
            self._errors.append(error)
            self.stop()

    @property
    def is_stopped(self) -> bool:
        """Whether a read failed or ``stop`` was called: not everything will be read."""
        return self._stopped.is_set()

    def stop(self) -> None:
        """Begin no further read."""
        self._stopped.set()
        if self._turns is not None:
            self._turns.stop()

    def _carry_out(self, queue: Iterator[FileRead], buffers: Buffers, done: Callable[[FileRead], None]) -> None:
        while not self._stopped.is_set():
            with self._lock:
                entry = next(queue, None)
            if entry is None:
                return
            name, read = entry
            self.carry_out_one(name, read, buffers)
            with self._lock:
                self.read_bytes += read.stop - read.start
            done(entry)

    def carry_out_one(self, name: str, read: Read[Part] | DirectRead, buffers: Buffers) -> None:
        """Carry out one read, announced to ``files`` before, with the buffers of this thread. For a GPU, the copies are
        queued then on the buffers' stream, which must be this thread's current one. Raises ``CannotJudge``."""
        try:
            if isinstance(read, DirectRead):
                self._read_in_place(name, read)
            elif not self._read_through_ring(name, read, buffers):
                self._read_through_buffer(name, read, buffers.next(read.stop - read.start))
        finally:
            self.files.done(name)

    def _read_in_place(self, name: str, read: DirectRead) -> None:
        want = read.want
        first = read.start - want.start
        address = want.address + first - want.bytes[0]
        view = memory_at(address, read.stop - read.start)
        came = self.files.read(name, view, read.start, want.name)
        if came < len(view):
            raise self.files.truncated(name, want.name, read.start + came, want.start + want.bytes[1])
        if want.sums is not None:
            want.sums.feed(first, view)

    def _read_through_ring(self, name: str, read: Read[Part], buffers: Buffers) -> bool:
        """Whether compiled code read everything, and queued all copies."""
        if buffers.ring is None or not all(
            part.wanted and part.block is None and part.want.sums is None for _, _, part in read.wanted
        ):
            return False
        stop = max(stop for _, stop, _ in read.wanted)
        handle = self.files.in_memory_handle(name, read.start, stop)
        if handle is None:
            return False
        runs = [
            Run(start, stop, part.want.address + part.start - part.want.bytes[0]) for start, stop, part in read.wanted
        ]
        return buffers.ring.read(handle, read.start, stop, runs)

    def _read_through_buffer(self, name: str, read: Read[Part], buffer: _Buffer) -> None:
        buffer.wait()
        came = self.files.read(name, buffer.view[: read.stop - read.start], read.start, read.wanted[0][2].want.name)
        for start, stop, part in read.wanted:
            if stop > read.start + came:
                raise self.files.truncated(name, part.want.name, read.start + came, stop)
            if not part.wanted:
                continue
            first, count = start - read.start, stop - start
            if part.block is not None:
                _copy_block(buffer.tensor[first : first + count], part.want, part.block)
                continue
            at = part.start - part.want.bytes[0]
            buffer.copy_to(part.want, at, first, count)
        buffer.used()
        for start, stop, part in read.wanted:
            if part.want.sums is not None:
                part.want.sums.feed(part.start, buffer.view[start - read.start : stop - read.start])


class _Buffer:
    """A host buffer from which a CUDA stream may still copy."""

    def __init__(self, memory: Buffer, stream: Any) -> None:
        self.tensor, self.view, self.address = memory.tensor, memory.view, memory.address
        self.handle = stream.cuda_stream if stream is not None and memory.pinned else 0
        """Of the stream, if copies to its GPU can be started by address."""
        self._stream = stream
        self._copied = None if stream is None else torch.cuda.Event()

    def wait(self) -> None:
        """Wait until the copies from this buffer are complete."""
        # Asked first: a thread that waits gives the interpreter's lock away, and gets it back in turn with 15 others.
        if self._copied is not None and not self._copied.query():
            self._copied.synchronize()

    def copy_to(self, want: Want, at: int, first: int, count: int) -> None:
        """Copy ``count`` bytes from ``first`` on to byte ``at`` of the target, which is ``by_address``; for a GPU, the
        copy is queued on the current stream."""
        if self.handle and host_buffers.to_gpu(want.address + at, self.address + first, count, self.handle):
            return
        if want.target.is_cpu:
            host_buffers.within_host(want.address + at, self.address + first, count)
            return
        want.as_bytes[at : at + count].copy_(self.tensor[first : first + count], non_blocking=True)

    def used(self) -> None:
        if self._copied is not None:
            self._copied.record(self._stream)


class Buffers:
    """``count`` host buffers of one thread in turn, pinned if there is a ``stream``, which is synchronized before the
    pool gets them back; a context manager.

    Each is taken when it is first needed, so that the first is read into while other threads still pin memory.
    """

    def __init__(self, count: int, size: int, stream: Any) -> None:
        self._count, self._size, self._stream = count, size, stream
        self._memories: list[Buffer] = []
        self._held: list[_Buffer] = []
        self._turn = itertools.cycle(range(count))

    def __enter__(self) -> Buffers:
        return self

    @cached_property
    def ring(self) -> Ring | None:
        """Of compiled code, with pinned memory of its own; None where there is no such code, or no GPU."""
        if self._stream is None or not read_loop.is_there(self._stream.device):
            return None
        self._memories.append(POOL.one(read_loop.RING_BYTES, pinned=True))
        return read_loop.ring(self._memories[-1], self._stream)

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.synchronize()
        POOL.give_back(self._memories)

    def next(self, size: int = 0) -> _Buffer:
        """One of them, at least of ``size`` bytes: reads that are planned for a ring, and then fail, are larger."""
        number = next(self._turn)
        if number == len(self._held):
            self._held.append(self._new(size))
        elif len(self._held[number].view) < size:
            self._held[number] = self._new(size)
        return self._held[number]

    def _new(self, size: int) -> _Buffer:
        # Of two sizes at most: the pool keeps buffers for those who need the same size.
        size = self._size if size <= self._size else max(size, read_loop.READ_BYTES)
        self._memories.append(POOL.one(size, self._stream is not None))
        return _Buffer(self._memories[-1], self._stream)


def _copy_block(source: Any, want: Want, block: Block) -> None:
    """Copy a block, whose bytes ``source`` span it with the saved strides, into its part of the target."""
    target = want.target
    for dimension, (offset, first, length) in enumerate(zip(block.offsets, want.offsets, block.lengths, strict=True)):
        target = target.narrow(dimension, offset - first, length)
    # For a GPU, the whole span is copied at once and the block is extracted there. On the CPU, a copy is needed only
    # if the span does not begin at a multiple of the element size.
    if target.device.type != "cpu":
        source = source.to(target.device, non_blocking=True)
    elif source.data_ptr() % want.dtype.itemsize:
        source = source.clone()
    target.copy_(torch.as_strided(source.view(want.dtype), block.lengths, strides(want.plain.shape, 1)))
