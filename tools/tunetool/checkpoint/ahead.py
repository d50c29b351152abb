"""A copy that begins before the plan of its save is made, so that the training loop does not wait for both.

A job saves the same tensors again and again. Once two saves of a layout brought the same memory, an asynchronous save
begins by copying that memory, while torch plans: by addresses, in compiled code (read_loop.c), which needs nothing from
Python meanwhile. Only memory of tensors that the state holds now is read. The save takes the copy if its plan comes to
the very same addresses; otherwise it copies what the plan says, as every save did before.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tunetool.checkpoint import compiled, filling, rank_layout
from tunetool.checkpoint.columns import Numbers
from tunetool.checkpoint.filling import HOST, Contents
from tunetool.checkpoint.host_buffers import POOL, Buffer, use_gpu
from tunetool.checkpoint.rank_layout import RankLayout
from tunetool.checkpoint.workers import Workers, default_threads

_STREAMS = 2
"""Of each GPU: the copies of one stream begin one after another, and each takes a while to begin."""


@dataclass(frozen=True)
class Brought:
    """What a save of a layout brought: see ``Contents``. ``buffer_bytes``, ``gpu``: of its buffers."""

    where: Numbers
    addresses: Numbers
    gpus: Sequence[torch.device]
    buffer_bytes: int
    gpu: torch.device | None

    @classmethod
    def of(cls, contents: Contents, buffer_bytes: int, gpu: torch.device | None) -> Brought:
        return cls(contents.where, contents.addresses, contents.gpus, buffer_bytes, gpu)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Brought)
            and np.array_equal(self.where, other.where)
            and np.array_equal(self.addresses, other.addresses)
            and (self.gpus, self.buffer_bytes, self.gpu) == (other.gpus, other.buffer_bytes, other.gpu)
        )

    __hash__ = None  # type: ignore[assignment]

    def is_within(self, lengths: Numbers, memory: Mapping[int, torch.UntypedStorage]) -> bool:
        """Whether ``memory``, by the address of the first byte, holds all items; ``lengths`` are theirs."""
        its = self.where[: len(lengths)] >= HOST
        first, count = self.addresses[: len(lengths)][its], lengths[its]
        first, count = first[count > 0], count[count > 0]
        begins = np.array(sorted(memory), np.int64)
        if not first.size or not begins.size:
            return False
        ends = begins + np.array([memory[begin].nbytes() for begin in begins.tolist()], np.int64)
        holding = np.searchsorted(begins, first, "right") - 1
        return bool((holding >= 0).all() and (first + count <= ends[holding]).all())


@dataclass
class Seen:
    """What the last save of a layout brought, and whether the one before brought the same. ``lengths``: bytes of each
    item's tensor."""

    brought: Brought
    lengths: Numbers
    again: bool = False


def remember(layout: RankLayout, brought: Brought) -> None:
    """A save of this layout, which holds no memory that is written without a copy, has succeeded."""
    seen = layout.seen
    if isinstance(seen, Seen) and seen.brought == brought:
        seen.again = True
        return
    lengths = [0 if isinstance(item, int) else item.data_bytes for item in layout.asked.items]
    layout.seen = Seen(brought, np.array(lengths, np.int64))


def begin(memory: Mapping[int, torch.UntypedStorage], after: Sequence[Any]) -> Ahead | None:
    """Begin to copy what the next save is expected to bring; None if nothing is expected of a state that holds
    ``memory`` (by the address of the first byte), or if there are no idle buffers for it. ``after``: CUDA events."""
    if compiled.library() is None:
        return None
    expected = [
        (int(seen.lengths.sum()), layout, seen)
        for layout in rank_layout.kept()
        for seen in [layout.seen]
        if isinstance(seen, Seen) and seen.again and seen.brought.is_within(seen.lengths, memory)
    ]
    if not expected:
        return None
    # A job may also save a part of its state. Of equal ones the first was used last.
    _, layout, seen = max(expected, key=lambda each: each[0])
    if seen.brought.gpus and (seen.brought.gpu is None or filling.driver() is None):
        return None
    buffers = POOL.take_idle(layout.buffers, seen.brought.buffer_bytes, pinned=seen.brought.gpu is not None)
    return Ahead(layout, seen, buffers, after, [*memory.values()]) if buffers else None


class Ahead:
    """A copy under way: the n-th of the ``buffers`` gets what the n-th block of the layout has of known addresses."""

    def __init__(
        self,
        layout: RankLayout,
        seen: Seen,
        buffers: list[Buffer],
        after: Sequence[Any],
        held: Sequence[torch.UntypedStorage],
    ) -> None:
        self._buffers = buffers
        self._held = held
        """The memory that is read: the training loop may be interrupted while it waits, and free its tensors."""
        self.streams: list[Any] = []
        """CUDA streams that read tensors."""
        self.copied: list[Any] = []
        """CUDA events after which all is in the buffers."""
        self._layout, self._seen, self._after = layout, seen, after
        self._failed = False
        self._taking = threading.Lock()
        works: list[Callable[[], None]] = []
        for number, device in enumerate((None, *seen.brought.gpus)):
            rows = self._rows(number)
            parts = min(len(buffers), _STREAMS if device is not None else default_threads())
            works += [functools.partial(self._copy, part, device) for part in np.array_split(rows, parts) if len(part)]
        self._workers = Workers(works, "tunetool-ahead")
        try:
            self._workers.start()
        except RuntimeError:
            self._failed = True  # no more threads: the save itself will say so

    def _rows(self, where: int) -> Numbers:
        """Of read_loop.c, of all blocks: addresses in the buffers and of the contents."""
        runs, brought = self._layout.runs, self._seen.brought
        buffer = np.repeat(np.array([each.address for each in self._buffers], np.int64), np.diff(runs.firsts))
        rows = np.column_stack([runs.start + buffer, runs.stop + buffer, brought.addresses[runs.content] + runs.skip])
        return np.ascontiguousarray(rows[brought.where[runs.content] == where])

    def _copy(self, rows: Numbers, device: torch.device | None) -> None:
        try:
            for event in self._after:
                event.synchronize()
            copy, handle = 0, 0
            if device is not None:
                found = filling.driver()
                assert found is not None  # noqa: S101  (asked before)
                use_gpu(device)
                stream = torch.cuda.Stream(device)
                self.streams.append(stream)
                copy, handle = found[0], stream.cuda_stream
            if compiled.library().tunetool_copy_runs(copy, handle, 0, rows.ctypes.data, len(rows)):
                self._failed = True
            elif device is not None:
                self.copied.append(stream.record_event(torch.cuda.Event(blocking=True)))
        except BaseException:  # the save itself copies then, and has the error if there is one
            self._failed = True

    def is_for(self, layout: RankLayout, brought: Brought) -> bool:
        """Whether a save of ``layout`` that brings this can use what is copied. Waits until all copies are begun."""
        if layout is not self._layout or brought != self._seen.brought:
            self._seen.again = False  # else the next state that holds the same memory would wait for nothing too
            return False
        self._workers.wait()
        return bool(self._buffers) and not self._failed

    def take(self) -> list[Buffer]:
        """The buffers, which are the caller's from now on."""
        # An attempt to save that was given up may still come to this.
        with self._taking:
            buffers, self._buffers = self._buffers, []
        return buffers

    def drop(self) -> None:
        """Give the buffers back, unless they were taken."""
        self._workers.wait()
        for stream in self.streams:
            stream.synchronize()
        self._held = ()
        POOL.give_back(self.take())
