"""The one lock: who gets it, who waits, and what is left of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tunetool.node.common.file_lock import FileLock
from tunetool.node.common.waiting import try_for, wait_for

HOLD = """
import sys
from tunetool.node.common.file_lock import FileLock

lock = FileLock.file(sys.argv[1])
lock.take(shared=len(sys.argv) > 2)
lock.sign("the other")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lock"


@pytest.fixture
def other(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock until its input ends."""
    argv = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_held_lock_names_its_holder_and_ends_with_it(path: Path, other: subprocess.Popen[str]) -> None:
    with FileLock.file(path) as lock:
        assert not lock.take(patience=0)
        assert not lock.take(shared=True, patience=0)
        assert lock.note() == "the other"
        other.kill()
        assert lock.take(patience=60)


def test_it_waits_without_a_limit_unless_one_is_given(path: Path, other: subprocess.Popen[str]) -> None:
    asked = []

    def tick() -> None:
        asked.append(1)
        other.kill()

    with FileLock.file(path) as lock:
        assert lock.take(patience=60, pause=0.01, tick=tick)
        assert asked
    with FileLock.file(path) as lock:
        assert lock.take()


def test_shared_holders_are_together(path: Path) -> None:
    with FileLock.file(path) as first, FileLock.file(path) as second, FileLock.file(path) as third:
        assert first.take(shared=True, patience=0)
        assert second.take(shared=True, patience=0)
        assert not third.take(patience=0)


def test_freed_it_is_free_for_all_who_inherited_it(path: Path) -> None:
    with FileLock.file(path) as lock:
        lock.take()
        inherited = FileLock(os.dup(lock.handle))
        lock.close()
        with FileLock.file(path) as second:
            assert not second.take(patience=0)
            inherited.free()
            assert second.take(patience=0)
        lock.handle = inherited.handle


def test_a_directory_can_be_locked(tmp_path: Path) -> None:
    with FileLock.on(tmp_path) as first, FileLock.on(tmp_path) as second:
        assert first.take(patience=0)
        assert not second.take(patience=0)


def test_a_removed_lock_file_is_noticed(path: Path) -> None:
    with FileLock.file(path) as lock:
        assert lock.is_named()
        path.unlink()
        assert not lock.is_named()
        path.touch()
        assert not lock.is_named()


def test_a_link_is_not_followed(tmp_path: Path, path: Path) -> None:
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="lock"):
        FileLock.file(path)
    assert not (tmp_path / "elsewhere").exists()


def test_a_lock_file_is_made_only_where_that_is_asked(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        FileLock.file(path, make=False)
    FileLock.file(path, 0o600).close()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_shorter_note_replaces_a_longer_one(path: Path) -> None:
    with FileLock.file(path) as lock:
        lock.sign("process 12345")
        lock.sign("ä")
        assert lock.note() == "ä"


def test_waiting_asks_at_once_and_once_more_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept, answers = [0.0], list[float](), iter(["", "", "", "late"])
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr("time.sleep", sleep)
    assert wait_for(lambda: next(answers), 2.5, pause=1.0) == "late"
    assert slept == [1.0, 1.0, 0.5]
    assert wait_for(lambda: "", 1.0, pause=1.0) == ""
    assert wait_for(lambda: 0, 0.0) == 0
    assert slept == [1.0, 1.0, 0.5, 1.0]


def test_what_fails_is_tried_until_the_end_and_then_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))

    def done_at(moment: float) -> float:
        if now[0] < moment:
            raise OSError(now[0])
        return now[0]

    assert try_for(lambda: done_at(2.0), OSError, 5.0, pause=1.0) == 2.0
    with pytest.raises(OSError, match=r"4\.5"):
        try_for(lambda: done_at(9.0), OSError, 2.5, pause=1.0)
    with pytest.raises(ZeroDivisionError):
        try_for(lambda: 1 / 0, OSError, 2.5)
