"""Who used the drives beside a measurement, from what /proc had before and after it: recorded trees and real samples."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_measure_parts import did, stack

from tunetool.measure import busy, sampling
from tunetool.measure.busy import Others
from tunetool.measure.evidence import REPEATS, Counted, explain
from tunetool.measure.process_io import look, movers
from tunetool.measure.sampling import Counting, Repeats, again, judgement
from tunetool.tune.samples import Move, Samples
from tunetool.tune.settings import DEFAULTS

MB = 10**6
OWN = 100
"""The process that measures, whose child is fio."""
KERNEL_THREAD = 0x00208040
"""Flags of a kworker of Linux 6.1."""
REST = ", so it may be the kernel itself, as in write-back, or another container"


class Machine:
    """A tree with /proc; each process moves bytes when told."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.start(1, 0, "systemd")
        self.start(OWN, 1, "tunetool", written=5 * MB)
        self.start(101, OWN, "fio")

    def start(
        self, pid: int, parent: int, name: str, read: int = 0, written: int = 0, began: int = 50, flags: int = 0x400000
    ) -> None:
        base = self.root / f"proc/{pid}"
        base.mkdir(parents=True, exist_ok=True)
        rest = f"S {parent} 1 1 0 -1 {flags} 0 0 0 0 0 0 0 0 20 0 1 0 {began} 1 1"
        (base / "stat").write_text(f"{pid} ({name}) {rest}\n")
        text = f"rchar: 9\nwchar: 9\nsyscr: 1\nsyscw: 1\nread_bytes: {read}\nwrite_bytes: {written}\n"
        (base / "io").write_text(text + "cancelled_write_bytes: 0\n")

    def end(self, pid: int) -> None:
        for path in (self.root / f"proc/{pid}").iterdir():
            path.unlink()
        (self.root / f"proc/{pid}").rmdir()

    def sync(self, array: str, action: str, member: str) -> None:
        base = self.root / f"sys/block/{array}"
        (base / "md").mkdir(parents=True)
        (base / "md/sync_action").write_text(action + "\n")
        (base / "slaves" / member).mkdir(parents=True)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def said(machine: Machine) -> Callable[..., str]:
    """What is said of 100 MB that the drives wrote for others while ``change`` happened."""

    def words(change: Callable[[], None], foreign: int = 100 * MB) -> str:
        others = Others(stack(2), str(machine.root), OWN)
        change()
        others.end()
        return others.in_words(foreign, "write")

    return words


def test_who_wrote_meanwhile_is_named_by_command_pid_and_bytes(machine: Machine, said: Callable[..., str]) -> None:
    machine.start(812, 1, "my (db) 1", read=900 * MB, written=40 * MB)

    def change() -> None:
        machine.start(812, 1, "my (db) 1", read=900 * MB, written=130 * MB)
        machine.start(101, OWN, "fio", written=5000 * MB)
        machine.start(OWN, 1, "tunetool", written=7000 * MB)

    assert said(change) == "`my (db) 1` (pid 812) wrote 90 MB"


def test_the_three_that_moved_most_are_named(machine: Machine, said: Callable[..., str]) -> None:
    def change() -> None:
        for pid, written in ((800, 30), (801, 20), (802, 50), (803, 10), (804, 4)):
            machine.start(pid, 1, f"p{pid}", written=written * MB)

    assert (
        said(change)
        == "`p802` (pid 802) wrote 50 MB, `p800` (pid 800) wrote 30 MB, `p801` (pid 801) wrote 20 MB and 1 more"
    )


def test_nobody_is_named_for_what_he_did_before(machine: Machine, said: Callable[..., str]) -> None:
    machine.start(812, 1, "db", written=900 * MB)
    assert said(lambda: None) == "no process that can be read moved so much" + REST


def test_who_explains_a_part_is_named_as_a_part(machine: Machine, said: Callable[..., str]) -> None:
    change = lambda: machine.start(812, 1, "db", written=10 * MB)  # noqa: E731
    assert said(change) == "`db` (pid 812) wrote 10 MB; no process that can be read moved the rest" + REST


def test_another_process_with_a_reused_pid_is_another(machine: Machine, said: Callable[..., str]) -> None:
    machine.start(812, 1, "old", written=900 * MB)
    assert said(lambda: machine.start(812, 1, "new", written=80 * MB, began=60)) == "`new` (pid 812) wrote 80 MB"


def test_what_ended_meanwhile_counts_for_its_parent(machine: Machine, said: Callable[..., str]) -> None:
    """The kernel adds the counts of a child that was waited for, all of its life, to its parent's."""
    machine.start(700, 1, "bash", written=1 * MB)
    machine.start(701, 700, "sudo")
    machine.start(702, 701, "dd", written=400 * MB)

    def change() -> None:
        machine.end(702)
        machine.end(701)
        machine.start(700, 1, "bash", written=1 * MB + 490 * MB)

    assert said(change) == "`bash` (pid 700) wrote 90 MB"


def test_a_thread_of_the_kernel_is_no_process(machine: Machine, said: Callable[..., str]) -> None:
    """That of a loop device writes what the measured program wrote."""
    machine.start(40, 2, "kworker/u4:1-loop0", flags=KERNEL_THREAD)
    change = lambda: machine.start(40, 2, "kworker/u4:1-loop0", written=900 * MB, flags=KERNEL_THREAD)  # noqa: E731
    assert said(change) == "no process that can be read moved so much" + REST


@pytest.mark.parametrize("action", ["resync", "recover", "check", "repair", "reshape"])
def test_an_array_that_the_kernel_checks_is_named(machine: Machine, said: Callable[..., str], action: str) -> None:
    machine.sync("md5", action, "nvme1n1")
    machine.sync("md6", "check", "sdz")  # on other drives
    assert said(lambda: None) == f"array `md5` does a `{action}`"


def test_an_array_at_rest_explains_nothing(machine: Machine, said: Callable[..., str]) -> None:
    machine.sync("md5", "idle", "nvme1n1")
    assert said(lambda: None) == "no process that can be read moved so much" + REST


def test_a_user_is_told_that_root_sees_more(
    machine: Machine, said: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() == 0:
        # Root may read a file without any right.
        monkeypatch.setattr("tunetool.measure.process_io._moved", refuse_others)
    machine.start(812, 1, "db")
    (machine.root / "proc/812/io").chmod(0)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    expected = "no process that can be read moved so much, and root sees those of other users"
    assert said(lambda: None) == expected


def refuse_others(path: str) -> dict[str, int] | None:
    return None if "/812/" in path else {"read": 0, "write": MB}


@pytest.mark.parametrize("kernel", ["no such file", "all are zero"])
def test_where_the_kernel_counts_nothing_nothing_is_said(
    machine: Machine, said: Callable[..., str], kernel: str
) -> None:
    for pid in (1, OWN, 101):
        if kernel == "no such file":
            (machine.root / f"proc/{pid}/io").unlink()
        else:
            machine.start(pid, 0, "p")
    assert said(lambda: None) == ""
    line = explain(stack(), "write", Counted(10**9, 15 * 10**8, {}))
    assert "something else uses the drives; stop it" in line


def test_strange_processes_stop_nobody(machine: Machine) -> None:
    before = look(str(machine.root))
    (machine.root / "proc/5").mkdir()
    (machine.root / "proc/6").mkdir()
    (machine.root / "proc/6/stat").write_text("6 (half")
    machine.start(7, 8, "a\x1b[31m`\n", written=MB)
    machine.start(8, 7, "in a circle", written=MB)
    names = [mover.name for mover in movers(before, look(str(machine.root)), ["write"], OWN)]
    assert names == ["a?[31m??", "in a circle"]


# --- samples ---


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Each look at /proc that samples take."""
    taken: list[str] = []

    class Watched(Others):
        def __init__(self, *arguments: Any) -> None:
            taken.append("begin")

        def end(self) -> None:
            taken.append("end")

        def in_words(self, foreign: int, *directions: Any) -> str:
            return f"somebody moved {foreign} at a {'/'.join(directions)}"

    monkeypatch.setattr(sampling, "Others", Watched)
    monkeypatch.setattr(busy, "Others", Watched)
    return taken


def samples(counted: list[int], repeats: Repeats, monkeypatch: pytest.MonkeyPatch) -> Counted:
    """The sample of 1,000 bytes that is kept, where the drives count so many at each try."""
    made = stack(1)
    numbers = iter([number for each in counted for number in (0, each)])
    monkeypatch.setattr(sampling, "snapshot", lambda _: {made.leaves[0].name: did(next(numbers))})

    def take(label: str) -> Any:
        with Counting(made, label) as counting:
            pass
        return SimpleNamespace(counted=counting.count("read", 512_000), claimed_bytes=512_000, moment=0.0)

    kept = again("write-1", take, judgement, repeats, lambda _: None).counted
    assert isinstance(kept, Counted)
    return kept


def test_a_quiet_sample_looks_at_no_process(looks: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert samples([512_000], Repeats(), monkeypatch).others == ""
    assert looks == []


def test_the_sample_that_is_reported_names_who_disturbed_it(looks: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    kept = samples([1_024_000] * (REPEATS + 1), Repeats(), monkeypatch)
    assert looks == ["begin", "end"] * REPEATS
    line = explain(stack(1), "read", kept)
    assert "something else uses the drives: somebody moved 512000 at a read; stop it" in line
    # The next sample of the figure, which may not be repeated any more.
    later = samples([1_024_000], Repeats(REPEATS), monkeypatch)
    assert later.others == "somebody moved 512000 at a read"


def test_a_search_says_once_who_disturbs_it(looks: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made, lines = stack(1), []
    readings = itertools.count(step=2 << 20)
    monkeypatch.setattr(sampling, "snapshot", lambda _: {made.leaves[0].name: did(next(readings))})
    driver: Any = SimpleNamespace(engine="fio", move=lambda *_: Move(1 << 20, 1.0))
    search = Samples(driver, made, time.monotonic, lines.append)
    assert [search.take(DEFAULTS, "read") for _ in range(2)] == [None, None]
    assert lines[1:] == ["something else uses the drives: somebody moved 1048576 at a read"]
    assert "repeated" in lines[0]


def test_who_keeps_the_drives_busy_is_named(looks: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made = stack(1)
    numbers = iter([0, 0, 0, 10**9, 10**9, 3 * 10**9])
    monkeypatch.setattr(busy, "snapshot", lambda _: {made.leaves[0].name: did(next(numbers))})
    assert busy.busy_devices(made, lambda: None, lambda _: None) == []
    assert looks == []
    (line,) = busy.busy_devices(made, lambda: None, lambda _: None)
    assert line.endswith(" within a second (somebody moved 2000000000 at a read/write)")
