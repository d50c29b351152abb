"""One saver per directory; a dead saver does not lock out others."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tunetool.checkpoint.saver_lock import DEAD_AFTER, NAME, Holder, Lock, dead_by_rule
from tunetool.errors import CannotJudge

HOLD = """
import os, sys, time
from pathlib import Path
from tunetool.checkpoint.saver_lock import Lock
held = Lock.take(Path(sys.argv[1]))
if sys.argv[2:]:
    there, here = os.pipe()
    if os.fork() == 0:
        os.write(here, b"!")  # fork has returned, so that what it does in a child is done
        time.sleep(6000)
    os.read(there, 1)
print(os.getpid(), flush=True)
time.sleep(6000)
"""


@contextlib.contextmanager
def saver(directory: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLD, str(directory), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def test_a_second_saver_is_told_who_the_first_is(tmp_path: Path) -> None:
    with saver(tmp_path) as first:
        with pytest.raises(CannotJudge) as caught:
            Lock.take(tmp_path)
        assert f"is being saved to by process {first.pid} on `{os.uname().nodename}`, since 20" in caught.value.message


def test_two_threads_of_one_process(tmp_path: Path) -> None:
    held = Lock.take(tmp_path)
    with pytest.raises(CannotJudge, match=f"process {os.getpid()} on"):
        Lock.take(tmp_path)
    held.release()
    held.release()
    Lock.take(tmp_path).release()
    assert not list(tmp_path.iterdir())


def test_it_ends_with_its_object(tmp_path: Path) -> None:
    held = Lock.take(tmp_path)
    del held
    Lock.take(tmp_path).release()


def test_a_dead_saver_keeps_nobody_out(tmp_path: Path) -> None:
    with saver(tmp_path) as first:
        first.kill()
        first.wait()
        assert (tmp_path / NAME).exists()
        Lock.take(tmp_path).release()


def test_nor_does_a_child_that_outlives_it(tmp_path: Path) -> None:
    """A data loader that is forked during the save inherits the parent's open files."""
    with saver(tmp_path, "and a child") as first:
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        Lock.take(tmp_path).release()


def test_a_dead_savers_empty_file(tmp_path: Path) -> None:
    (tmp_path / NAME).touch()
    Lock.take(tmp_path).release()


def holder_elsewhere() -> Holder:
    return Holder("node17", "another boot", 4242, 17, time.time() - 3600)


def test_another_hosts_saver_shows_that_it_lives(tmp_path: Path) -> None:
    """On a shared file system whose kernel locks hold on one host only."""
    path = tmp_path / NAME
    path.write_text(holder_elsewhere().text())
    with pytest.raises(CannotJudge) as caught:
        Lock.take(tmp_path)
    assert "process 4242 on `node17`" in caught.value.message
    assert "last sign of life was 0 s ago" in str(caught.value.hint)
    silent = time.time() - DEAD_AFTER - 1
    os.utime(path, (silent, silent))
    Lock.take(tmp_path).release()


def test_another_hosts_lock_from_the_future_counts_from_now(tmp_path: Path) -> None:
    """The clock was set back: otherwise a dead holder would lock out everybody until that time."""
    path = tmp_path / NAME
    path.write_text(holder_elsewhere().text())
    future = time.time() + 365 * 86400
    os.utime(path, (future, future))
    with pytest.raises(CannotJudge):
        Lock.take(tmp_path)
    assert abs(path.stat().st_mtime - time.time()) < 3600
    silent = path.stat().st_mtime - DEAD_AFTER - 1
    os.utime(path, (silent, silent))
    Lock.take(tmp_path).release()


def test_the_rule() -> None:
    now = Holder.this_process()
    gone, elsewhere = replace(now, start=now.start - 1), holder_elsewhere()
    rebooted = replace(elsewhere, host=now.host)
    long = DEAD_AFTER + 1
    # This host: the kernel knows; on a file system without locks the process's start time decides.
    assert dead_by_rule(now, now, 0, kernel_gave=True)
    assert not dead_by_rule(now, now, long, kernel_gave=False)
    assert dead_by_rule(gone, now, 0, kernel_gave=False)
    assert dead_by_rule(rebooted, now, 0, kernel_gave=False)
    # Another host: the kernel's answer is not enough.
    assert not dead_by_rule(elsewhere, now, 0, kernel_gave=True)
    assert dead_by_rule(elsewhere, now, long, kernel_gave=True)
    # A file that was not written completely.
    assert dead_by_rule(None, now, 0, kernel_gave=True)
    assert not dead_by_rule(None, now, 0, kernel_gave=False)
