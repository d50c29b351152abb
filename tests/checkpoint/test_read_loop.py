"""The compiled reading of files in memory (read_loop.c), with a driver of its own that copies late, as a GPU does."""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tunetool.checkpoint import compiled, fetch, read_loop
from tunetool.checkpoint.fetch import Fetch, Want, plan_reads
from tunetool.checkpoint.host_buffers import Buffer
from tunetool.checkpoint.raw_bytes import Plain
from tunetool.checkpoint.read_loop import SLOTS, Driver, Ring, Run
from tunetool.checkpoint.source import Files
from tunetool.errors import CannotJudge

SLOT = 4096
STREAM = 7
COPY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint64)
RECORD = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64)
SYNCHRONIZE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64)


class LateDriver:
    """Copies when somebody waits for them, and no sooner; the ``fails_at``-th call of any function fails."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.calls, self._fails_at = 0, fails_at
        self._queued: list[tuple[int, int, int]] = []
        self._recorded: dict[int, int] = {}
        self._functions = COPY(self._copy), RECORD(self._record), SYNCHRONIZE(self._synchronize)
        self.driver = Driver(*(ctypes.cast(function, ctypes.c_void_p).value or 0 for function in self._functions))

    def _fails(self) -> bool:
        self.calls += 1
        return self.calls - 1 == self._fails_at

    def _copy(self, target: int, source: int, count: int, stream: int) -> int:
        assert stream == STREAM
        self._queued.append((target, source, count))
        return int(self._fails())

    def _record(self, event: int, stream: int) -> int:
        assert stream == STREAM
        self._recorded[event] = len(self._queued)
        return int(self._fails())

    def _synchronize(self, event: int) -> int:
        self.carry_out(self._recorded.get(event, 0))
        return int(self._fails())

    def carry_out(self, count: int | None = None) -> None:
        """Carry out the first ``count`` copies that were queued."""
        for number, (target, source, size) in enumerate(self._queued[:count]):
            if size:
                ctypes.memmove(target, source, size)
                self._queued[number] = target, source, 0


class Event:
    """The handle of an event."""

    def __init__(self, handle: int) -> None:
        self.cuda_event = handle


class Stream:
    """Where the driver queues."""

    cuda_stream = STREAM

    def __init__(self, driver: LateDriver) -> None:
        self.synchronize = driver.carry_out


@pytest.fixture(scope="module")
def library(compiled_read_loop: Path) -> Any:
    found = compiled.load_library(compiled_read_loop)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def content() -> bytes:
    return os.urandom(11 * SLOT + 123)


@pytest.fixture(scope="module")
def handle(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    path = tmp_path_factory.mktemp("file") / "data"
    path.write_bytes(content)
    opened = os.open(path, os.O_RDONLY)
    yield opened
    os.close(opened)


def made_ring(library: Any, driver: LateDriver) -> Ring:
    events = [Event(number + 1) for number in range(SLOTS)]
    return Ring(library, driver.driver, Buffer(SLOTS * SLOT, pinned=False), Stream(driver), events)


@given(data=st.data())
def test_every_wanted_byte_arrives_and_no_other(data: st.DataObject, library: Any, handle: int, content: bytes) -> None:
    driver = LateDriver()
    ring = made_ring(library, driver)
    target = (ctypes.c_uint8 * len(content))()
    expected = bytearray(len(content))
    for _ in range(data.draw(st.integers(1, 3))):  # one ring serves many reads
        cuts = sorted(data.draw(st.sets(st.integers(0, len(content)), min_size=2, max_size=12)))
        ranges = list(itertools.pairwise(cuts))
        wanted = [each for each in ranges if data.draw(st.booleans())] or ranges[:1]
        runs = [Run(start, stop, ctypes.addressof(target) + start) for start, stop in wanted]
        for start, stop in wanted:
            expected[start:stop] = content[start:stop]
        first = wanted[0][0] - data.draw(st.integers(0, min(wanted[0][0], SLOT)))
        assert ring.read(handle, first, wanted[-1][1], runs)
    driver.carry_out()
    assert bytes(target) == bytes(expected)


def test_the_end_of_the_file_is_no_success(library: Any, handle: int, content: bytes) -> None:
    target = (ctypes.c_uint8 * (len(content) + 1))()
    run = Run(0, len(content) + 1, ctypes.addressof(target))
    assert not made_ring(library, LateDriver()).read(handle, 0, run.stop, [run])


def test_a_descriptor_that_cannot_be_read_is_no_success(library: Any, content: bytes) -> None:
    target = (ctypes.c_uint8 * SLOT)()
    run = Run(0, SLOT, ctypes.addressof(target))
    assert not made_ring(library, LateDriver()).read(-1, 0, SLOT, [run])


def test_each_refusal_of_the_driver_is_no_success(library: Any, handle: int, content: bytes) -> None:
    target = (ctypes.c_uint8 * len(content))()
    run = Run(0, len(content), ctypes.addressof(target))
    slots = -(-len(content) // SLOT)
    for number in range(3 * slots):
        assert not made_ring(library, LateDriver(fails_at=number)).read(handle, 0, run.stop, [run]), number
    assert made_ring(library, LateDriver(fails_at=3 * slots)).read(handle, 0, run.stop, [run])


@pytest.fixture
def small_tensors(tmp_path: Path) -> tuple[Files, list[Want]]:
    """A file on a tmpfs, and tensors of some kilobytes, which are read through buffers also into host memory."""
    sizes = [5000, 3, 70_000 // 8, 4096, 1] * 20
    (tmp_path / "data").write_bytes(os.urandom(sum(sizes) + 7 * len(sizes)))
    files, wants, at = Files(tmp_path), [], 0
    files.in_memory, files.direct = True, False
    for number, size in enumerate(sizes):
        target = torch.zeros(size, dtype=torch.uint8)
        wants.append(Want(f"t{number}", "data", at, Plain(0, size, "uint8", (size,)), (0,), (size,), target))
        at += size + 7
    return files, wants


def filled(files: Files, wants: list[Want], ring: Ring | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch.Buffers, "ring", ring)
    Fetch(files, torch.device("cpu"), 1, 1 << 16).run(plan_reads(wants, files, 1 << 16))


@pytest.mark.parametrize("fails_at", [None, 0, 1, 2, 30])
def test_what_compiled_code_does_not_fill_python_fills(
    small_tensors: tuple[Files, list[Want]], library: Any, monkeypatch: pytest.MonkeyPatch, fails_at: int | None
) -> None:
    files, wants = small_tensors
    driver = LateDriver(fails_at)
    filled(files, wants, made_ring(library, driver), monkeypatch)
    driver.carry_out()
    assert driver.calls > (fails_at or 0)
    content = (files.directory / "data").read_bytes()
    for want in wants:
        assert want.target.numpy().tobytes() == content[want.start : want.start + want.plain.length], want.name


def test_what_is_verified_on_the_host_is_read_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").touch()
    monkeypatch.setattr(read_loop, "is_there", lambda device: True)
    monkeypatch.setattr(fetch, "_aligned_run", lambda want, *_: (want.start + want.bytes[1],) * 2)
    files, wants, at = Files(tmp_path), [], 0
    files.in_memory, files.direct = True, False
    for number in range(12):
        for size, sums in ((3 << 20, None), (4, object())):
            target = torch.empty(size, dtype=torch.uint8)
            wants.append(Want(f"t{number}", "data", at, Plain(0, size, "uint8", (size,)), (0,), (size,), target, sums))
            at += size
    reads = [read for _, read in plan_reads(wants, files, 1 << 20)]
    kinds = [{part.want.sums is None for _, _, part in read.wanted} for read in reads]
    assert {True} in kinds
    assert {False} in kinds
    assert {True, False} not in kinds
    largest = {
        kind: max(read.stop - read.start for read, its in zip(reads, kinds, strict=True) if its == {kind})
        for kind in (True, False)
    }
    assert largest[False] <= 1 << 20 < largest[True] <= read_loop.READ_BYTES


def test_a_file_that_is_cut_short_is_named_as_ever(
    small_tensors: tuple[Files, list[Want]], library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, wants = small_tensors
    os.truncate(files.directory / "data", wants[-1].start)
    with pytest.raises(CannotJudge, match=r"data` is \d+ bytes long, and `t99` ends at \d+: it is cut short"):
        filled(files, wants, made_ring(library, LateDriver()), monkeypatch)


def test_what_is_no_library_of_ours_is_not_used(tmp_path: Path) -> None:
    other = tmp_path / "other.so"
    other.write_bytes(b"\x7fELF")
    assert compiled.load_library(other) is None
    assert compiled.load_library(tmp_path / "absent.so") is None
    assert compiled.load_library(Path("libc.so.6")) is None
