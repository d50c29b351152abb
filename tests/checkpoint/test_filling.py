"""Buffers that are filled by runs: by compiled code, with a driver of its own that copies late, as a GPU does, or by
Python."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tunetool.checkpoint import compiled, filling
from tunetool.checkpoint.filling import HOST, LATE, ODD, Contents, Filling
from tunetool.checkpoint.host_buffers import Buffer, Source
from tunetool.checkpoint.layout import ZEROS, Tiles, cut

BLOCK, LIMIT, STREAM = 4096, 3 * 4096, 7
COPY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint64)
GPU = torch.device("cuda", 0)


class Stream:
    """Where the driver queues copies; ``record_event`` returns what carries them out."""

    cuda_stream = STREAM

    def __init__(self) -> None:
        self.queued: list[tuple[int, int, int]] = []

    def record_event(self, _: Any) -> Callable[[], None]:
        return self.carry_out

    def carry_out(self) -> None:
        for target, source, count in self.queued:
            ctypes.memmove(target, source, count)
        self.queued.clear()


class Driver:
    """Queues copies on the ``stream``; the ``fails_at``-th and all later ones fail."""

    def __init__(self, fails_at: int | None) -> None:
        self.stream, self.calls, self._fails_at = Stream(), 0, fails_at
        self._function = COPY(self._copy)
        self.address = ctypes.cast(self._function, ctypes.c_void_p).value or 0

    def _copy(self, target: int, source: int, count: int, stream: int) -> int:
        assert stream == STREAM
        self.calls += 1
        if self._fails_at is not None and self.calls > self._fails_at:
            return 1
        self.stream.queued.append((target, source, count))
        return 0


@pytest.fixture(scope="module")
def library(compiled_read_loop: Path) -> Any:
    return compiled.load_library(compiled_read_loop)


class State:
    """Contents of all kinds in one file, and what the file must hold."""

    def __init__(self, draw: random.Random) -> None:
        self.constants = [draw.randbytes(draw.randint(1, 3000)) for _ in range(3)]
        self.tensors: list[torch.Tensor | bytes] = []
        where, tiles, expected = [], [], []
        for number in range(60):
            kind = draw.choice([HOST, 1, 1, 1, ODD, ODD, LATE])
            rows = draw.choice([1, 5, 300, 3000])
            tensor = torch.tensor([*draw.randbytes(2 * rows)], dtype=torch.uint8)
            if kind == ODD:
                tensor = tensor.reshape(2, rows).t()
            raw = tensor.numpy().tobytes("C")
            self.tensors.append(raw if kind == ODD and draw.random() < 0.5 else tensor)
            where.append(kind)
            constant = draw.randrange(3)
            gap = draw.choice([0, 1, 100, 5000])
            tiles += [(gap, ZEROS), (len(self.constants[constant]), -2 - constant), (len(raw), number)]
            expected += [bytes(gap), self.constants[constant], b"?" * len(raw) if kind == LATE else raw]
        rest = -sum(length for length, _ in tiles) % BLOCK
        self.expected = b"".join([*expected, bytes(rest)])
        self.blocks, self.runs = cut(Tiles(*np.array([*tiles, (rest, ZEROS)]).T), [len(self.expected)], LIMIT)
        own = [np.frombuffer(each, np.uint8).ctypes.data for each in reversed(self.constants)]
        known = [each.data_ptr() if isinstance(each, torch.Tensor) and each.dim() == 1 else 0 for each in self.tensors]
        kinds = np.array([*where, *[HOST] * 4], np.int8)
        self.contents = Contents(kinds, np.array([*known, *own, 0], np.int64), [GPU], self.source)

    def source(self, number: int) -> bytes | Source:
        content = self.tensors[number]
        return content if isinstance(content, bytes) else Source(content)

    def filled(self, stream: Stream) -> bytes:
        """The file, by one buffer after another, each of which held something else before."""
        made, found = Filling(self.runs, self.contents), b""
        for block in self.blocks:
            buffer = Buffer(LIMIT, pinned=False)
            buffer.pinned = True
            buffer.view[:] = b"?" * LIMIT
            for wait in made.fill(block, buffer, lambda _: stream):
                wait()
            found += bytes(buffer.view[: block.length])
        return found


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: None)


@pytest.mark.parametrize("fails_at", [None, 0, 1, 7], ids=lambda number: f"refuses from {number}")
@pytest.mark.parametrize("seed", range(5))
def test_each_run_is_where_it_belongs_by_compiled_code(
    library: Any, events: None, monkeypatch: pytest.MonkeyPatch, seed: int, fails_at: int | None
) -> None:
    state, driver = State(random.Random(seed)), Driver(fails_at)
    monkeypatch.setattr(compiled, "library", lambda: library)
    monkeypatch.setattr(filling, "driver", lambda: (driver.address,))
    assert state.filled(driver.stream) == state.expected
    assert driver.calls > (fails_at or 0)


@pytest.mark.parametrize("seed", range(3))
def test_each_run_is_where_it_belongs_by_python(events: None, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(compiled, "library", lambda: None)
    state = State(random.Random(seed))
    assert state.filled(Stream()) == state.expected


@pytest.mark.usefixtures("events")
def test_memory_that_is_not_pinned_is_left_to_torch(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, state = Driver(None), State(random.Random(1))
    monkeypatch.setattr(compiled, "library", lambda: library)
    monkeypatch.setattr(filling, "driver", lambda: (driver.address,))
    buffer = Buffer(LIMIT, pinned=False)
    Filling(state.runs, state.contents).fill(state.blocks[0], buffer, lambda _: driver.stream)
    assert driver.calls == 0
