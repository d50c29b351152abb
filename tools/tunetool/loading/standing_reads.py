"""Threads that stay and fill batch after batch, with the reads, pinned buffers and copies of the checkpoint reader."""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from tunetool.checkpoint.fetch import BUFFERS, Buffers, Fetch, Part, Want
from tunetool.checkpoint.host_buffers import use_gpu
from tunetool.checkpoint.raw_bytes import BLOCK, Plain, memory_at
from tunetool.checkpoint.regions import Read, merge, pieces
from tunetool.checkpoint.source import Files
from tunetool.checkpoint.workers import Workers
from tunetool.errors import CannotJudge
from tunetool.loading.sample_files import SampleFiles, Where

_LEAST_READ = 1 << 20
"""Bytes up to which adjacent samples are read at once, however few a thread's share is: smaller reads wait more often
for the interpreter's lock."""
_MOST_OPEN = 128
"""Files that stay open between batches. Each takes two of the process's file descriptors, 1,024 by default."""
_CHANGED = "let nothing write to the files while they are read, and make the dataset again"


class Job:
    """A batch that is being filled. The reads that are left keep it, so its memory is not freed under them."""

    def __init__(self, memory: Any, stream: Any) -> None:
        self.memory = memory
        self.cancelled = False
        self.left = 0
        """Reads that have not ended."""
        self._stream = stream
        self._copied: Any = None
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._complete = threading.Event()

    def wait(self) -> None:
        """Return when all bytes are there, for whatever the current stream does next. Raises ``CannotJudge``."""
        self._complete.wait()
        if self._error is not None:
            raise self._error
        if self._copied is not None:
            current = torch.cuda.current_stream(self._stream.device)
            current.wait_event(self._copied)
            # Whoever frees the memory has it used no earlier than that stream is through with it.
            self.memory.record_stream(current)

    def settle(self) -> None:
        """Give the batch up: return when nothing is read into it any more."""
        self.cancelled = True
        self._complete.wait()

    def finished(self, error: BaseException | None) -> None:
        """One read has ended; its copies are queued on the stream."""
        with self._lock:
            self._error = self._error or error
            self.left -= 1
            if self.left:
                return
        try:
            if self._stream is not None:
                # After the copies of all threads, which share this stream.
                self._copied = torch.cuda.Event()
                self._copied.record(self._stream)
        except BaseException as of_gpu:
            self._error = self._error or of_gpu
        finally:
            self._complete.set()


class _Widened(NamedTuple):
    """One read of whole blocks of the file ``name``, within which samples may begin and end."""

    job: Job
    fetch: Fetch
    name: str
    read: Read[Part]


class _Row(NamedTuple):
    """Samples that follow one another in the batch, from byte ``at`` of it on: each is read to its place in turn, and
    for a GPU all are copied at once. An order for each would take longer than to read a small sample."""

    job: Job
    want: Want
    at: int
    samples: Sequence[Where]

    @property
    def paths(self) -> Iterable[str]:
        """Of its files, each once."""
        return dict.fromkeys(sample.path for sample in self.samples)


class StandingReads:
    """Fills memory on ``device`` with samples of ``samples``, by ``threads`` threads of its own until ``close``.

    The host takes, for a GPU, two pinned buffers of ``buffer_bytes`` for each thread, else one that is not pinned.
    """

    def __init__(self, samples: SampleFiles, device: torch.device, threads: int, buffer_bytes: int) -> None:
        self.threads = threads
        self._size, self._device, self._buffer_bytes = samples.sample_bytes, device, buffer_bytes
        self._what = f"a sample of {self._size} bytes"
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        """Of the copies; memory that is filled must be allocated on it."""
        of_device: dict[int, Fetch] = {}
        self._fetches: dict[str, Fetch] = {}
        for path, number in zip(samples.paths, samples.devices, strict=True):
            if number not in of_device:
                # Names are absolute; the path itself says on which file system they all lie.
                files = Files(Path(path), prefer_cache=True, hint=_CHANGED)
                of_device[number] = Fetch(files, device, threads, buffer_bytes)
            self._fetches[path] = of_device[number]
        self._open: collections.OrderedDict[str, Files] = collections.OrderedDict()
        self._orders: SimpleQueue[_Widened | _Row | None] = SimpleQueue()
        self._workers = Workers([self._work] * threads, "tunetool-samples", daemon=True)
        try:
            self._workers.start()
        except RuntimeError as error:
            self.end()
            raise CannotJudge(f"`threads={threads}`: the system starts no more: {error}", "take fewer") from None

    def submit(self, memory: Any, samples: Sequence[Where]) -> Job:
        """Begin to fill ``memory``, uint8, shape (samples x sample_bytes,), with these, one after another."""
        job, want = Job(memory, self.stream), self._want(memory)
        orders = self._rows(job, want, samples) if self._fit(samples) else self._widened(job, want, samples)
        job.left = len(orders)
        for order in orders:
            for path in order.paths if isinstance(order, _Row) else [order.name]:
                self._announce(path)
        for order in orders:
            self._orders.put(order)
        return job

    def close(self) -> None:
        """End the threads, which give their buffers back, and close the files."""
        self.end()
        self._workers.wait()
        for fetch in self._fetches.values():
            fetch.files.close()

    def end(self) -> None:
        """Tell the threads to end, and do not wait for that."""
        for _ in range(self.threads):
            self._orders.put(None)

    def _fit(self, samples: Sequence[Where]) -> bool:
        """Whether each can be read to its place: whole blocks, or files that are not read past the page cache."""
        if self._size > self._buffer_bytes:
            return False
        return not self._size % BLOCK or not any(self._fetches[each.path].files.direct for each in samples)

    def _rows(self, job: Job, want: Want, samples: Sequence[Where]) -> list[_Row | _Widened]:
        """As many samples in a row as make all threads work, in few orders."""
        most = max(1, min(self._buffer_bytes, max(_LEAST_READ, self._size)) // self._size)
        count = min(most, -(-len(samples) // self.threads))
        return [
            _Row(job, want, first * self._size, samples[first : first + count])
            for first in range(0, len(samples), count)
        ]

    def _widened(self, job: Job, want: Want, samples: Sequence[Where]) -> list[_Row | _Widened]:
        """The reads of each file: adjacent samples together, and nothing of what lies between others."""
        size = self._size
        share = len(samples) * size // self.threads
        limit = min(self._buffer_bytes, max(_LEAST_READ, share + -share % BLOCK, size + -size % BLOCK + 2 * BLOCK))
        wanted: dict[str, list[tuple[int, int, Part]]] = {}
        for number, (path, offset) in enumerate(samples):
            wanted.setdefault(path, []).extend(
                (begin, end, Part(want, number * size + begin - offset, None))
                for begin, end in pieces(offset, offset + size, limit)
            )
        return [
            _Widened(job, self._fetches[path], path, read)
            for path, ranges in wanted.items()
            for read in merge(ranges, limit, gap=0)
        ]

    def _want(self, memory: Any) -> Want:
        shape = (len(memory),)
        return Want(self._what, "", 0, Plain(0, len(memory), "uint8", shape), (0,), shape, memory)

    def _announce(self, path: str) -> None:
        """One order for this file, which stays open afterwards: to open it again takes longer than a small read."""
        files = self._fetches[path].files
        if path in self._open:
            self._open.move_to_end(path)
            files.expect([path])
            return
        files.expect([path, path])
        self._open[path] = files
        if len(self._open) > _MOST_OPEN:
            oldest, of_oldest = self._open.popitem(last=False)
            of_oldest.done(oldest)

    def _work(self) -> None:
        with contextlib.ExitStack() as held:
            if self.stream is not None:
                use_gpu(self._device)
                held.enter_context(torch.cuda.stream(self.stream))
            count = BUFFERS if self.stream is not None else 1
            buffers = held.enter_context(Buffers(count, self._buffer_bytes, self.stream))
            while (order := self._orders.get()) is not None:
                self._carry_out(order, buffers)
                # Else this thread would keep a batch's memory until the next one.
                del order

    def _carry_out(self, order: _Widened | _Row, buffers: Buffers) -> None:
        error: BaseException | None = None
        try:
            if isinstance(order, _Row):
                self._fill_row(order, buffers)
            elif order.job.cancelled:
                order.fetch.files.done(order.name)
            else:
                order.fetch.carry_out_one(order.name, order.read, buffers)
        except BaseException as raised:  # carried to whoever waits for the batch
            error = raised
            if self.stream is not None:
                # A copy from this thread's buffer may be queued that the buffer does not know of.
                self.stream.synchronize()
        order.job.finished(error)

    def _fill_row(self, row: _Row, buffers: Buffers) -> None:
        # Each file is closed after its last sample: a row may have one from each of hundreds of files.
        ends = {sample.path: number for number, sample in enumerate(row.samples, 1)}
        try:
            if row.job.cancelled:
                return
            count = len(row.samples) * self._size
            if self.stream is None:
                self._read_each(row.samples, memory_at(row.want.address + row.at, count), ends)
                return
            buffer = buffers.next()
            buffer.wait()
            self._read_each(row.samples, buffer.view[:count], ends)
            buffer.copy_to(row.want, row.at, 0, count)
            buffer.used()
        finally:
            for path in ends:
                self._fetches[path].files.done(path)

    def _read_each(self, samples: Sequence[Where], view: memoryview, ends: dict[str, int]) -> None:
        """Read the samples one after another into ``view``; those that are neighbours in their file at once. ``ends``:
        by file, the number of samples after which it is not needed any more; those are taken out."""
        size, first = self._size, 0
        while first < len(samples):
            path, offset = samples[first]
            last = first + 1
            while last < len(samples) and samples[last] == (path, offset + (last - first) * size):
                last += 1
            files = self._fetches[path].files
            came = files.read(path, view[first * size : last * size], offset, self._what)
            if came < (last - first) * size:
                raise files.truncated(path, self._what, offset + came, offset + came - came % size + size)
            if ends[path] == last:
                del ends[path]
                files.done(path)
            first = last
