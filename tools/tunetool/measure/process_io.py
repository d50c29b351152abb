"""Which processes moved bytes between two looks, by the kernel's counts in /proc/PID/io.

The kernel counts what a process and its threads had read from a device, and what they made it write, of all devices
together. Its own threads it does not count: the resync of an array, the write-back of pages. A process that is reaped
adds its counts to its parent's. As a user only one's own processes may be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tunetool.node.common.documents import read_bytes
from tunetool.node.common.files import entries_of, whole_number

_FIELDS = {"read": "read_bytes", "write": "write_bytes"}
_PARENT, _FLAGS, _BEGAN = 1, 6, 19
"""Fields of /proc/PID/stat behind the name, which may hold blanks and brackets itself."""
_KERNEL_THREAD = 0x00200000
"""PF_KTHREAD (include/linux/sched.h). Such a thread may do the I/O of the very program that is measured, as a loop
device's does."""
_LARGEST = 1 << 16


@dataclass(frozen=True)
class Process:
    """One process at one moment."""

    pid: int
    began: int
    """In clock ticks since the boot: another process may get the same pid."""
    parent: int
    name: str
    moved: Mapping[str, int] | None
    """Bytes by direction since it began; None where they may not be read."""


@dataclass(frozen=True)
class Look:
    """All processes but the kernel's threads, by pid."""

    processes: Mapping[int, Process]
    hidden: bool = False
    """Whether there are processes whose counts may not be read."""

    @property
    def counts(self) -> bool:
        """Whether the kernel counts at all: some are built without it, and some sandboxes count nothing."""
        return any(any(process.moved.values()) for process in self.processes.values() if process.moved is not None)


@dataclass(frozen=True)
class Mover:
    """A process that moved bytes between two looks."""

    pid: int
    name: str
    bytes: int


def look(root: str = "/") -> Look:
    """All processes now; none where /proc shows none."""
    processes, hidden = {}, False
    proc = f"{root.rstrip('/')}/proc"
    for pid in (number for number in map(whole_number, entries_of(proc)) if number is not None):
        try:
            process = _process(pid, f"{proc}/{pid}")
        except (OSError, ValueError, IndexError):
            continue  # it has ended
        if process is not None:
            processes[pid] = process
            hidden = hidden or process.moved is None
    return Look(processes, hidden)


def _process(pid: int, base: str) -> Process | None:
    """None for a thread of the kernel. Raises ``OSError``; ``ValueError`` and ``IndexError`` for what is no stat."""
    head, _, tail = read_bytes(f"{base}/stat", _LARGEST).decode("utf-8", "replace").rpartition(")")
    fields = tail.split()
    if int(fields[_FLAGS]) & _KERNEL_THREAD:
        return None
    name = "".join(each if each.isprintable() and each != "`" else "?" for each in head.partition("(")[2])
    return Process(pid, int(fields[_BEGAN]), int(fields[_PARENT]), name, _moved(f"{base}/io"))


def _moved(path: str) -> dict[str, int] | None:
    """By direction; None where it may not be read. Raises ``OSError``: also where the kernel has no such file."""
    try:
        text = read_bytes(path, _LARGEST).decode("ascii", "replace")
    except PermissionError:
        return None
    counts = dict(line.partition(": ")[::2] for line in text.splitlines())
    return {direction: max(0, whole_number(counts.get(field)) or 0) for direction, field in _FIELDS.items()}


def movers(before: Look, after: Look, directions: Sequence[str], but: int) -> list[Mover]:
    """Who moved bytes between two looks, the most first; not ``but``, a pid, and not its descendants.

    What ended between the looks is its parent's: what it had moved before the first look is taken off there.
    """
    family = _family(but, before, after)
    earlier = {process.pid: _sum(process, directions) for process in before.processes.values()}
    for process in before.processes.values():
        heir = _heir(process, before, after)
        if heir is not None and heir in earlier and heir != process.pid:
            earlier[heir] += _sum(process, directions)
    found = []
    for process in after.processes.values():
        same = _same(before.processes.get(process.pid), process)
        unknown = process.moved is None or (same and before.processes[process.pid].moved is None)
        if process.pid in family or unknown:
            continue
        moved = _sum(process, directions) - (earlier[process.pid] if same else 0)
        if moved > 0:
            found.append(Mover(process.pid, process.name, moved))
    return sorted(found, key=lambda mover: (-mover.bytes, mover.pid))


def _sum(process: Process, directions: Sequence[str]) -> int:
    return sum((process.moved or {}).get(direction, 0) for direction in directions)


def _same(one: Process | None, other: Process | None) -> bool:
    return one is not None and other is not None and one.began == other.began


def _heir(process: Process, before: Look, after: Look) -> int | None:
    """The nearest process upwards that lives at the second look, ``process`` itself included; None: not known."""
    for each in _upwards(process, before):
        if _same(each, after.processes.get(each.pid)):
            return each.pid
    return None


def _family(pid: int, before: Look, after: Look) -> set[int]:
    """``pid`` and its descendants at either look."""
    return {
        process.pid
        for moment in (before, after)
        for process in moment.processes.values()
        if any(each.pid == pid for each in _upwards(process, moment))
    }


def _upwards(process: Process, moment: Look) -> Iterator[Process]:
    """``process``, its parent, and so on. A recorded tree may go in a circle."""
    seen: set[int] = set()
    here: Process | None = process
    while here is not None and here.pid not in seen:
        seen.add(here.pid)
        yield here
        here = moment.processes.get(here.parent)
