"""A save or load that is interrupted waits for its threads; interrupted again, it does not, and they harm nothing."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from tunetool.checkpoint import DirectReader, DirectWriter, host_buffers, release_buffers, stager
from tunetool.errors import CannotJudge
from waiting import PATIENCE, until

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
MIB = 1 << 20


class Stuck:
    """The first thread that gets here waits for ``go_on``; all others pass."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.go_on = threading.Event()

    def here(self) -> None:
        if not self.threads:
            self.threads.append(threading.current_thread())
            assert self.go_on.wait(PATIENCE)

    def end(self) -> None:
        """Lets the thread go on, and waits for its end."""
        self.go_on.set()
        for thread in self.threads:
            thread.join()


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    release_buffers()
    made = Stuck()
    yield made
    made.end()


Interrupt = Callable[[Stuck, int, Callable[[], None]], None]


@pytest.fixture
def interrupt() -> Iterator[Interrupt]:
    """Once a thread is stuck, the main thread gets so many signals whose handler raises, as schedulers send them; then
    something else happens."""
    came: list[int] = []

    def raising(number: int, frame: FrameType | None) -> None:
        came.append(number)
        raise KeyboardInterrupt

    def send(stuck: Stuck, times: int, then: Callable[[], None]) -> None:
        until(lambda: stuck.threads)
        for count in range(1, times + 1):
            time.sleep(0.2)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            until(lambda: len(came) == count)  # noqa: B023  (called here)
        then()

    senders = []

    def begin(*arguments: Any) -> None:
        senders.append(threading.Thread(target=send, args=arguments))
        senders[-1].start()

    before = signal.signal(signal.SIGUSR1, raising)
    yield begin
    for sender in senders:
        sender.join()
    signal.signal(signal.SIGUSR1, before)


def nothing() -> None:
    pass


def turned(value: float) -> dict[str, torch.Tensor]:
    """4 MiB that must be copied before they are written, since their memory has another order."""
    return {"w": torch.full((1024, 1024), value).t()}


@pytest.mark.parametrize("way", ["save", "load"])
def test_an_interruption_is_raised_once_no_thread_copies(
    tmp_path: Path, stuck: Stuck, interrupt: Interrupt, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Python before 3.13 takes a thread for an ended one once the wait for it was interrupted."""
    move, read, returned = host_buffers._memmove, os.preadv, threading.Event()
    early: list[bool] = []
    dcp.save(turned(1), storage_writer=DirectWriter(tmp_path / "step"))

    def moving(target: int, source: int, count: int) -> None:
        stuck.here()
        move(target, source, count)

    def reading(handle: int, views: list[memoryview], offset: int) -> int:
        if threading.current_thread().name.startswith("tunetool-read-"):
            stuck.here()
        return read(handle, views, offset)

    monkeypatch.setattr(host_buffers, "_memmove", moving)
    monkeypatch.setattr(os, "preadv", reading)

    def see() -> None:
        early.append(returned.wait(0.5))
        stuck.go_on.set()

    acts = {
        "save": lambda: dcp.save(turned(2), storage_writer=DirectWriter(tmp_path / "interrupted")),
        "load": lambda: dcp.load(turned(2), storage_reader=DirectReader(tmp_path / "step")),
    }
    interrupt(stuck, 1, see)
    with pytest.raises(CheckpointException):
        acts[way]()
    returned.set()
    until(lambda: early)
    assert early == [False]


def test_the_next_save_uses_no_buffer_that_is_still_filled(
    tmp_path: Path, stuck: Stuck, interrupt: Interrupt, monkeypatch: pytest.MonkeyPatch
) -> None:
    move, write = host_buffers._memmove, os.pwrite

    def moving(target: int, source: int, count: int) -> None:
        stuck.here()
        move(target, source, count)

    monkeypatch.setattr(host_buffers, "_memmove", moving)
    settings: dict[str, Any] = {"threads": 1, "buffer_bytes": MIB}
    interrupt(stuck, 2, nothing)
    with pytest.raises(CheckpointException):
        dcp.save(turned(1), storage_writer=DirectWriter(tmp_path / "interrupted", **settings))
    assert stuck.threads[0].is_alive()

    def late(handle: int, view: memoryview, offset: int) -> int:
        # By now, this save has filled all of its buffers.
        if len(view) >= 4096:
            stuck.end()
        return write(handle, view, offset)

    monkeypatch.setattr(os, "pwrite", late)
    dcp.save(turned(2), storage_writer=DirectWriter(tmp_path / "next", **settings))
    assert not stuck.threads[0].is_alive()
    loaded = turned(0)
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(tmp_path / "next"))
    assert torch.equal(loaded["w"], turned(2)["w"])
    assert not list((tmp_path / "interrupted").glob("*.distcp"))


def test_a_thread_that_still_reads_reads_from_its_file(
    tmp_path: Path, stuck: Stuck, interrupt: Interrupt, monkeypatch: pytest.MonkeyPatch
) -> None:
    dcp.save({"w": torch.ones(MIB)}, storage_writer=DirectWriter(tmp_path / "step"))
    (file,) = (tmp_path / "step").glob("*.distcp")
    read = os.preadv
    names = []

    def reading(handle: int, views: list[memoryview], offset: int) -> int:
        if threading.current_thread().name.startswith("tunetool-read-"):
            stuck.here()
            names.append(str(Path(f"/proc/self/fd/{handle}").readlink()))
        return read(handle, views, offset)

    monkeypatch.setattr(os, "preadv", reading)
    interrupt(stuck, 2, nothing)
    with pytest.raises(CheckpointException):
        dcp.load({"w": torch.zeros(MIB)}, storage_reader=DirectReader(tmp_path / "step", threads=1))
    assert stuck.threads[0].is_alive()
    # Who opens files now gets the numbers that are free.
    others = [(tmp_path / f"other-{number}").open("w") for number in range(8)]
    stuck.end()
    for other in others:
        other.close()
    assert set(names) == {str(file)}


def test_a_save_that_nobody_waits_for_any_more_is_refused(
    tmp_path: Path, stuck: Stuck, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training has gone on: the tensors are of several steps, or freed."""

    class Late(DirectWriter):
        def storage_meta(self) -> Any:
            stuck.here()
            return super().storage_meta()

    monkeypatch.setattr(stager, "BEGIN_WITHIN", 0.1)
    writer, state = Late(tmp_path), {"w": torch.zeros(10)}
    with pytest.raises(CannotJudge, match="did not begin within"):
        dcp.async_save(state, storage_writer=writer, async_stager=writer.stager())
    state["w"].fill_(1)
    stuck.end()
    assert list(tmp_path.iterdir()) == []
    dcp.save(state, storage_writer=writer)
    loaded = {"w": torch.zeros(10)}
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(tmp_path))
    assert torch.equal(loaded["w"], torch.ones(10))
