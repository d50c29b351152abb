"""Threads that fill buffers from tensors and write them to files, both at once.

A block is filled as soon as a buffer is free (from a GPU by a copy on a side stream, which does not hold the thread)
and written once its bytes are there. With two buffers for each thread that is double buffering; with as many as the
data takes, all of it is copied first and the tensors are free again while the files are still written.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from tunetool.checkpoint.direct import DataFile, memory_at
from tunetool.checkpoint.layout import Block, Piece
from tunetool.checkpoint.staging import Buffer, Source


class Digest:
    """xxh3_64 of one tensor's raw bytes, which come in pieces, in order, from several threads."""

    def __init__(self, total: int) -> None:
        import xxhash  # noqa: PLC0415  only who asks for checksums needs it

        self._hash = xxhash.xxh3_64()
        self.total, self.position = total, 0

    def feed(self, view: memoryview) -> None:
        self._hash.update(view)

    def result(self) -> str:
        return str(self._hash.hexdigest())


@dataclass
class _Filled:
    block: Block
    view: memoryview
    buffer: Buffer | None = None
    copied: list[Any] = field(default_factory=list)
    """CUDA events after which the bytes are in the buffer."""


class Stopped(Exception):
    """Another thread failed; that one's error is the one to tell."""


class Pipeline:
    """One rank's save. ``blocks`` of one file are in the order of their offsets; ``after`` are the events that the
    tensors' GPUs must have passed before they are read; ``on_copied`` is called once no tensor is needed any more."""

    def __init__(
        self,
        files: Sequence[DataFile],
        blocks: Sequence[Sequence[Block]],
        buffers: Sequence[Buffer],
        digests: dict[int, Digest],
        after: Sequence[Any] = (),
        on_copied: Callable[[], None] = lambda: None,
    ) -> None:
        self._files, self._digests, self._after, self._on_copied = files, digests, after, on_copied
        # One block of each file in turn: files in memory are held one thread at a time by the kernel.
        longest = max(map(len, blocks), default=0)
        self._todo = deque(own[turn] for turn in range(longest) for own in blocks if turn < len(own))
        self._unfilled = len(self._todo)
        self._orders = [deque(map(id, own)) for own in blocks]
        self._unwritten = [len(own) for own in blocks]
        self._ready: list[dict[int, _Filled]] = [{} for _ in blocks]
        self._writers = [0] * len(blocks)
        self._buffers = deque(buffers)
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._streams: list[Any] = []
        self.copy_seconds = self.write_seconds = 0.0

    def run(self, threads: int) -> None:
        """Raises the first error of any thread, after all of them have ended."""
        self._began = time.monotonic()
        workers = [threading.Thread(target=self._work, name=f"tunetool-write-{n}", daemon=True) for n in range(threads)]
        try:
            if not self._todo:
                self._copied()
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        except BaseException as error:
            self._fail(error)
            for worker in workers:
                if worker.ident is not None:
                    worker.join()
        finally:
            # A copy under way still writes to buffers that the next save will take.
            for stream in self._streams:
                stream.synchronize()
        self.write_seconds = time.monotonic() - self._began
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        streams: dict[torch.device, Any] = {}
        try:
            while (task := self._next()) is not None:
                if isinstance(task, _Filled):
                    self._write(task)
                else:
                    self._fill(*task, streams)
        except Stopped:
            pass
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _wait(self, until: Callable[[], bool]) -> None:
        """Holding the condition."""
        self._changed.wait_for(lambda: self._error is not None or until())
        if self._error is not None:
            raise Stopped

    def _next(self) -> tuple[Block, Buffer] | _Filled | None:
        """Something to fill, else something to write; None when all is taken."""
        with self._changed:
            while True:
                if self._error is not None:
                    raise Stopped
                if self._todo and (self._buffers or self._todo[0].straight):
                    block = self._todo.popleft()
                    if not block.straight:
                        return block, self._buffers.popleft()
                    self._straight(block)
                    continue
                file = self._file_to_write()
                if file is not None:
                    self._writers[file] += 1
                    return self._ready[file].pop(self._orders[file].popleft())
                if not any(self._orders):
                    return None
                self._changed.wait()

    def _straight(self, block: Block) -> None:
        piece = block.pieces[0]
        address = piece.part.content.address + piece.start
        self._filled(_Filled(block, memory_at(address, piece.count)))

    def _file_to_write(self) -> int | None:
        """Of those whose next block is there, the one with the fewest threads in it, then the most left to do.

        A file's blocks are begun in order, so that whoever waits for the checksum of the bytes before its own waits
        for a thread that is at work.
        """
        ready = [file for file, order in enumerate(self._orders) if order and order[0] in self._ready[file]]
        return min(ready, key=lambda file: (self._writers[file], -len(self._orders[file])), default=None)

    def _filled(self, filled: _Filled) -> None:
        """Holding the condition."""
        self._ready[filled.block.file][id(filled.block)] = filled
        self._unfilled -= 1
        self._changed.notify()

    def _fill(self, block: Block, buffer: Buffer, streams: dict[torch.device, Any]) -> None:
        at = 0
        by_device: dict[torch.device, list[Piece]] = {}
        for piece in block.pieces:
            if piece.at > at:
                buffer.view[at : piece.at] = bytes(piece.at - at)
            at = piece.at + piece.count
            content = piece.part.content
            if isinstance(content, bytes):
                buffer.view[piece.at : at] = content[piece.start : piece.start + piece.count]
            elif isinstance(content, Source):
                by_device.setdefault(content.tensor.device, []).append(piece)
        buffer.view[at : block.length] = bytes(block.length - at)
        events = []
        for device, pieces in by_device.items():
            on_gpu = device.type == "cuda"
            with torch.cuda.stream(self._stream(device, streams)) if on_gpu else nullcontext():
                for piece in pieces:
                    piece.part.content.copy(piece.start, piece.count, buffer, piece.at)
            if on_gpu:
                events.append(torch.cuda.Event(blocking=True))
                events[-1].record(streams[device])
        with self._changed:
            self._filled(_Filled(block, buffer.view[: block.length], buffer, events))
            last = not self._unfilled
        if last:
            self._copied()

    def _stream(self, device: torch.device, streams: dict[torch.device, Any]) -> Any:
        if device not in streams:
            stream = torch.cuda.Stream(device)
            for event in self._after:
                stream.wait_event(event)
            with self._changed:
                self._streams.append(stream)
            streams[device] = stream
        return streams[device]

    def _copied(self) -> None:
        for stream in self._streams:
            stream.synchronize()
        self.copy_seconds = time.monotonic() - self._began
        self._on_copied()

    def _write(self, filled: _Filled) -> None:
        block, file = filled.block, self._files[filled.block.file]
        for event in filled.copied:
            event.synchronize()
        for piece in block.pieces:
            part = piece.part
            if callable(part.content):
                self._wait_for_digest(part.item, None)
                filled.view[piece.at : piece.at + piece.count] = part.content()[piece.start : piece.start + piece.count]
            elif part.item in self._digests:
                self._digest(part.item, part.position + piece.start, filled.view[piece.at : piece.at + piece.count])
        file.write(filled.view, block.offset)
        with self._changed:
            self._writers[block.file] -= 1
            self._unwritten[block.file] -= 1
            finished = not self._unwritten[block.file]
            if filled.buffer is not None:
                self._buffers.append(filled.buffer)
            self._changed.notify_all()
        if finished:
            file.sync()
            file.close()

    def _wait_for_digest(self, item: int | None, position: int | None) -> None:
        digest = self._digests.get(item) if item is not None else None
        if digest is None:
            return
        wanted = digest.total if position is None else position
        with self._changed:
            self._wait(lambda: digest.position == wanted)

    def _digest(self, item: int | None, position: int, view: memoryview) -> None:
        assert item is not None  # noqa: S101
        self._wait_for_digest(item, position)
        digest = self._digests[item]
        digest.feed(view)
        with self._changed:
            digest.position += len(view)
            self._changed.notify_all()
