"""What fills host buffers in one save: runs of constant bytes, of tensors' memory, and of what must be made first.

Compiled code (read_loop.c), where the wheel has it, takes all runs of a buffer from this host in one call, and those of
a GPU in another, without the interpreter's lock. Python takes the others, and all of them without that code or where
the driver refuses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tunetool.checkpoint import compiled
from tunetool.checkpoint.columns import Numbers
from tunetool.checkpoint.host_buffers import Buffer, Source, to_host, within_host
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
    names. ``source``: what torch copies a content from, or an object's bytes."""

    where: Numbers
    addresses: Numbers
    gpus: Sequence[torch.device]
    source: Callable[[int], bytes | Source]


@dataclass
class _Group:
    """Runs of one kind: ``rows`` as read_loop.c takes them, the content of each, and by block the first of them."""

    device: torch.device | None
    rows: Numbers
    content: Numbers
    firsts: list[int]

    def between(self, first: int, last: int) -> Iterator[tuple[int, int, int, int]]:
        """Rows and contents. Without a list for each, which the garbage collector would look at."""
        yield from zip(*self.rows[first:last].T.tolist(), self.content[first:last].tolist(), strict=True)


class Filling:
    """Fills the blocks of one save. ``ahead``: what has an address is in the buffers already; see there."""

    def __init__(self, runs: Runs, contents: Contents, *, ahead: bool = False) -> None:
        self._runs, self._contents = runs, contents
        where = contents.where[runs.content]
        self._groups = [
            self._group(np.flatnonzero(where == number), device)
            for number, device in enumerate(() if ahead else (None, *contents.gpus))
        ]
        self._odd = self._group(np.flatnonzero(where == ODD), None)

    def _group(self, chosen: Numbers, device: torch.device | None) -> _Group:
        runs, content = self._runs, self._runs.content[chosen]
        there = self._contents.addresses[content] + runs.skip[chosen]
        rows = np.column_stack([runs.start[chosen], runs.stop[chosen], there])
        return _Group(device, rows, content, runs.of(chosen).tolist())

    def fill(self, block: Block, buffer: Buffer, stream_of: Callable[[torch.device], Any]) -> list[Any]:
        """Start to copy the block's bytes to the buffer; returns the CUDA events of copies that are not complete
        yet. ``stream_of``: the stream that copies from a device."""
        streams: dict[torch.device, Any] = {}
        for group in self._groups:
            first, last = group.firsts[block.number : block.number + 2]
            if first < last:
                with _current(group.device, streams, stream_of) as stream:
                    if not _by_compiled_code(group, first, last, buffer, stream):
                        self._by_python(group, first, last, buffer, stream)
        first, last = self._odd.firsts[block.number : block.number + 2]
        for start, stop, skip, content in self._odd.between(first, last):
            source = self._contents.source(content)
            if isinstance(source, bytes):
                buffer.view[start:stop] = memoryview(source)[skip : skip + stop - start]
                continue
            with _current(source.device, streams, stream_of):
                source.copy(skip, stop - start, buffer, start)
        return [stream.record_event(torch.cuda.Event(blocking=True)) for stream in streams.values()]

    def _by_python(self, group: _Group, first: int, last: int, buffer: Buffer, stream: Any) -> None:
        addresses = self._contents.addresses
        for start, stop, there, content in group.between(first, last):
            here, count = buffer.address + start, stop - start
            if content == ZEROS:
                buffer.view[start:stop] = bytes(count)
            elif group.device is None:
                within_host(here, there, count)
            elif stream is None or not buffer.pinned or not to_host(here, there, count, stream.cuda_stream):
                source = self._contents.source(content)
                assert isinstance(source, Source)  # noqa: S101  (nothing else is on a GPU)
                source.copy(there - int(addresses[content]), count, buffer, start)

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


@contextmanager
def _current(
    device: torch.device | None, streams: dict[torch.device, Any], stream_of: Callable[[torch.device], Any]
) -> Iterator[Any]:
    """The stream of a GPU, which is the current one meanwhile, and is kept in ``streams``; else None."""
    if device is None or device.type != "cuda":
        yield None
        return
    stream = streams.get(device)
    if stream is None:
        stream = streams[device] = stream_of(device)
    with torch.cuda.stream(stream):
        yield stream


def _by_compiled_code(group: _Group, first: int, last: int, buffer: Buffer, stream: Any) -> bool:
    """Whether the runs are in the buffer, or under way on the ``stream``."""
    library, copy, handle = compiled.library(), 0, 0
    if library is None:
        return False
    if group.device is not None:
        found = driver()
        if found is None or stream is None or not buffer.pinned:
            return False
        copy, handle = found[0], stream.cuda_stream
    rows = group.rows.ctypes.data + _ROW * first
    return not library.tunetool_copy_runs(copy, handle, buffer.address, rows, last - first)


@functools.cache
def driver() -> tuple[int, ...] | None:
    """The address of ``cuMemcpyDtoHAsync``; None where there is none."""
    return None if torch.version.hip is not None else compiled.driver("cuMemcpyDtoHAsync_v2")
