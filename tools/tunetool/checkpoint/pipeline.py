"""Threads that fill host buffers from tensors and write them to files, both at the same time.

Each thread has its own buffers. It fills one (from a GPU by an asynchronous copy on a side stream) before it writes the
previous one: with two buffers this is double buffering; with enough buffers for all data, everything is copied first,
and the tensors are free again while the files are still being written. Threads share only the queues of blocks, so a
block rarely needs the interpreter's lock.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from tunetool.checkpoint.ahead import Ahead
from tunetool.checkpoint.checksums import Stopped, Turns
from tunetool.checkpoint.direct import DataFile
from tunetool.checkpoint.filling import Filling
from tunetool.checkpoint.host_buffers import Buffer, use_gpu
from tunetool.checkpoint.layout import Block
from tunetool.checkpoint.workers import Workers


@dataclass
class _Filled:
    block: Block
    view: memoryview
    buffer: Buffer | None = None
    copied: list[Any] = field(default_factory=list)
    """CUDA events after which the bytes are in the buffer."""


class Pipeline:
    """Writes one rank's part of a save. ``open_files`` creates all files before the first is written; ``blocks`` are
    those of one file after another, ordered by offset; ``filling`` brings their bytes; ``complete`` gets each block
    once its bytes are in host memory, and may change it; ``after``: CUDA events that must have passed before tensors
    are read; ``on_copied`` is called when no tensor is needed any more. ``turns``: is stopped if a thread fails.
    ``reading``: further CUDA streams that read tensors. ``ahead``: a copy that fills the ``buffers``, one for each
    block; ``filling`` brings the rest.

    A thread takes the blocks of a file in order, and finishes blocks in the order in which it took them. So a thread
    that waits for the checksum of earlier bytes waits for blocks that were taken earlier: there is no deadlock.
    """

    def __init__(
        self,
        open_files: Callable[[], Sequence[DataFile]],
        blocks: Sequence[Block],
        filling: Filling,
        buffers: Sequence[Buffer],
        complete: Callable[[Block, memoryview], None],
        turns: Turns,
        after: Sequence[Any] = (),
        on_copied: Callable[[], None] = lambda: None,
        reading: Sequence[Any] = (),
        ahead: Ahead | None = None,
    ) -> None:
        self._open_files, self._complete, self._after, self._on_copied = open_files, complete, after, on_copied
        self._turns, self._filling = turns, filling
        self._files: Sequence[DataFile] = ()
        self._opened = threading.Event()
        self._todo = [deque(its) for _, its in itertools.groupby(blocks, lambda block: block.file)]
        self._unfilled = len(blocks)
        self._unwritten = Counter(block.file for block in blocks)
        self._buffers = buffers
        self._counting = threading.Lock()
        self._error: BaseException | None = None
        self._streams = [*reading, *(ahead.streams if ahead else ())]
        self._ahead = ahead
        self._workers = Workers([], "")
        self.copy_seconds = 0.0

    def run(self, threads: int, gpu: torch.device | None = None) -> None:
        """Write all blocks with ``threads`` threads. Raises the first error of any thread after all threads have
        ended."""
        self._began = time.monotonic()
        shares = [self._buffers[number::threads] for number in range(threads)]
        works = [functools.partial(self._work, number, share, gpu) for number, share in enumerate(shares)]
        self._workers = Workers(works, "tunetool-write")
        try:
            if not self._unfilled:
                self._copied()
            self._workers.start()
            # Creating and preallocating files, and what else is done here, takes a while; the first buffers are filled
            # meanwhile.
            self._files = self._open_files()
            self._opened.set()
            self._workers.wait()
        except BaseException as error:
            self._fail(error)
            self._workers.wait()
        finally:
            # A copy in progress still writes to buffers that the next save will use.
            for stream in self._streams:
                stream.synchronize()
        if self._error is not None:
            raise self._error

    @property
    def uses_nothing(self) -> bool:
        """Whether no thread uses the buffers and files any more. A second interruption (Ctrl-C, or a handler of SIGTERM
        that raises) ends the wait for threads that still copy or write."""
        return not self._workers.are_running

    def _fail(self, error: BaseException) -> None:
        with self._counting:
            self._error = self._error or error
        self._turns.stop()
        self._opened.set()

    def _work(self, number: int, buffers: Sequence[Buffer], gpu: torch.device | None) -> None:
        free, filled = deque(buffers), deque[_Filled]()
        streams: dict[torch.device, Any] = {}
        try:
            use_gpu(gpu)
            while self._error is None:
                block = self._take(number, bool(free))
                if block is not None:
                    filled.append(self._fill(block, free, streams))
                if filled and (block is None or block.zero_copy or not free):
                    done = filled.popleft()
                    self._write(done)
                    if done.buffer is not None:
                        free.append(done.buffer)
                elif block is None:
                    return
        except Stopped:
            pass
        except BaseException as error:
            self._fail(error)

    def _take(self, number: int, can_fill: bool) -> Block | None:
        """The next block: of this thread's preferred file, otherwise of the file with the most blocks left. (In a
        tmpfs, only one thread at a time can write to a file.)"""
        if not self._todo:
            return None
        with self._counting:
            preferred = self._todo[number % len(self._todo)]
            for queue in (preferred,) if preferred else sorted(self._todo, key=len, reverse=True):
                if queue and (can_fill or queue[0].zero_copy):
                    return queue.popleft()
        return None

    def _fill(self, block: Block, free: deque[Buffer], streams: dict[torch.device, Any]) -> _Filled:
        if block.zero_copy:
            filled = _Filled(block, self._filling.memory(block))
        else:
            buffer = free.popleft()
            begun = []
            if self._ahead is not None:
                buffer, begun = self._buffers[block.number], self._ahead.copied
            copied = [*begun, *self._filling.fill(block, buffer, lambda device: self._stream(device, streams))]
            filled = _Filled(block, buffer.view[: block.length], buffer, copied)
        with self._counting:
            self._unfilled -= 1
            last = not self._unfilled
        if last:
            self._copied()
        return filled

    def _stream(self, device: torch.device, streams: dict[torch.device, Any]) -> Any:
        if device not in streams:
            stream = torch.cuda.Stream(device)
            for event in self._after:
                # Not on the GPU: a thread that starts copies by address may have the interpreter's lock meanwhile
                # (`host_buffers.to_host`), and must never wait for work which another thread has still to start.
                event.synchronize()
            with self._counting:
                self._streams.append(stream)
            streams[device] = stream
        return streams[device]

    def _copied(self) -> None:
        for stream in self._streams:
            stream.synchronize()
        self.copy_seconds = time.monotonic() - self._began
        self._on_copied()

    def _write(self, filled: _Filled) -> None:
        self._opened.wait()
        if self._error is not None:
            raise Stopped
        block, file = filled.block, self._files[filled.block.file]
        for event in filled.copied:
            event.synchronize()
        if filled.view:
            self._complete(block, filled.view)
            file.write(filled.view, block.offset)
        else:
            for event in self._after:
                event.synchronize()
            device, address = self._filling.on_gpu(block)
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                file.write_from_gpu(address, block.length, block.offset)
        with self._counting:
            self._unwritten[block.file] -= 1
            finished = not self._unwritten[block.file]
        if finished:
            file.sync()
            file.close()
