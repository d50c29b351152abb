"""Makes drives blank that a plan names; checks all conditions for all of them before it writes to any."""

from __future__ import annotations

import contextlib
import os
from typing import Any, Callable, Iterator, Mapping, Sequence

from ..array.drive_decisions import by_serial
from ..array.md_arrays import Superblock, examine, read_arrays
from ..common.commands import run
from ..common.file_lock import FileLock
from ..common.files import read_int
from ..common.refusal import Refusal
from ..machine.drive_contents import (
    RAID_MEMBER,
    WINDOW,
    UnreadableDevice,
    contents_hash,
    read_signatures,
    read_unlabelled,
    use_problems,
)
from ..machine.drives import Drive, disks_under, partitions_of, read_drives
from ..machine.held_drives import refuse, untouched
from ..machine.unlabelled import clear_between, clear_ends

WIPES: dict[str, Any] = {
    "type": "list",
    "elements": "dict",
    "default": [],
    "options": {"serial": {"type": "str", "required": True}, "hash": {"type": "str", "required": True}},
}
"""A module's argument: the drives that an applied plan allows to wipe, from the filter plan_wipes."""


def refuse_unless_wipeable(drives: list[Drive], hashes: Mapping[str, str]) -> None:
    """Check the plan's conditions for all drives before the first byte is written to any. Raises ``Refusal``."""
    names = {drive.name for drive in drives}
    hint = "nothing was changed; make a new plan"
    idle = [drive for drive in drives if not drive.claims]
    with untouched(idle, hint):
        used = use_problems(idle)
        for drive in drives:
            problem = "; ".join(drive.claims)
            for array in drive.idle_arrays:
                problem = _beside_others(array, names) or problem
            problem = problem or used.get(drive.name, "")
            if not problem and contents_hash(drive) != hashes[drive.serial]:
                problem = "does not hold what the plan saw"
            refuse(drive, problem, hint)


def _beside_others(array: str, names: set[str]) -> str | None:
    """Why an array must not be stopped."""
    strangers = sorted(disks_under("/", array) - names)
    if not strangers:
        return None
    serials = {other.name: other.serial for other in read_drives()}
    return "is in array `%s` with drives that may not be wiped: %s" % (array, by_serial(strangers, serials))


def wipe(drives: list[Drive], erase: Callable[[], None] = lambda: None) -> None:
    """Make drives blank, from the topmost layer on them to the lowest. They are ``held``, and were just looked at.

    ``erase`` is called once no array is over them, while they have their labels.
    """
    names = {drive.name for drive in drives}
    arrays = sorted({array for drive in drives for array in drive.idle_arrays})
    serving = {array.device for array in read_arrays() if array.serves}
    for array in arrays:
        inside = [name for name in [*partitions_of("/", array), array] if has_capacity(name)]
        if inside and array in serving:
            # An array that somebody has open cannot be stopped: until then its name stays its own.
            with kept_open(array):
                _refuse_others(array, names)
                # Otherwise a new array at the same place would show the old file system again.
                run(["wipefs", "--all", "--quiet"] + ["/dev/" + name for name in inside])
    for array in arrays:
        _refuse_others(array, names)
        run(["mdadm", "--stop", "/dev/" + array])
    clear_labels(drives, erase)
    run(["udevadm", "settle", "--timeout=60"], accept=(0, 1))
    for drive in drives:
        run(["blockdev", "--rereadpt", drive.path])
    run(["udevadm", "settle", "--timeout=60"], accept=(0, 1))


def _refuse_others(array: str, names: set[str]) -> None:
    """Raises ``Refusal`` if the array has other drives than it had."""
    problem = _beside_others(array, names)
    if problem:
        raise Refusal("a drive %s. hint: make a new plan" % problem)


@contextlib.contextmanager
def kept_open(name: str) -> Iterator[None]:
    """A device stays the one of this name."""
    handle = os.open("/dev/" + name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield
    finally:
        os.close(handle)


def clear_labels(drives: Sequence[Drive], erase: Callable[[], None] = lambda: None) -> None:
    """Remove every label from drives over which no array runs, and what else would keep them from being blank."""
    names = [name for drive in drives for name in (*drive.partitions, drive.name)]
    # All members first: any event of a drive that is still a member makes udev assemble the array again.
    with unwatched(names):
        erase()
        members = [signature.device for signature in read_signatures(names) if signature.type == RAID_MEMBER]
        for drive in drives:
            written(clear_between, drive.path)
        for superblock in examine(members).values():
            clear_beginning(superblock)
        for name in members:
            run(["mdadm", "--zero-superblock", "/dev/" + name])
    for drive in drives:
        if drive.partitions:
            run(["wipefs", "--all", "--quiet"] + ["/dev/" + name for name in drive.partitions])
        run(["wipefs", "--all", "--quiet", drive.path])
        # wipefs removes the few bytes of each label; the rest of a partition table is data that nobody can name.
        written(clear_ends, drive.path)


@contextlib.contextmanager
def unwatched(names: Sequence[str]) -> Iterator[None]:
    """Keep udev from these devices by a lock (systemd.io/BLOCK_DEVICE_LOCKING)."""
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(FileLock.on("/dev/" + name)).take()
        yield


def clear_beginning(member: Superblock) -> None:
    """Overwrite this member's part of the array's first MiB, which has the labels of the array's contents.

    This cannot be done through an array that does not run, and a new array over these drives would show them again.
    """
    if member.data_offset_bytes is None:
        return
    handle = os.open("/dev/" + member.device, os.O_WRONLY)
    try:
        os.pwrite(handle, bytes(WINDOW), member.data_offset_bytes)
        os.fsync(handle)
    finally:
        os.close(handle)


def written(clear: Callable[[str], None], path: str) -> None:
    """Clear what no label names, by which the drive would not count as blank. Raises ``UnreadableDevice``."""
    try:
        clear(path)
    except OSError as error:
        raise UnreadableDevice("`%s` cannot be written: %s" % (path, error.strerror)) from error


def has_capacity(name: str) -> bool:
    """False for an inactive array."""
    return bool(read_int("/sys/class/block/%s/size" % name))


def contents_text(drives: list[Drive]) -> str:
    """The contents of the drives, a line each, for the diff."""
    lines = []
    for drive in drives:
        signatures = read_signatures([drive.name, *drive.partitions])
        if not (signatures or drive.partitions):
            signatures = read_unlabelled(drive.name, deep=True)
        lines.append("%s: %s\n" % (drive.serial, ", ".join(map(str, signatures)) or "partitions"))
    return "".join(lines)
