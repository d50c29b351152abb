"""The kernel's log since an earlier moment, each line once: from the journal, or from /dev/kmsg where none is kept.

A position is the last line that was read: its boot, its time since that boot, and its cursor in the journal or its
number in /dev/kmsg. A reboot ends no journal: what an earlier boot wrote after the position is read first. What was
rotated away before it was read is gone, and so is what the kernel overwrote; that is said where it can be seen.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import time
from dataclasses import dataclass
from typing import Any, Callable, Iterator, Mapping, Sequence

from ..common.commands import in_c_locale
from ..common.files import read_text
from ..common.waiting import wait_for

SECONDS = 20.0
"""What reading may take. The next check goes on from there."""
LINES = 50_000
"""What is read at once: the log of a node that prints without an end fits into no memory."""
_RECORD_BYTES = 8192
"""/dev/kmsg hands out one record for each read, and refuses a smaller buffer than it needs (kernel: dev-kmsg)."""
_FIELDS = "MESSAGE,_SOURCE_MONOTONIC_TIMESTAMP"


class Unreadable(Exception):
    """The log cannot be read. The message is its words."""


class Refused(Unreadable):
    """The journal has no such cursor: it was deleted, or is another one."""


@dataclass(frozen=True)
class Position:
    """The last line that was read; empty: none."""

    boot: str = ""
    microseconds: int = -1
    cursor: str = ""
    number: int = -1


START = Position()


@dataclass(frozen=True)
class Line:
    """A line of the kernel."""

    boot: str
    microseconds: int
    """Since that boot."""
    at: float
    """Seconds since 1970."""
    text: str
    cursor: str = ""
    number: int = -1

    @property
    def position(self) -> Position:
        """Where the log goes on after it."""
        return Position(self.boot, self.microseconds, self.cursor, self.number)


Query = Callable[[Sequence[str]], Iterator[Mapping[str, Any]]]
"""The entries that journalctl has for these arguments. Raises ``Unreadable``."""


@dataclass
class Log:
    """A node's log. ``lost``: lines that were overwritten before they were read."""

    root: str = "/"
    lost: int = 0

    @property
    def boot(self) -> str:
        """This boot, as the journal writes it."""
        return (read_text(os.path.join(self.root, "proc/sys/kernel/random/boot_id")) or "").replace("-", "")

    def since(self, position: Position) -> list[Line]:
        """The lines after ``position``, at most ``LINES``, oldest first. Raises ``Unreadable``."""
        boot = self.boot
        if os.path.isdir(os.path.join(self.root, "run/systemd/journal")):
            lines = _first(from_journal(position, boot, self._journalctl))
            # A journal may be kept without the kernel's lines (`ReadKMsg=no`): then it has none of this boot.
            if lines or position.cursor:
                return lines
        records, self.lost = from_kmsg(position, boot, self._records(), time.time() - time.monotonic())
        return records

    def _journalctl(self, arguments: Sequence[str]) -> Iterator[Mapping[str, Any]]:
        argv = ["journalctl", "--quiet", "--no-pager", "--output=json", "--output-fields=" + _FIELDS]
        if self.root != "/":
            argv.append("--root=" + self.root)
        # Not `--dmesg`, which means this boot alone.
        for line in _printed([*argv, *arguments, "_TRANSPORT=kernel"], SECONDS):
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if isinstance(entry, dict):
                    yield entry

    def _records(self) -> Iterator[str]:
        path = os.path.join(self.root, "dev/kmsg")
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise Unreadable("`%s` cannot be read: %s" % (path, error.strerror)) from None
        try:
            while True:
                try:
                    record = os.read(handle, _RECORD_BYTES)
                except BrokenPipeError:
                    # The kernel overwrote what was not read yet; the next read goes on behind the hole.
                    continue
                except OSError:
                    return
                if not record:
                    return
                yield from record.decode("utf-8", "replace").splitlines()
        finally:
            os.close(handle)


def from_journal(position: Position, boot: str, query: Query) -> Iterator[Line]:
    """Lines after ``position``, from a journal. Raises ``Unreadable``."""
    # Inclusive, since older versions of `--after-cursor` skip a line where the one of the cursor was rotated away.
    behind = ["--cursor=" + position.cursor]
    with contextlib.suppress(Refused):
        if position.cursor and position.boot == boot:
            for line in _lines(query([*behind, "_BOOT_ID=" + boot])):
                if line.cursor != position.cursor:
                    yield line
            return
        for line in _lines(query(behind)) if position.cursor else ():
            if line.boot != boot and line.cursor != position.cursor:
                yield line
    for line in _lines(query(["_BOOT_ID=" + boot])):
        if position.boot != boot or line.microseconds > position.microseconds:
            yield line


def from_kmsg(position: Position, boot: str, records: Iterator[str], booted: float) -> tuple[list[Line], int]:
    """Lines after ``position``, from records of /dev/kmsg, and how many were overwritten. ``booted``: when it began."""
    lines: list[Line] = []
    lost, before = 0, position.number if position.boot == boot else -1
    for record in records:
        head, separator, text = record.partition(";")
        fields = head.split(",")
        # A line that begins with a blank has a name and a value of the record above it.
        if not separator or record.startswith(" ") or len(fields) < 3 or not (fields[1] + fields[2]).isdigit():
            continue
        number, microseconds = int(fields[1]), int(fields[2])
        if number <= before or (before < 0 and position.boot == boot and microseconds <= position.microseconds):
            continue
        if before >= 0 and not lines:
            lost = number - before - 1
        if len(lines) == LINES:
            break
        lines.append(Line(boot, microseconds, booted + microseconds / 1e6, text, number=number))
    return lines, lost


def _first(lines: Iterator[Line]) -> list[Line]:
    """What is read at once. Raises ``Unreadable`` where that is nothing."""
    found: list[Line] = []
    try:
        for line in lines:
            found.append(line)
            if len(found) == LINES:
                break
    except Unreadable:
        if not found:
            raise
    return found


def _lines(entries: Iterator[Mapping[str, Any]]) -> Iterator[Line]:
    """Entries of the journal as lines; one without the fields that every entry has is none."""
    for entry in entries:
        message = entry.get("MESSAGE")
        if isinstance(message, list):
            # Bytes that are no UTF-8.
            message = bytes(byte for byte in message if isinstance(byte, int) and 0 <= byte < 256).decode(
                errors="replace"
            )
        try:
            monotonic = entry.get("_SOURCE_MONOTONIC_TIMESTAMP") or entry["__MONOTONIC_TIMESTAMP"]
            yield Line(
                boot=str(entry["_BOOT_ID"]),
                microseconds=int(monotonic),
                at=int(entry["__REALTIME_TIMESTAMP"]) / 1e6,
                text=message if isinstance(message, str) else "",
                cursor=str(entry["__CURSOR"]),
            )
        except (KeyError, TypeError, ValueError):
            continue


def _printed(argv: Sequence[str], seconds: float) -> Iterator[bytes]:
    """The lines that a program prints, until ``seconds`` are over: then it is left behind. Raises ``Unreadable``."""
    try:
        child = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=in_c_locale(os.environ),
            start_new_session=True,
            bufsize=0,
        )
    except OSError as error:
        raise Unreadable("`%s` cannot be started: %s" % (argv[0], error.strerror)) from None
    output: Any = child.stdout
    deadline, text = time.monotonic() + seconds, b""
    poller = select.poll()
    poller.register(output, select.POLLIN | select.POLLHUP)
    try:
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not poller.poll(left * 1000):
                raise Unreadable("`%s` did not end within %g s" % (argv[0], seconds))
            part = os.read(output.fileno(), 1 << 16)
            if not part:
                break
            *whole, text = (text + part).split(b"\n")
            yield from whole
        wait_for(lambda: child.poll() is not None, 1.0, 0.005)
        if child.returncode:
            raise Refused("`%s` failed with exit status %d" % (argv[0], child.returncode))
    finally:
        output.close()
        if child.poll() is None:
            child.kill()
            # It may wait for a dead disk. Then init reaps it.
            wait_for(lambda: child.poll() is not None, 1.0, 0.01)
