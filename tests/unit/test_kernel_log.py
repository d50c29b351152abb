"""The kernel's log, read since the last check: each line once, over reboots, rotations and missed checks."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tunetool.node.health import kernel_log
from tunetool.node.health.kernel_log import Line, Log, Position, Refused, Unreadable, from_journal, from_kmsg

BOOTED = 1.8e9


@dataclass
class Machine:
    """A node that prints numbered lines, with a journal that is kept over boots and a ring that is not."""

    boot: int = 0
    clock: int = 0
    printed: list[int] = field(default_factory=list)
    journal: list[dict[str, str]] = field(default_factory=list)
    ring: list[str] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    kept: str = "a"
    """Which journal there is: cursors of another one are refused."""

    def prints(self) -> int:
        self.clock += 7
        number = len(self.printed)
        self.printed.append(number)
        self.journal.append(
            {
                "__CURSOR": f"{self.kept}{number}",
                "_BOOT_ID": str(self.boot),
                "_SOURCE_MONOTONIC_TIMESTAMP": str(self.clock),
                "__REALTIME_TIMESTAMP": str(number),
                "MESSAGE": str(number),
            }
        )
        self.ring.append(f"6,{next(self.numbers)},{self.clock},-;{number}")
        return number

    def reboots(self) -> None:
        self.boot, self.clock, self.ring, self.numbers = self.boot + 1, 0, [], itertools.count()

    def query(self, arguments: Sequence[str]) -> Iterator[Mapping[str, Any]]:
        """As journalctl: a line that was rotated away is no obstacle, another journal is."""
        entries = self.journal
        for argument in arguments:
            option, _, value = argument.partition("=")
            if option == "--cursor":
                if value[0] != self.kept:
                    raise Refused("no such cursor")
                entries = [each for each in entries if int(each["__CURSOR"][1:]) >= int(value[1:])]
            else:
                assert option == "_BOOT_ID"
                entries = [each for each in entries if each["_BOOT_ID"] == value]
        yield from entries


def texts(lines: Sequence[Line]) -> list[int]:
    return [int(line.text) for line in lines]


STEPS = st.lists(st.sampled_from(["print", "print", "reboot", "rotate", "check", "ring"]), max_size=40)


@given(STEPS)
@example(["print", "check", "print", "rotate", "rotate", "print", "check"])
@example(["print", "check", "print", "reboot", "print", "reboot", "print", "check", "check"])
def test_a_journal_is_read_without_a_loss_or_a_double(steps: list[str]) -> None:
    machine, position, read = Machine(), Position(), []
    gone: set[int] = set()
    for step in [*steps, "check"]:
        if step == "print":
            machine.prints()
        elif step == "reboot":
            machine.reboots()
        elif step == "rotate" and machine.journal:
            gone.add(int(machine.journal.pop(0)["MESSAGE"]))
        elif step == "check":
            lines = list(from_journal(position, str(machine.boot), machine.query))
            if not position.cursor:
                # Before the first check: this boot alone.
                gone |= {number for number in machine.printed if number not in texts(lines)}
            read += texts(lines)
            position = lines[-1].position if lines else position
    assert read == sorted(set(read))
    assert set(machine.printed) - set(read) <= gone, "lost, although it was there to be read"


@given(STEPS)
@example(["print", "check", "print", "print", "ring", "check"])
def test_the_ring_is_read_without_a_loss_or_a_double(steps: list[str]) -> None:
    machine, position, read, gone = Machine(), Position(), [], set[int]()
    overwritten = 0
    for step in [*steps, "check"]:
        if step == "print":
            machine.prints()
        elif step == "reboot":
            gone |= {int(record.partition(";")[2]) for record in machine.ring}
            machine.reboots()
            overwritten = 0
        elif step == "ring" and machine.ring:
            number = int(machine.ring.pop(0).partition(";")[2])
            gone.add(number)
            overwritten += number not in read
        elif step == "check":
            known = position.boot == str(machine.boot)
            lines, lost = from_kmsg(position, str(machine.boot), iter(machine.ring), BOOTED)
            read += texts(lines)
            if known and lines:
                assert lost == overwritten
                overwritten = 0
            position = lines[-1].position if lines else position
            if not known:
                overwritten = 0
    assert read == sorted(set(read))
    assert set(machine.printed) - set(read) <= gone


@given(st.lists(st.sampled_from(["print", "journal", "ring", "delete"]), max_size=30))
def test_another_source_gives_no_line_twice(steps: list[str]) -> None:
    machine, position, read = Machine(), Position(), []
    for step in [*steps, "ring"]:
        if step == "print":
            machine.prints()
        elif step == "delete":
            # All that was kept is written again, as after `journalctl --rotate` into another directory.
            machine.kept = "b" if machine.kept == "a" else "a"
            for entry in machine.journal:
                entry["__CURSOR"] = machine.kept + entry["__CURSOR"][1:]
        else:
            if step == "journal":
                lines = list(from_journal(position, "0", machine.query))
            else:
                lines = from_kmsg(position, "0", iter(machine.ring), BOOTED)[0]
            read += texts(lines)
            position = lines[-1].position if lines else position
    assert read == machine.printed


def test_a_flood_is_read_by_several_checks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernel_log, "LINES", 3)
    machine = Machine()
    for _ in range(8):
        machine.prints()
    node = lay_out(tmp_path, machine)
    read: list[list[int]] = []
    position = Position()
    for _ in range(4):
        lines = Log(str(node)).since(position)
        read.append(texts(lines))
        position = lines[-1].position if lines else position
    assert read == [[0, 1, 2], [3, 4, 5], [6, 7], []]


def lay_out(root: Path, machine: Machine) -> Path:
    (root / "dev").mkdir(exist_ok=True)
    (root / "proc/sys/kernel/random").mkdir(parents=True, exist_ok=True)
    (root / "proc/sys/kernel/random/boot_id").write_text(str(machine.boot) + "\n")
    (root / "dev/kmsg").write_text("".join(record + "\n SUBSYSTEM=block\n" for record in machine.ring))
    return root


def program(root: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A journalctl of our own, and the directory by which a node is known to run journald."""
    (root / "run/systemd/journal").mkdir(parents=True)
    path = root / "bin/journalctl"
    path.parent.mkdir()
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")


def test_the_journal_s_own_words_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    machine.prints()
    node = lay_out(tmp_path, machine)
    entries = [
        {**machine.journal[0], "MESSAGE": [110, 118, 255], "__CURSOR": "s=1;i=1"},
        {**machine.journal[0], "MESSAGE": None, "__CURSOR": "s=1;i=2"},
        {"MESSAGE": "without the rest"},
    ]
    (node / "entries").write_text("".join(json.dumps(each) + "\n" for each in entries) + "no JSON\n")
    program(node, f'echo "$@" >{node}/asked; cat {node}/entries', monkeypatch)
    lines = Log(str(node)).since(Position())
    assert [line.text for line in lines] == ["nv�", ""]
    assert lines[1].position == Position("0", 7, "s=1;i=2")
    asked = (node / "asked").read_text()
    assert "_BOOT_ID=0 _TRANSPORT=kernel" in asked
    assert "--dmesg" not in asked, "that is this boot alone"


def test_a_node_without_the_kernel_s_journal_reads_kmsg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    machine.prints()
    node = lay_out(tmp_path, machine)
    program(node, "exit 0", monkeypatch)
    assert texts(Log(str(node)).since(Position())) == [0]


def test_a_journal_that_hangs_holds_no_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = lay_out(tmp_path, Machine())
    os.mkfifo(node / "never")
    program(node, f"echo $$ >{node}/pid; exec cat {node}/never", monkeypatch)
    monkeypatch.setattr(kernel_log, "SECONDS", 0.5)
    with pytest.raises(Unreadable, match=r"`journalctl` did not end within 0\.5 s"):
        Log(str(node)).since(Position())
    assert not Path("/proc", (node / "pid").read_text().strip()).exists(), "it left the program behind"


def test_what_a_hanging_journal_gave_before_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    machine.prints()
    node = lay_out(tmp_path, machine)
    os.mkfifo(node / "never")
    program(node, f"echo '{json.dumps(machine.journal[0])}'; exec cat {node}/never", monkeypatch)
    monkeypatch.setattr(kernel_log, "SECONDS", 0.5)
    assert texts(Log(str(node)).since(Position())) == [0]


def test_a_log_that_may_not_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match="kmsg` cannot be read: No such file"):
        Log(str(tmp_path)).since(Position())
