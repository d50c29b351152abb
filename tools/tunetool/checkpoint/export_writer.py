"""Writes one file of an export: several threads each read a window of it out of the checkpoint and write it.

The file is never in memory as a whole: a thread has a window, and what is converted or reordered into it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tunetool.checkpoint.box_reader import Box, BoxReader
from tunetool.checkpoint.direct import DataFile, Target
from tunetool.checkpoint.export_plan import File, parts
from tunetool.checkpoint.os_errors import WriteFailed
from tunetool.checkpoint.raw_bytes import BLOCK, pages
from tunetool.checkpoint.workers import BUFFER_BYTES, Workers
from tunetool.errors import CannotJudge

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

WINDOW = 32 << 20
LANES = 3
"""Threads that each have a window: while some wait for the storage they read, others wait for the one they write."""
_READERS = 2
"""Threads that read for one of them."""
MEMORY = LANES * (3 * WINDOW + _READERS * BUFFER_BYTES)
"""Bytes of a process at most: besides its window, a thread has what it converts to half as many bytes. A tensor that is
not plain in its file is read whole beside that."""
_TICK_SECONDS = 0.2


class Stopped(Exception):
    """The caller asked for an end."""


class FileWriter:
    """Writes files into ``directory`` from the checkpoint in ``step``."""

    def __init__(self, step: Path, directory: Path, described: Metadata | None = None) -> None:
        self._target = Target(directory)
        self._readers = [BoxReader(step, threads=_READERS, described=described)]
        while len(self._readers) < LANES:
            self._readers.append(BoxReader(step, threads=_READERS, described=self._readers[0].described))
        self._buffers = [memoryview(pages(WINDOW)) for _ in self._readers]

    @property
    def overflows(self) -> int:
        """Numbers that became infinite by a conversion."""
        return sum(reader.overflows for reader in self._readers)

    def write(self, file: File, tick: Callable[[int], bool]) -> None:
        """Write the file durably. ``tick`` gets the bytes that were written since its last call, several times a
        second, and says whether to go on.

        Raises ``CannotJudge`` where a tensor is damaged or the storage refuses; ``Stopped``.
        """
        path = self._target.directory / file.name
        try:
            with contextlib.closing(DataFile(path, file.length + -file.length % BLOCK, self._target)) as written:
                self._run(file, written, tick)
                os.truncate(path, file.length)
                written.sync()
        except WriteFailed as error:
            raise CannotJudge(error.message, "look at `df` and `dmesg | tail`: nothing was exported") from error

    def _run(self, file: File, written: DataFile, tick: Callable[[int], bool]) -> None:
        windows = iter(range(0, file.length, WINDOW))
        done: list[int] = []
        errors: list[BaseException] = []
        stopping: list[bool] = []

        def work(reader: BoxReader, buffer: memoryview) -> None:
            try:
                for start in windows:
                    if stopping or errors:
                        return
                    stop = min(start + WINDOW, file.length)
                    _fill(file, start, stop, reader, buffer)
                    written.write(buffer[: stop - start + -(stop - start) % BLOCK], start)
                    done.append(stop - start)
            except BaseException as error:  # carried to the thread that waits
                errors.append(error)

        lanes = zip(self._readers, self._buffers, strict=True)
        workers = Workers([partial(work, reader, buffer) for reader, buffer in lanes], "tunetool-export")
        told, is_over = 0, False
        try:
            workers.start()
            while not is_over:
                is_over = workers.wait(_TICK_SECONDS)
                count = len(done)
                if not tick(sum(done[told:count])):
                    raise Stopped
                told = count
        finally:
            stopping.append(True)
            workers.wait()
        if errors:
            raise errors[0]


def _fill(file: File, start: int, stop: int, reader: BoxReader, buffer: memoryview) -> None:
    header = file.header[start:stop]
    buffer[: len(header)] = header
    whole = torch.frombuffer(buffer, dtype=torch.uint8)
    boxes, targets = [], []
    for part in parts(file, start, stop):
        at = part.start - start
        boxes.append(Box(part.tensor.saved, part.offsets, part.lengths, part.bytes))
        flat = whole[at : at + part.bytes].view(getattr(torch, part.tensor.dtype))
        targets.append(flat.view(part.lengths))
    reader.read(boxes, targets)
