"""Programs stuck in the kernel: no signal ends them, and no code may wait for them without a limit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from programs import need_program
from tunetool.measure import worker
from tunetool.measure.fio import FioFailed, Job, find_fio, run
from waiting import until

_LONGEST = 120.0
"""Seconds after which the file system thaws, so that code that waits for ever fails instead of hanging."""


@dataclass
class Frozen:
    """A file system whose writers are in state D, until it thaws."""

    mount_point: Path
    thawed: threading.Event = field(default_factory=threading.Event)

    def thaw(self) -> None:
        if not self.thawed.is_set():
            self.thawed.set()
            subprocess.run(["fsfreeze", "--unfreeze", self.mount_point], check=True)


@pytest.fixture
def frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Frozen]:
    if os.geteuid() != 0 or not Path("/dev/loop-control").exists():
        pytest.skip("needs root and loop devices")
    need_program("fsfreeze", "mkfs.ext4", "mount", "umount")
    monkeypatch.setattr(worker, "KILL_PATIENCE", 0.5)
    image, mount_point = tmp_path / "image", tmp_path / "place"
    mount_point.mkdir()
    subprocess.run(["truncate", "--size", "64M", image], check=True)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, mount_point], check=True)
    made = Frozen(mount_point)
    timer = threading.Timer(_LONGEST, made.thaw)
    try:
        subprocess.run(["fsfreeze", "--freeze", mount_point], check=True)
        timer.start()
        yield made
    finally:
        timer.cancel()
        made.thaw()
        subprocess.run(["umount", mount_point], check=True)


def stuck() -> bool:
    """Whether a thread of a program that this test started is in state D."""
    children = " ".join(path.read_text() for path in Path("/proc/self/task").glob("*/children")).split()
    tasks = [path for child in children for path in Path("/proc", child, "task").glob("*/stat")]
    return any(path.read_text().rpartition(")")[2].split()[0] == "D" for path in tasks)


def wait_until_stuck() -> None:
    """Let the program's time limit pass only after it is stuck; called while the code waits for it."""
    until(stuck)


def reaped(pid: int) -> bool:
    """tunetool reaps what it left behind when it starts its next program."""
    worker.end(worker.start(["true"], os.environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    return not Path(f"/proc/{pid}").exists()


def test_a_fio_that_survives_its_kill_is_named_and_left_behind(frozen: Frozen) -> None:
    with pytest.raises(FioFailed, match=r"did not end within 0 s; process .* is left behind") as caught:
        run(find_fio(os.environ), Job("write", 1, 2**20), frozen.mount_point, os.environ, 0, wait_until_stuck)
    assert not frozen.thawed.is_set(), "it was waited for until the kernel let go of it"
    assert "not even by SIGKILL (state D)" in caught.value.message
    match = re.search(r"process (\d+)", caught.value.message)
    assert match is not None
    assert Path("/proc", match[1]).exists()
    frozen.thaw()
    until(lambda: reaped(int(match[1])))


def test_a_worker_that_survives_its_kill_is_named(frozen: Frozen) -> None:
    code = f"import sys; sys.stdin.readline(); open({str(frozen.mount_point / 'file')!r}, 'w')"
    with worker.Worker([sys.executable, "-c", code], "the worker", os.environ, wait_until_stuck) as child:
        with pytest.raises(worker.Failed, match=r"said nothing for 0 s and process .* is left behind") as caught:
            child.ask({"do": "write"}, 0)
        pid = child.pid
    assert not frozen.thawed.is_set()
    assert f"process {pid}" in caught.value.message
    frozen.thaw()
    until(lambda: reaped(pid))
