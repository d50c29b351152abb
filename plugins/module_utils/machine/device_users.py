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

_MAPPED = re.compile(r"^([0-9a-f]+-[0-9a-f]+) \S+ \S+ (\S+) (\d+) +/", re.MULTILINE)
"""Addresses, device of the file system and inode of a mapped file (proc(5))."""

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

    A device that a process has open is asked again for ``patience`` seconds: udev closes it, a user does not.
    """
    numbers = _numbers(names)
    if not numbers:
        return {}
    users = dict(_reversed(_loops(numbers), _targets(numbers)))
    found = {opened for opened in _processes(numbers) if opened.name not in users}
    deadline = time.monotonic() + patience
    while found and time.monotonic() < deadline:
        _sleep(_EVERY)
        found &= set(_processes(numbers))
    for opened in sorted(found, key=lambda opened: (opened.pid, opened.how)):
        users.setdefault(opened.name, str(opened))
    return users


def _reversed(*found: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The first user of a name last, so that a dictionary keeps it."""
    return [pair for pairs in found for pair in pairs][::-1]


def _numbers(names: Sequence[str]) -> dict[_Number, str]:
    """The devices' numbers, also those of NVMe's character devices, by which a program sends commands past the block
    layer."""
    numbers = {}
    for name in names:
        generic = "/sys/class/nvme-generic/%s/dev" % re.sub("^nvme", "ng", name)
        for path, block in (("/sys/class/block/%s/dev" % name, True), (generic, False)):
            major, _, minor = (read_text(path) or "").partition(":")
            if major.isdigit() and minor.isdigit():
                numbers[(block, int(major), int(minor))] = name
    return numbers


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
        for name, how in _exported(exact_text(path).strip(), enabled, numbers):
            yield name, "NVMe target `%s` %s" % (path.split(os.sep)[6], how)
    for path in sorted(glob.glob("/sys/kernel/config/nvmet/subsystems/*/passthru/device_path")):
        controller = os.path.basename(exact_text(path).strip())
        for name in set(numbers.values()):
            if controller and os.path.basename(os.path.realpath("/sys/class/block/%s/device" % name)) == controller:
                yield name, "NVMe target `%s` passes its controller through" % path.split(os.sep)[6]
    for path in sorted(glob.glob("/sys/kernel/config/target/core/*/*/info")):
        text = exact_text(path)
        for backing in re.findall(r"(?:File|UDEV PATH): (/\S+)", text):
            for name, how in _exported(backing, "Status: ACTIVATED" in text, numbers):
                yield name, "SCSI target `%s` %s" % (path.split(os.sep)[6], how)


def _exported(path: str, active: bool, numbers: Mapping[_Number, str]) -> Iterator[tuple[str, str]]:
    """The devices that a target may export which was given ``path``: every one, if that is gone and nobody can tell."""
    number = _number_of(path)
    if number and number in numbers:
        yield numbers[number], "exports it"
    elif active and path and not os.path.exists(path):
        for name in sorted(set(numbers.values())):
            yield name, "exports `%s`, which is gone and may have been this drive" % path


def _number_of(path: str) -> _Number | None:
    with contextlib.suppress(OSError, ValueError):
        status = os.stat(path)
        if stat.S_ISBLK(status.st_mode):
            return (True, os.major(status.st_rdev), os.minor(status.st_rdev))
    return None


def _processes(numbers: Mapping[_Number, str]) -> Iterator[_Open]:
    """Open files and mappings of the devices in every process that may be read, but ours."""
    # By file system and inode: most files are mapped by many processes.
    known: dict[tuple[str, str], _Number | None] = {}
    for pid in sorted(pid for pid in map(whole_number, entries_of("/proc")) if pid is not None):
        if pid == os.getpid():
            continue
        base = "/proc/%d" % pid
        rings = False
        # A thread may have files of its own, and goes on with them when the first thread has ended.
        for thread in entries_of(base + "/task"):
            for handle in entries_of("%s/task/%s/fd" % (base, thread)):
                path = "%s/task/%s/fd/%s" % (base, thread, handle)
                ring = "[io_uring]" in link_target(path)
                rings = rings or ring
                for number in _registered(path, numbers) if ring else [_open_number(path)]:
                    if number and number in numbers:
                        yield _Open(numbers[number], pid, "fd " + handle, _command(base))
        maps = exact_text(base + "/maps")
        for place, device, inode in _MAPPED.findall(maps):
            if (device, inode) not in known:
                plain = "-".join(address.lstrip("0") for address in place.split("-"))
                known[(device, inode)] = _open_number("%s/map_files/%s" % (base, plain))
            number = known[(device, inode)]
            if number and number in numbers:
                yield _Open(numbers[number], pid, "map", _command(base))
        if "[io_uring]" in maps and not rings:
            # Its files are known to the kernel alone.
            for name in set(numbers.values()):
                yield _Open(name, pid, "ring", _command(base), "has a ring of io_uring that does not show its files")


def _command(base: str) -> str:
    return read_text(base + "/comm") or "?"


def _registered(path: str, numbers: Mapping[_Number, str]) -> list[_Number | None]:
    """The devices that a ring of io_uring keeps registered: old kernels print the last part of a name alone."""
    found: list[_Number | None] = []
    for name in re.findall(r"^\s*\d+: (\S+)$", exact_text(path.replace("/fd/", "/fdinfo/")), re.MULTILINE):
        same = [number for number, device in numbers.items() if device == name]
        found += same if "/" not in name else [_number_of(name)]
    return found


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
