"""``iterate``: the tensors one after another in the order of the files, with a bounded number of bytes read ahead."""

from __future__ import annotations

import atexit
import contextlib
import operator
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tunetool.checkpoint.fetch import BUFFERS, Buffers, Fetch, FileRead
from tunetool.checkpoint.host_buffers import use_gpu
from tunetool.checkpoint.workers import Workers
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.loading.device_memory import device_of, named_refusal, rounded, taking
from tunetool.loading.fill import BUFFER_BYTES, Filling, Progress, Reading, checked_reading, is_part, size_of
from tunetool.loading.safetensors_files import Listing, list_tensors
from tunetool.loading.standing_reads import Job
from tunetool.loading.wanted import Wanted, wanted_of

if TYPE_CHECKING:
    from tunetool.loading.shard_plan import ShardPlan

AHEAD_BYTES = 256 << 20
"""Of tensors that are read or wait: what 12 threads have under way in their buffers, two and a half times."""
_BATCHES = 4
"""Into which the bytes ahead are cut, at least: the tensors of one are handed out while the others are read."""
_REPORT_SECONDS = 0.2


def iterate(
    path: str | os.PathLike[str],
    device: str | torch.device = "cpu",
    *,
    shard: ShardPlan | None = None,
    ahead_bytes: int = AHEAD_BYTES,
    progress: Callable[[Progress], None] | None = None,
    threads: int | None = None,
    buffer_bytes: int = BUFFER_BYTES,
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Name and tensor of everything in ``path``, on ``device``: by files in the order of their names, and within a file
    by offset. As inference engines take weights: what is not held is freed.

    Tensors that are read, or were read and not yet handed out, take ``ahead_bytes`` at most (256 MiB), or the largest
    tensor alone where it is larger. What the caller holds comes on top: in a plain loop, one tensor. Each tensor has
    memory of its own from torch's allocator, of the stream that was current when it was asked for; it stays as it is
    for as long as anything refers to it, and may be used, kept or changed as any other.

    The threads start with the first ``next``, and have ended when the last tensor was handed out, an error was raised,
    or the generator was closed, which is done when nothing refers to it any more. ``shard``, ``progress``,
    ``threads`` and ``buffer_bytes`` are those of ``load``. There is no ``group``: each rank reads all that it gets.

    Raises the errors of ``load``: those of the call, the files' headers and the device at once, those of reading by
    ``next``. A file that was cut short or changed is refused before the last tensor is handed out.
    """
    reading = checked_reading(threads, buffer_bytes, progress)
    try:
        most = operator.index(ahead_bytes)
    except TypeError:
        most = 0
    if most < 1:
        raise UsageProblem(f"`ahead_bytes={ahead_bytes!r}`: a whole number of at least 1 byte", "leave it out")
    target = device_of(device)
    listing = list_tensors(Path(path))
    return _tensors(listing, wanted_of(listing, shard), target, most, reading)


def _tensors(
    listing: Listing, wanted: Sequence[Wanted], device: torch.device, most: int, reading: Reading
) -> Generator[tuple[str, torch.Tensor], None, None]:
    batches = list(cut(wanted, max(1, most // _BATCHES)))
    largest = max((batch.bytes for batch in batches), default=0)
    with taking(device, max(largest, min(most, sum(batch.bytes for batch in batches))), f"reading `{listing.path}`"):
        pass
    filling = Filling(listing, sum(each.bytes for each in wanted), reading)
    if not batches:
        filling.finish()
    with contextlib.closing(_ReadAhead(filling, device)) as ahead:
        waiting, room, told = deque(batches), most, time.monotonic()
        coming: deque[tuple[Batch, _Memory, Job]] = deque()
        while waiting or coming:
            while waiting and (not coming or waiting[0].bytes <= room):
                batch = waiting.popleft()
                with named_refusal(device, batch.bytes, f"reading `{listing.path}`"):
                    memory = _Memory(torch.empty(each.shape, dtype=each.dtype, device=device) for each in batch.tensors)
                coming.append((batch, memory, ahead.submit(batch, memory)))
                room -= batch.bytes
            batch, memory, job = coming.popleft()
            job.wait()
            filling.add(sum(each.bytes for each in batch.tensors), ahead.release(batch))
            if not waiting and not coming:
                ahead.close()
                listing.check_unchanged()
                filling.finish()
            elif reading.progress and time.monotonic() - told > _REPORT_SECONDS:
                told = time.monotonic()
                filling.has_come(0, 0)
            for each in batch.tensors:
                room += rounded(each.bytes)
                yield each.stored.name, memory.pop_first()


class Batch(NamedTuple):
    """Tensors that follow one another and are read together; ``bytes``: what they take on a device."""

    tensors: Sequence[Wanted]
    bytes: int

    @property
    def files(self) -> set[str]:
        return {each.stored.file for each in self.tensors}


def cut(tensors: Iterable[Wanted], most: int) -> Iterator[Batch]:
    """The tensors in their order in batches of at most ``most`` bytes, or of one tensor that is larger."""
    batch: list[Wanted] = []
    count = 0
    for tensor in tensors:
        size = rounded(tensor.bytes)
        if batch and count + size > most:
            yield Batch(batch, count)
            batch, count = [], 0
        batch.append(tensor)
        count += size
    if batch:
        yield Batch(batch, count)


class _Memory:
    """The tensors of a batch that were not handed out."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.tensors = deque(tensors)

    def pop_first(self) -> torch.Tensor:
        return self.tensors.popleft()

    def record_stream(self, stream: Any) -> None:
        """``stream`` uses them: whoever frees one has it used no earlier than that stream is through with it."""
        for tensor in self.tensors:
            tensor.record_stream(stream)


class _Order(NamedTuple):
    job: Job
    read: FileRead


_OPEN = weakref.WeakSet["_ReadAhead"]()


@atexit.register
def _close_all() -> None:
    """Without this, a generator that something still refers to would be closed when its threads do not run any more,
    and wait for them for ever."""
    for ahead in list(_OPEN):
        ahead.close()


class _ReadAhead:
    """Threads that read batches until ``close``, with the buffers of a load."""

    def __init__(self, filling: Filling, device: torch.device) -> None:
        self._filling, self._device = filling, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._fetch: Fetch = filling.fetch(device)
        self._orders: SimpleQueue[_Order | None] = SimpleQueue()
        self._jobs: deque[tuple[Job, int]] = deque()
        self._closed = False
        self._process = os.getpid()
        _OPEN.add(self)
        self._workers = Workers([self._work] * filling.threads, "tunetool-read", daemon=True)
        try:
            self._workers.start()
        except BaseException as error:
            self.close()
            if isinstance(error, RuntimeError):
                raise CannotJudge(
                    f"`threads={filling.threads}`: the system starts no more: {error}", "take fewer"
                ) from None
            raise

    def submit(self, batch: Batch, memory: _Memory) -> Job:
        """Begin to read a batch into its tensors."""
        job = Job(memory, self._stream)
        pairs = zip(batch.tensors, memory.tensors, strict=True)
        wants = [each for tensor, target in pairs if tensor.bytes for each in tensor.wants(target)]
        files = self._filling.files
        for name in batch.files:
            # Open until the batch is there: between two reads it would be closed and opened again.
            files.expect([name])
        reads = self._filling.plan(wants)
        files.expect(name for name, _ in reads)
        if self._stream is not None:
            # The memory may have been another tensor's, which the caller's stream still uses.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        # One more, ended here: a batch may have nothing to be read.
        job.left = len(reads) + 1
        # As `Filling.read` counts.
        has_parts = any(map(is_part, wants))
        self._jobs.append(
            (job, sum(each.stop - each.start for _, each in reads) if has_parts else sum(map(size_of, wants)))
        )
        for read in reads:
            self._orders.put(_Order(job, read))
        job.finished(None)
        return job

    def release(self, batch: Batch) -> int:
        """The first batch is there: its files may be closed, unless another one needs them. The bytes read for it."""
        for name in batch.files:
            self._filling.files.done(name)
        return self._jobs.popleft()[1]

    def close(self) -> None:
        """Read no more, end the threads, which give their buffers back, and close the files."""
        if self._closed or os.getpid() != self._process:
            return  # a fork has none of the threads
        self._closed = True
        for job, _ in self._jobs:
            job.cancelled = True
        for _ in range(self._filling.threads):
            self._orders.put(None)
        if self._workers.include_this_thread():
            # Where the garbage collector runs in one of them, and finds the generator.
            threading.Thread(target=self._finish, name="tunetool-close", daemon=True).start()
        else:
            self._finish()

    def _finish(self) -> None:
        try:
            self._workers.wait()
        finally:
            # A second interruption ends the wait for threads that still read.
            if self._workers.are_running:
                self._filling.files.leave_open()
            self._filling.files.close()

    def _work(self) -> None:
        ended = False
        try:
            with contextlib.ExitStack() as held:
                if self._stream is not None:
                    use_gpu(self._device)
                    held.enter_context(torch.cuda.stream(self._stream))
                count = BUFFERS if self._stream is not None else 1
                buffers = held.enter_context(Buffers(count, self._filling.buffer_bytes, self._stream))
                while (order := self._orders.get()) is not None:
                    self._carry_out(order, buffers)
                    # Else this thread would keep the tensors until it has another order.
                    del order
                ended = True
        except BaseException as error:  # of the GPU: whoever waits must hear of it
            while not ended and (order := self._orders.get()) is not None:
                order.job.finished(error)

    def _carry_out(self, order: _Order, buffers: Buffers) -> None:
        error: BaseException | None = None
        name, read = order.read
        try:
            if order.job.cancelled:
                self._filling.files.done(name)
            else:
                self._fetch.carry_out_one(name, read, buffers)
        except BaseException as raised:  # carried to whoever waits for the batch
            error = raised
        order.job.finished(error)
