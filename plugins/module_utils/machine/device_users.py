"""Users of a block device that mounts, swap and holders do not show: processes, loop devices, storage targets.

None of them keeps md from taking the device: a virtual machine or a target that opens a drive need not claim it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import glob
import os
import re
import select
import stat
import struct
import time
from dataclasses import dataclass
from typing import Iterable, Iterator, Mapping, Sequence

from ..common.files import entries_of, exact_text, link_target, read_text, whole_number

PATIENCE = 10.0
"""Seconds that a process may have a device open without being its user: udev and its programs look at every new one."""
_EVERY = 0.25

_sleep = time.sleep

_LOOP_GET_STATUS64 = 0x4C05  # linux/loop.h
_LOOP_INFO64 = 232

_AT_FDCWD, _AT_STATX_DONT_SYNC, _STATX_TYPE = -100, 0x4000, 0x1  # linux/fcntl.h, linux/stat.h
_STATX_BYTES = 256

_ROUNDS = 4
"""Times that a directory of ``/proc`` is listed while its entries move."""
_RING_ROUNDS, _RING_EVERY = 20, 0.005
"""Times that a ring is read while its lock is held, and the seconds between: one reading tells all of its files."""

_MAPPED = re.compile(r"^([0-9a-f]+-[0-9a-f]+) \S+ \S+ (\S+) (\d+) +/", re.MULTILINE)
"""Addresses, device of the file system and inode of a mapped file (proc(5))."""
_MAPPED_RING = re.compile(r"^\S+ \S+ (\S+) \S+ (\d+) +anon_inode:\[io_uring\]$", re.MULTILINE)
"""Offset and inode of a mapped ring."""
_BACKING = re.compile(r"(?:File|UDEV PATH): (\S.*?)(?=  +\w+: |\s*$)", re.MULTILINE)
"""The path in the ``info`` of a SCSI target, of which more columns follow."""

_Number = tuple[bool, int, int]
"""Whether it is a block device, major, minor."""


@dataclass(frozen=True)
class _Open:
    """A file descriptor of a process."""

    name: str
    pid: int
    how: str
    command: str
    what: str = "has it open"

    def __str__(self) -> str:
        return "process %d `%s` %s" % (self.pid, self.command, self.what)


def users_of(names: Sequence[str], patience: float = PATIENCE) -> dict[str, str]:
    """The first user by kernel name of the device; devices without one are left out.

    A device that a process has open is asked again for ``patience`` seconds: udev closes it, a user does not. It is in
    use if somebody has it open each time, also if that is another process or another descriptor each time.
    """
    numbers = _numbers(names)
    if not numbers:
        return {}
    users = dict(_reversed(_loops(numbers), _targets(numbers)))
    found = {name: opened for name, opened in _opened(numbers).items() if name not in users}
    deadline = time.monotonic() + patience
    while found and time.monotonic() < deadline:
        _sleep(_EVERY)
        now = _opened(numbers)
        if not found.keys() <= now.keys():
            # A user that hands it on at this moment may be missed once.
            now = {**_opened(numbers), **now}
        found = {name: now[name] for name in found if name in now}
    users.update((name, str(opened)) for name, opened in found.items())
    return users


def _opened(numbers: Mapping[_Number, str]) -> dict[str, _Open]:
    """The process of the least number that has a device open, by name of the device."""
    found: dict[str, _Open] = {}
    for opened in sorted(_processes(numbers), key=lambda opened: (opened.pid, opened.how)):
        found.setdefault(opened.name, opened)
    return found


def _reversed(*found: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The first user of a name last, so that a dictionary keeps it."""
    return [pair for pairs in found for pair in pairs][::-1]


def _numbers(names: Sequence[str]) -> dict[_Number, str]:
    """The devices' numbers, also those of NVMe's character devices, by which a program sends commands past the block
    layer."""
    numbers = {}
    for name in names:
        generic = "/sys/class/nvme-generic/%s/dev" % _generic(name)
        for path, block in (("/sys/class/block/%s/dev" % name, True), (generic, False)):
            major, _, minor = (read_text(path) or "").partition(":")
            if major.isdigit() and minor.isdigit():
                numbers[(block, int(major), int(minor))] = name
    return numbers


def _generic(name: str) -> str:
    """The name of a namespace's character device, which all its paths share (``nvme4c1n2`` is a path of ``ng4n2``)."""
    return re.sub(r"^nvme(\d+)(?:c\d+)?n", r"ng\1n", name)


def _named(text: str, numbers: Mapping[_Number, str]) -> list[_Number]:
    """The numbers of the device whose kernel name, or that of its character device, is ``text``."""
    return [number for number, name in numbers.items() if text in (name, _generic(name))]


def _loops(numbers: Mapping[_Number, str]) -> Iterator[tuple[str, str]]:
    for path in sorted(glob.glob("/sys/block/loop*/loop/backing_file")):
        loop = path.split(os.sep)[3]
        # The path is that of the process that made it, and may be another device's here: the number is right.
        number = _backing_number("/dev/" + loop) or _number_of(exact_text(path).rstrip("\n"))
        if number and number in numbers:
            yield numbers[number], "loop device `%s` lies on it" % loop


def _backing_number(path: str) -> _Number | None:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        answer = fcntl.ioctl(handle, _LOOP_GET_STATUS64, bytes(_LOOP_INFO64))
    except OSError:
        return None
    finally:
        os.close(handle)
    device = int(struct.unpack_from("=Q", answer, 16)[0])
    return (True, os.major(device), os.minor(device))


def _targets(numbers: Mapping[_Number, str]) -> Iterator[tuple[str, str]]:
    """Devices that the kernel itself exports: over NVMe, and by a SCSI target's file."""
    for path in sorted(glob.glob("/sys/kernel/config/nvmet/subsystems/*/namespaces/*/device_path")):
        enabled = read_text(os.path.join(os.path.dirname(path), "enable")) != "0"
        for name, how in _exported(exact_text(path).rstrip("\n"), enabled, numbers):
            yield name, "NVMe target `%s` %s" % (path.split(os.sep)[6], how)
    for path in sorted(glob.glob("/sys/kernel/config/nvmet/subsystems/*/passthru/device_path")):
        controller = os.path.basename(exact_text(path).strip())
        for name in set(numbers.values()):
            if controller and os.path.basename(os.path.realpath("/sys/class/block/%s/device" % name)) == controller:
                yield name, "NVMe target `%s` passes its controller through" % path.split(os.sep)[6]
    for path in sorted(glob.glob("/sys/kernel/config/target/core/*/*/info")):
        text = exact_text(path)
        for backing in _BACKING.findall(text):
            for name, how in _exported(backing, "Status: ACTIVATED" in text, numbers):
                yield name, "SCSI target `%s` %s" % (path.split(os.sep)[6], how)


def _exported(path: str, active: bool, numbers: Mapping[_Number, str]) -> Iterator[tuple[str, str]]:
    """The devices that a target may export which was given ``path``: every one, if nobody can tell."""
    number = _number_of(path)
    if number and number in numbers:
        yield numbers[number], "exports it"
    doubt = _doubt(path) if active and path else None
    if doubt:
        for name in sorted(set(numbers.values())):
            yield name, "exports `%s`, which %s and may have been this drive" % (path, doubt)


def _doubt(path: str) -> str | None:
    """Why ``path`` does not tell what was opened by it, or None if it does: the path may be another file's by now."""
    if not path.startswith("/"):
        return "is a relative path"
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return "is gone"
    if stat.S_ISBLK(mode):
        return None
    # An image of a disk in a file system is what many targets export; among the device nodes it took a drive's place.
    nodes = any(each.lstrip("/").startswith("dev/") for each in (os.path.normpath(path), os.path.realpath(path)))
    return None if stat.S_ISREG(mode) and not nodes else "is no block device any more"


def _number_of(path: str) -> _Number | None:
    with contextlib.suppress(OSError, ValueError):
        status = os.stat(path)
        if stat.S_ISBLK(status.st_mode) or stat.S_ISCHR(status.st_mode):
            return (stat.S_ISBLK(status.st_mode), os.major(status.st_rdev), os.minor(status.st_rdev))
    return None


def _processes(numbers: Mapping[_Number, str]) -> Iterator[_Open]:
    """Open files and mappings of the devices in every process that may be read, but ours."""
    # By file system and inode: most files are mapped by many processes.
    known: dict[tuple[str, str], _Number | None] = {}
    seen: set[int] = set()
    # One that ended may have handed its files to a child, which the list does not have.
    for _ in range(_ROUNDS):
        pids = {pid for pid in map(whole_number, entries_of("/proc")) if pid is not None} - seen - {os.getpid()}
        seen |= pids
        gone = False
        for pid in sorted(pids):
            yield from _process(pid, numbers, known)
            gone = gone or not os.path.exists("/proc/%d" % pid)
        if not gone:
            break


def _process(pid: int, numbers: Mapping[_Number, str], known: dict[tuple[str, str], _Number | None]) -> Iterator[_Open]:
    base = "/proc/%d" % pid
    rings: set[tuple[str, str]] = set()
    hidden = False
    threads = entries_of(base + "/task")
    # A thread may have files of its own, and goes on with them when the first thread has ended.
    for thread in threads:
        for handle, path, target in _handles("%s/task/%s/fd" % (base, thread)):
            if "[io_uring]" in target:
                rings.add((_inode(path), handle))
                listed = _registered(path, numbers)
                hidden = hidden or listed is None
                found = listed or []
            else:
                found = _open_numbers(path, target, numbers)
            for number in found:
                if number in numbers:
                    yield _Open(numbers[number], pid, "fd " + handle, _command(base))
    thread, maps = _maps(threads)
    for number in _mapped(thread, maps, known):
        if number in numbers:
            yield _Open(numbers[number], pid, "map", _command(base))
    if hidden or _without_descriptor(maps, rings):
        # Its files are known to the kernel alone.
        for name in set(numbers.values()):
            yield _Open(name, pid, "ring", _command(base), "has a ring of io_uring that does not show its files")


def _handles(directory: str) -> Iterator[tuple[str, str, str]]:
    """Number, path and target of each descriptor in a table, also of one that moves while the table is read."""
    seen: set[str] = set()
    for _ in range(_ROUNDS):
        gone = False
        for handle in entries_of(directory):
            if handle not in seen:
                path = os.path.join(directory, handle)
                target = link_target(path)
                if target:
                    seen.add(handle)
                    yield handle, path, target
                else:
                    gone = True
        if not gone:
            break


def _maps(threads: Sequence[str]) -> tuple[str, str]:
    """The mappings of a process, and a thread that has them: one that ended does not show the memory of all."""
    for thread in threads:
        maps = exact_text("/proc/%s/maps" % thread)
        if maps:
            return thread, maps
    return "", ""


def _mapped(thread: str, maps: str, known: dict[tuple[str, str], _Number | None]) -> Iterator[_Number]:
    for place, device, inode in _MAPPED.findall(maps):
        if (device, inode) not in known:
            plain = "-".join(address.lstrip("0") for address in place.split("-"))
            # Not below `task`, which has none.
            known[(device, inode)] = _open_number("/proc/%s/map_files/%s" % (thread, plain))
        number = known[(device, inode)]
        if number:
            yield number


def _without_descriptor(maps: str, rings: Iterable[tuple[str, str]]) -> bool:
    """Whether a ring is mapped that has none of the descriptors ``rings``, each with its inode."""
    known = [inode for inode, _ in rings]
    mapped: dict[str, int] = {}
    for offset, inode in _MAPPED_RING.findall(maps):
        # A ring begins at 0; its queues are mapped elsewhere.
        mapped[inode] = mapped.get(inode, 0) + (int(offset, 16) == 0)
    for inode, count in mapped.items():
        # Kernels before 5.12 give all rings the inode of all files without a name, as this one.
        if known.count(inode) < (max(count, 1) if inode == _shared_inode() else 1):
            return True
    return False


def _shared_inode() -> str:
    with select.epoll() as file:
        return str(os.fstat(file.fileno()).st_ino)


def _inode(path: str) -> str:
    with contextlib.suppress(OSError):
        return str(os.stat(path).st_ino)
    return ""


def _command(base: str) -> str:
    return read_text(base + "/comm") or "?"


def _registered(path: str, numbers: Mapping[_Number, str]) -> list[_Number] | None:
    """The devices that a ring of io_uring keeps registered, or None if it does not show them.

    While its lock is held, a ring shows none of its files, and on new kernels not even their number. It shows either
    all or none: new kernels leave out empty places. Old kernels print the last part of a name alone.
    """
    for attempt in range(_RING_ROUNDS):
        if attempt:
            # Whoever uses the ring holds its lock for microseconds.
            time.sleep(_RING_EVERY)
        text = exact_text(path.replace("/fd/", "/fdinfo/"))
        count = re.search(r"^UserFiles:\s*(\d+)$", text, re.MULTILINE)
        # Buffers have such lines, too.
        part = text[count.end() :].partition("\nUserBufs:")[0] if count else ""
        names = re.findall(r"^ *\d+: ?(.*)$", part, re.MULTILINE)
        if count and (names or int(count.group(1)) == 0):
            break
    else:
        return None
    found: list[_Number] = []
    for name in names:
        if not name:
            # Old kernels show no long name.
            return None
        whole = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), name)
        if whole.endswith(" (deleted)"):
            whole = whole[: -len(" (deleted)")]
        found += _named(whole[len("/dev/") :] if whole.startswith("/dev/") else whole, numbers)
        number = _number_of(whole) if "/" in whole else None
        if number and number not in found:
            found.append(number)
    return found


def _open_numbers(path: str, target: str, numbers: Mapping[_Number, str]) -> list[_Number]:
    """The device that a descriptor has open: a character device also by its name, where sysfs has no number of it."""
    number = _open_number(path)
    if number is None:
        return []
    name = target[len("/dev/") :] if target.startswith("/dev/ng") and not number[0] else ""
    return [number, *(each for each in _named(name, numbers) if each != number)]


def _open_number(path: str) -> _Number | None:
    """The device that a process has open; never waits for a server that is gone, as stat(2) of its files would."""
    if _statx is None:  # glibc before 2.28
        return _number_of(path) if link_target(path).startswith("/dev/") else None
    answer = ctypes.create_string_buffer(_STATX_BYTES)
    if _statx(_AT_FDCWD, os.fsencode(path), _AT_STATX_DONT_SYNC, _STATX_TYPE, answer) != 0:
        return None
    mode = int(struct.unpack_from("=H", answer, 28)[0])
    if not (stat.S_ISBLK(mode) or stat.S_ISCHR(mode)):
        return None
    major, minor = struct.unpack_from("=II", answer, 128)
    return (stat.S_ISBLK(mode), major, minor)


_statx = getattr(ctypes.CDLL(None, use_errno=True), "statx", None)
