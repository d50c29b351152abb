"""What fills host buffers in one save: runs of constant bytes, of tensors' memory, and of what must be made first.

Compiled code (read_loop.c), where the wheel has it, takes all runs of a buffer from this host in one call, and those of
a GPU in another, without the interpreter's lock. Python takes the others, and all of them without that code or where
the driver refuses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tunetool.checkpoint import compiled
from tunetool.checkpoint.columns import Numbers
from tunetool.checkpoint.host_buffers import Buffer, Source
from tunetool.checkpoint.layout import ZEROS, Block, Runs
from tunetool.checkpoint.raw_bytes import memory_at

HOST, ODD, LATE = 0, -1, -2
"""Where contents are: in this host's memory, or on the GPU with that number from 1 on; nowhere that has an address; not
there before the sums of the file are."""
_ROW = 24
"""Bytes of a run in read_loop.c."""


@dataclass
class Contents:
    """What a save brings, by the numbers in the layout, and what is the same in every save, by negative numbers from
    the end: ``ZEROS`` is the last. ``where`` and ``addresses``: of each, as numbers; ``gpus``: those that ``where``
    names. ``source``: returns a content's bytes or its ``Source``."""

    where: Numbers
    addresses: Numbers
    gpus: Sequence[torch.device]
    source: Callable[[int], bytes | Source]


@dataclass
class _Group:
    """Runs of one kind, and by block the first of them."""

    device: torch.device | None
    chosen: Numbers
    firsts: list[int]
    rows: Numbers | None
    """As read_loop.c takes them, where that is there."""


class Filling:
    """Fills the blocks of one save."""

    def __init__(self, runs: Runs, contents: Contents) -> None:
        self._runs, self._contents = runs, contents
        where = contents.where[runs.content]
        library = compiled.library()
        self._groups: list[_Group] = []
        for kind in [HOST, *range(1, len(contents.gpus) + 1)]:
            chosen = np.flatnonzero(where == kind)
            rows = None
            if library is not None:
                there = contents.addresses[runs.content[chosen]] + runs.skip[chosen]
                rows = np.column_stack([runs.start[chosen], runs.stop[chosen], there])
            device = contents.gpus[kind - 1] if kind else None
            self._groups.append(_Group(device, chosen, runs.of(chosen).tolist(), rows))
        chosen = np.flatnonzero(where == ODD)
        self._odd = _Group(None, chosen, runs.of(chosen).tolist(), None)

    def fill(self, block: Block, buffer: Buffer, stream_of: Callable[[torch.device], Any]) -> list[Any]:
        """Start to copy the block's bytes to the buffer; returns the CUDA events of copies that are not complete
        yet. ``stream_of``: the stream that copies from a device."""
        streams: dict[torch.device, Any] = {}
        for group in self._groups:
            first, last = group.firsts[block.number], group.firsts[block.number + 1]
            if first == last:
                continue
            stream = None
            if group.device is not None and group.device.type == "cuda":
                stream = streams[group.device] = stream_of(group.device)
            with _current(stream):
                if not _by_compiled_code(group, first, last, buffer, stream):
                    self._by_python(group.chosen[first:last], buffer, lambda _: stream, stream)  # noqa: B023  (used at once)
        first, last = self._odd.firsts[block.number], self._odd.firsts[block.number + 1]

        def known_stream(device: torch.device) -> Any:
            if device not in streams:
                streams[device] = stream_of(device)
            return streams[device]

        self._by_python(self._odd.chosen[first:last], buffer, known_stream)
        return [stream.record_event(torch.cuda.Event(blocking=True)) for stream in streams.values()]

    def memory(self, block: Block) -> memoryview:
        """What a block that is written without a copy holds; empty if that is on a GPU."""
        if self._where(block):
            return memoryview(b"")
        return memory_at(self._address(block), block.length)

    def on_gpu(self, block: Block) -> tuple[torch.device, int]:
        """The GPU and the address of what a block holds."""
        return self._contents.gpus[self._where(block) - 1], self._address(block)

    def _where(self, block: Block) -> int:
        return int(self._contents.where[self._runs.content[self._runs.firsts[block.number]]])

    def _address(self, block: Block) -> int:
        run = self._runs.firsts[block.number]
        return int(self._contents.addresses[self._runs.content[run]] + self._runs.skip[run])

    def _by_python(
        self, chosen: Numbers, buffer: Buffer, stream_of: Callable[[torch.device], Any], current: Any = None
    ) -> None:
        runs = self._runs
        columns = (each[chosen].tolist() for each in (runs.start, runs.stop, runs.content, runs.skip))
        for start, stop, content, skip in zip(*columns, strict=True):
            if content == ZEROS:
                buffer.view[start:stop] = bytes(stop - start)
                continue
            source = self._contents.source(content)
            if isinstance(source, bytes):
                whole = stop - start == len(source)
                buffer.view[start:stop] = source if whole else source[skip : skip + stop - start]
            elif source.device.type == "cuda":
                stream = stream_of(source.device)
                with _current(None if stream is current else stream):
                    source.copy(skip, stop - start, buffer, start, stream.cuda_stream)
            else:
                source.copy(skip, stop - start, buffer, start)


def _current(stream: Any) -> Any:
    """The CUDA stream as the current one, and its GPU."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _by_compiled_code(group: _Group, first: int, last: int, buffer: Buffer, stream: Any) -> bool:
    """Whether all runs are in the buffer, or under way on the ``stream``."""
    if group.rows is None:
        return False
    copy, handle = 0, 0
    if group.device is not None:
        found = _driver()
        if found is None or stream is None or not buffer.pinned:
            return False
        copy, handle = found[0], stream.cuda_stream
    rows = group.rows.ctypes.data + _ROW * first
    return not compiled.library().tunetool_copy_runs(copy, handle, buffer.address, rows, last - first)


@functools.cache
def _driver() -> tuple[int, ...] | None:
    return None if torch.version.hip is not None else compiled.driver("cuMemcpyDtoHAsync_v2")
