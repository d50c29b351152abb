"""Writes files of an export: several threads each read a window of one out of the checkpoint, check and write it.

No file is ever in memory as a whole. What lies in a file of the checkpoint as it will in the export is planned once,
read into a window by few calls, and written from there; what is saved in another order is read by ``BoxReader``.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tunetool.checkpoint import checksums
from tunetool.checkpoint.box_reader import Box, BoxReader, overflows
from tunetool.checkpoint.checksums import Turns, block_bytes, number_of_blocks
from tunetool.checkpoint.direct import DataFile, Target
from tunetool.checkpoint.export_plan import File, Part, parts
from tunetool.checkpoint.host_buffers import Buffer, within_host
from tunetool.checkpoint.os_errors import WriteFailed
from tunetool.checkpoint.raw_bytes import BLOCK, ITEM_SIZES
from tunetool.checkpoint.regions import GAP, merge
from tunetool.checkpoint.source import Files
from tunetool.checkpoint.stretches import Stretch, StretchReader
from tunetool.checkpoint.workers import BUFFER_BYTES, Workers, default_threads
from tunetool.errors import CannotJudge, UsageProblem

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

WINDOW = 16 << 20
"""Of a file that has tensors which are saved in another order: each window takes a plan of its own."""
_STRAIGHT = BUFFER_BYTES
"""Of another file."""
_BUFFER = BUFFER_BYTES + 2 * BLOCK
"""For what is not read where it belongs: a piece of ``BUFFER_BYTES`` at most, with the blocks at its ends."""
FILES_AT_A_TIME = 4
"""Files that are written concurrently: of one file, a tmpfs lets one thread at a time write."""
_READERS = 2
"""Threads that a ``BoxReader`` has."""
_TICK_SECONDS = 0.2


def lanes() -> int:
    """Threads that each have a window: while some wait for the storage they read, others wait for the one they
    write."""
    return min(8, default_threads())


def memory() -> int:
    """Bytes of a process at most: besides its window, a thread has a buffer and what it converts to half as many bytes.
    A tensor that is not plain in its file is read whole beside that."""
    return lanes() * (3 * WINDOW + _BUFFER + _READERS * BUFFER_BYTES)


class Stopped(Exception):
    """The caller asked for an end."""


class _Run(NamedTuple):
    """A stretch, saved as ``saved``, that is the bytes [start, stop) of a file, as ``to``."""

    start: int
    stop: int
    stretch: Stretch
    saved: str
    to: str


class _Piece(NamedTuple):
    """Bytes [start, stop) of a file of the checkpoint that belong at the byte ``at`` of a window, as ``to``."""

    stretch: Stretch
    start: int
    stop: int
    at: int
    saved: str
    to: str


class _Window(NamedTuple):
    """The bytes [start, stop) of a file. ``parts``: what ``BoxReader`` reads."""

    file: File
    written: DataFile
    start: int
    stop: int
    pieces: list[_Piece]
    parts: list[Part]


class FileWriter:
    """Writes files into ``directory`` from the checkpoint in ``step``."""

    def __init__(self, step: Path, directory: Path, described: Metadata | None = None) -> None:
        self._target, self._step = Target(directory), step
        self._boxes = BoxReader(step, threads=_READERS, described=described)
        self._stretches = StretchReader(step)
        self._stretches.set_up_storage_reader(self._boxes.described, True)
        self._lanes: list[_Lane] = []

    @property
    def overflows(self) -> int:
        """Numbers that became infinite by a conversion."""
        return sum(lane.overflows for lane in self._lanes)

    def write(self, files: Sequence[File], tick: Callable[[int], bool]) -> None:
        """Write the files durably. ``tick`` gets the bytes that were written since its last call, several times a
        second, and says whether to go on.

        Raises ``CannotJudge`` where a tensor is damaged or the storage refuses; ``Stopped``.
        """
        try:
            for first in range(0, len(files), FILES_AT_A_TIME):
                self._write(files[first : first + FILES_AT_A_TIME], tick)
        except WriteFailed as error:
            raise CannotJudge(error.message, "look at `df` and `dmesg | tail`: nothing was exported") from error
        except UsageProblem as error:  # the call was right: a file is not what a checkpoint has
            raise CannotJudge(error.message, error.hint) from None

    def _write(self, files: Sequence[File], tick: Callable[[int], bool]) -> None:
        with contextlib.ExitStack() as opened:
            written = [
                opened.enter_context(
                    contextlib.closing(DataFile(path, file.length + -file.length % BLOCK, self._target))
                )
                for file in files
                for path in [self._target.directory / file.name]
            ]
            source, turns = Files(self._step, contained=True), Turns()
            opened.callback(source.close)
            each = [self._windows(*pair, source, turns) for pair in zip(files, written, strict=True)]
            windows = [window for row in itertools.zip_longest(*each) for window in row if window is not None]
            source.expect(piece.stretch.file for window in windows for piece in window.pieces)
            self._run(windows, source, turns, tick)
            for file, out in zip(files, written, strict=True):
                os.truncate(out.path, file.length)
                out.sync()

    def _windows(self, file: File, written: DataFile, source: Files, turns: Turns) -> Iterator[_Window]:
        found = self._stretches.find([placed.tensor.saved for placed in file.tensors], source, turns)
        runs = sorted(_runs(file, found, self._boxes.entries))
        starts, ends = [run.start for run in runs], [run.stop for run in runs]
        straight = len(found) == len(file.tensors)
        size = min(WINDOW, _STRAIGHT) if straight else WINDOW
        stop = 0
        while stop < file.length:
            start, stop = stop, min(stop + size, file.length)
            if stop < file.length and (number := bisect.bisect_right(starts, stop) - 1) >= 0:
                stop = _edge(runs[number], start, stop)
            there = runs[bisect.bisect_right(ends, start) : bisect.bisect_left(starts, stop)]
            pieces = [piece for run in there for piece in _pieces(run, start, stop)]
            odd = [] if straight else [part for part in parts(file, start, stop) if part.tensor.saved not in found]
            yield _Window(file, written, start, stop, pieces, odd)

    def _run(self, windows: Sequence[_Window], source: Files, turns: Turns, tick: Callable[[int], bool]) -> None:
        queue = iter(windows)
        done: list[int] = []
        errors: list[BaseException] = []
        alignment = next(
            (source.memory_alignment(each.stretch.file) for window in windows for each in window.pieces), 1
        )
        most = max((window.stop - window.start for window in windows), default=0)

        def work(lane: _Lane) -> None:
            try:
                lane.prepare(most, alignment)
                for window in queue:
                    if errors:
                        return
                    count = window.stop - window.start
                    lane.fill(window, source)
                    window.written.write(lane.view[: count + -count % BLOCK], window.start)
                    done.append(count)
            except checksums.Stopped:
                pass
            except BaseException as error:  # carried to the thread that waits
                errors.append(error)
                turns.stop()

        while len(self._lanes) < lanes():
            self._lanes.append(_Lane(self._step, self._boxes.described))
        workers = Workers([partial(work, lane) for lane in self._lanes[: len(windows)]], "tunetool-export")
        told, is_over = 0, False
        try:
            workers.start()
            while not is_over:
                is_over = workers.wait(_TICK_SECONDS)
                count = len(done)
                if not tick(sum(done[told:count])):
                    raise Stopped
                told = count
        except BaseException as error:
            errors.append(error)
            turns.stop()
            workers.wait()
            raise
        if errors:
            raise errors[0]


def _runs(file: File, found: dict[str, list[Stretch]], entries: dict[str, Any]) -> Iterator[_Run]:
    for tensor, at in file.tensors:
        saved = str(entries[tensor.saved].properties.dtype).removeprefix("torch.")
        size = ITEM_SIZES[tensor.dtype]
        for stretch in found.get(tensor.saved, ()):
            start = at + stretch.first * size
            yield _Run(start, start + stretch.length // ITEM_SIZES[saved] * size, stretch, saved, tensor.dtype)


def _edge(run: _Run, start: int, stop: int) -> int:
    """Where a window from ``start`` on ends best, at ``stop`` at the latest, in this run: between two blocks, each of
    which has a sum, or else a thread waits for the one that has the first part of a block."""
    first, end, stretch, saved, to = run
    if end <= stop:
        return stop
    size = block_bytes(stretch.length) // ITEM_SIZES[saved] * ITEM_SIZES[to]
    edge = first + min((stop - first) // size, number_of_blocks(stretch.length) - 1) * size
    return edge if edge > start and not edge % BLOCK else stop


def _pieces(run: _Run, start: int, stop: int) -> Iterator[_Piece]:
    first, end, stretch, saved, to = run
    item, size = ITEM_SIZES[saved], ITEM_SIZES[to]
    low, high = max(first, start), min(end, stop)
    step = BUFFER_BYTES // item * size
    for at in range(low, high, step):
        begin, over = ((place - first) // size * item for place in (at, min(at + step, high)))
        yield _Piece(stretch, stretch.start + begin, stretch.start + over, at - start, saved, to)


class _Lane:
    """What one thread has."""

    def __init__(self, step: Path, described: Metadata) -> None:
        self._step, self._described = step, described
        self._boxes: BoxReader | None = None
        self._window: Buffer | None = None
        self._overflows = 0

    @property
    def overflows(self) -> int:
        return self._overflows + (self._boxes.overflows if self._boxes is not None else 0)

    def prepare(self, size: int, alignment: int) -> None:
        """For windows of ``size`` bytes; ``alignment``: that a direct read needs of its memory."""
        self._alignment = alignment
        size += BLOCK + -size % BLOCK  # a direct read may end up to a block behind the window
        if self._window is None or self._window.size < size:
            self._window, self._buffer = Buffer(size, pinned=False), Buffer(_BUFFER, pinned=False)
        self.view = self._window.view

    def fill(self, window: _Window, source: Files) -> None:
        """Read the window. Raises ``CannotJudge``; ``checksums.Stopped``."""
        header = window.file.header[window.start : window.stop]
        self.view[: len(header)] = header
        through: dict[str, list[tuple[int, int, _Piece]]] = {}
        for piece in window.pieces:
            # A direct read overwrites what follows up to the block's end, and the next piece comes there later.
            if self._fits(piece, source):
                count = piece.stop - piece.start
                self._read(source, self.view[piece.at :], piece.start, piece.stop, [piece])
                _check(piece, self.view[piece.at : piece.at + count])
            else:
                through.setdefault(piece.stretch.file, []).append((piece.start, piece.stop, piece))
        for some in through.values():
            for read in merge(some, _BUFFER):
                self._read(source, self._buffer.view, read.start, read.stop, [piece for _, _, piece in read.wanted])
                for start, _, piece in read.wanted:
                    self._take(piece, start - read.start)
        if window.parts:
            self._read_boxes(window)

    def _fits(self, piece: _Piece, source: Files) -> bool:
        """Whether it is read where it belongs."""
        if piece.saved != piece.to or not source.direct:
            return piece.saved == piece.to
        assert self._window is not None  # noqa: S101  (prepared)
        is_aligned = not piece.start % BLOCK and not (self._window.address + piece.at) % self._alignment
        return is_aligned and piece.stop - piece.start > GAP

    def _read(self, source: Files, view: memoryview, start: int, stop: int, wanted: Sequence[_Piece]) -> None:
        stretch = wanted[0].stretch
        try:
            count = stop - start + (-(stop - start) % BLOCK if source.direct else 0)
            came = source.read(stretch.file, view[:count], start, stretch.tensor)
            for piece in wanted:
                if piece.stop > start + came:
                    raise source.truncated(stretch.file, piece.stretch.tensor, start + came, piece.stop)
        finally:
            for _ in wanted:
                source.done(stretch.file)

    def _take(self, piece: _Piece, first: int) -> None:
        """Check and copy what is in the buffer from ``first`` on."""
        assert self._window is not None  # noqa: S101  (prepared)
        count = piece.stop - piece.start
        _check(piece, self._buffer.view[first : first + count])
        if piece.saved == piece.to:
            within_host(self._window.address + piece.at, self._buffer.address + first, count)
            return
        raw = self._buffer.tensor[first : first + count]
        saved = (raw.clone() if first % ITEM_SIZES[piece.saved] else raw).view(getattr(torch, piece.saved))
        size = len(saved) * ITEM_SIZES[piece.to]
        target = self._window.tensor[piece.at : piece.at + size].view(getattr(torch, piece.to))
        target.copy_(saved)
        self._overflows += overflows(saved, target)

    def _read_boxes(self, window: _Window) -> None:
        assert self._window is not None  # noqa: S101  (prepared)
        if self._boxes is None:
            self._boxes = BoxReader(self._step, threads=_READERS, described=self._described)
        boxes, targets = [], []
        for part in window.parts:
            at = part.start - window.start
            boxes.append(Box(part.tensor.saved, part.offsets, part.lengths, part.bytes))
            flat = self._window.tensor[at : at + part.bytes].view(getattr(torch, part.tensor.dtype))
            targets.append(flat.view(part.lengths))
        self._boxes.read(boxes, targets)


def _check(piece: _Piece, raw: memoryview) -> None:
    if piece.stretch.sums is not None:
        piece.stretch.sums.feed(piece.start - piece.stretch.start, raw)
