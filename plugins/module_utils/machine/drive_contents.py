"""Contents of block devices: file systems, partition tables, RAID, LVM, ZFS and LUKS labels."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from dataclasses import dataclass
from typing import Sequence

from ..common import documents
from ..common.commands import CommandError, run
from ..common.files import read_int, read_text
from ..common.refusal import Expected
from ..units import format_size_binary
from . import unlabelled
from .device_users import PATIENCE, users_of
from .drives import Drive, holders_of, partitions_of

WINDOW = 1024 * 1024
"""Bytes read at each end of a device: every label known to libblkid but a few lies there."""

RAID_MEMBER = "linux_raid_member"


@dataclass(frozen=True)
class Signature:
    """One thing that libblkid recognises on a device."""

    device: str
    """Kernel name of the disk or partition."""
    type: str
    label: str | None
    uuid: str | None
    offset: str | None = None
    """Offset on the device, as wipefs prints it."""

    def __str__(self) -> str:
        parts = [self.type]
        if self.label:
            parts.append("label `%s`" % self.label)
        if self.uuid:
            parts.append("UUID %s" % self.uuid)
        return " ".join(parts)


def plain_uuid(uuid: str | None) -> str:
    """The hexadecimal digits of a UUID: wipefs, mdadm and sysfs group them differently."""
    return "".join(letter for letter in (uuid or "").lower() if letter in "0123456789abcdef")


Contents = dict[str, list[Signature]]
"""Signatures by a drive's kernel name, those on its partitions included."""


class UnreadableDevice(Expected):
    """The contents of a device could not be read, so nothing is known about them."""


def read_signatures(names: Sequence[str]) -> list[Signature]:
    """Signatures on the devices ``/dev/NAME``. Reads only; one process for all of them.

    Raises ``UnreadableDevice`` when any of them cannot be read: an unread drive is never a blank drive.
    """
    if not names:
        return []
    refuse_suspended(names)
    try:
        # Without --all wipefs only lists; --no-act makes a mistake of ours harmless.
        result = run(["wipefs", "--no-act", "--json"] + ["/dev/" + name for name in names], timeout=120)
    except CommandError as error:
        raise UnreadableDevice(str(error)) from error
    return parse_signatures(result.stdout, names)


def refuse_suspended(names: Sequence[str], root: str = "/") -> None:
    """No signal ends a process that reads a suspended array. Raises ``UnreadableDevice``."""
    for name in names:
        device = os.path.join(root, "sys/class/block", name)
        # A partition lies in the directory of its device.
        for base in (device, os.path.join(device, "..")):
            if read_text(os.path.join(base, "md/array_state")) == "suspended":
                raise UnreadableDevice("`%s` is suspended: all I/O waits until somebody resumes it" % name)


def parse_signatures(text: str, names: Sequence[str] | None = None) -> list[Signature]:
    """The JSON of ``wipefs --json``; nothing at all means no signature. ``names``: the devices it was asked about.

    Raises ``UnreadableDevice`` for anything else.
    """
    if not text.strip():
        return []
    try:
        rows = documents.parse(text, odd_names=True, repeated=True)["signatures"]
        signatures = [
            Signature(
                device=os.path.basename(row["device"]),
                type=row["type"],
                label=row.get("label") or None,
                uuid=row.get("uuid") or None,
                offset=row.get("offset") or None,
            )
            for row in rows
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableDevice("`wipefs --json` printed something other than its JSON: %r" % error) from error
    for each in signatures:
        if not each.type or not all(isinstance(value, (str, type(None))) for value in vars(each).values()):
            raise UnreadableDevice("`wipefs --json` printed something other than its JSON: %r" % (each,))
        if names is not None and each.device not in names:
            raise UnreadableDevice("`wipefs --json` printed what is on `%s`, which was not asked" % each.device)
    return signatures


def read_unlabelled(name: str, deep: bool) -> list[Signature]:
    """Contents of ``/dev/NAME``, on which libblkid sees nothing, as a signature. Raises ``UnreadableDevice``.

    ``deep``: data of no known kind too.
    """
    try:
        piece = unlabelled.look("/dev/" + name, deep)
    except OSError as error:
        raise UnreadableDevice("`/dev/%s` cannot be read: %s" % (name, error.strerror)) from error
    if piece is None:
        return []
    kind = "%s at %s" % (piece.kind, format_size_binary(piece.offset))
    return [Signature(name, kind, None, piece.uuid, hex(piece.offset))]


def read_contents(drives: Sequence[Drive], deep: bool = False) -> tuple[Contents, dict[str, str]]:
    """Signatures by drive (its partitions' included), and the drives that could not be read.

    Drives without a signature are read for contents that no label names; ``deep`` as for ``read_unlabelled``.
    """
    contents: Contents = {}
    unreadable: dict[str, str] = {}
    owner = {name: drive.name for drive in drives for name in (drive.name, *drive.partitions)}
    try:
        everything = read_signatures(list(owner))
    except UnreadableDevice:
        # One bad drive must not hide the others: ask again, one by one.
        everything = []
        for drive in drives:
            try:
                everything += read_signatures([drive.name, *drive.partitions])
            except UnreadableDevice as error:
                unreadable[drive.name] = "cannot be read: %s" % error
    for signature in everything:
        contents.setdefault(owner[signature.device], []).append(signature)
    asked = [drive for drive in drives if not drive.claims and drive.name not in unreadable]
    unreadable.update(use_problems(asked))
    for drive in asked:
        if not (drive.name in unreadable or drive.uses or drive.partitions or contents.get(drive.name)):
            try:
                contents[drive.name] = read_unlabelled(drive.name, deep)
            except UnreadableDevice as error:
                unreadable[drive.name] = "cannot be read: %s" % error
    return contents, unreadable


def use_problems(drives: Sequence[Drive], patience: float = PATIENCE) -> dict[str, str]:
    """By kernel name of the drive, why it must not be touched although no mount, swap or holder uses it.

    It is read-only, or the kernel refuses to open it exclusively, or a process, a loop device or a storage target uses
    it or something on it: what uses a device need not claim it. ``patience`` as for ``users_of``.
    """
    problems = write_problems(drives)
    for drive in drives:
        # An idle array claims what is under it: ask the array instead, and the partitions beside it.
        free = [name for name in drive.partitions if not holders_of("/", name)]
        for path in ["/dev/" + name for name in (*drive.idle_arrays, *free)] if drive.idle_arrays else [drive.path]:
            problem = claim_problem(path)
            if problem:
                problems.setdefault(drive.name, problem)
    below = {drive.name: devices_of(drive) for drive in drives if drive.name not in problems}
    users = users_of([name for names in below.values() for name in names], patience)
    for owner, names in below.items():
        for name in names:
            if name in users:
                where = "" if name == owner else " (on %s)" % name
                problems.setdefault(owner, "in use: %s%s" % (users[name], where))
    return problems


def write_problems(drives: Sequence[Drive], root: str = "/") -> dict[str, str]:
    """By kernel name, why the kernel refuses every write to a drive: its namespace is protected, or at its end of life.

    It opens and reads as others do, and a build fails only when the others are written.
    """
    return {
        drive.name: "read-only: the kernel refuses every write to `%s`" % drive.path
        for drive in drives
        if read_int(os.path.join(root, "sys/block", drive.name, "ro")) == 1
    }


def claim_problem(path: str) -> str | None:
    """Why the kernel refuses to open the device exclusively, or None if it does not.

    This catches what leaves no trace in mounts or holders (a mounted btrfs member, an imported ZFS pool).
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_EXCL)
    except OSError as error:
        if error.errno == errno.EBUSY:
            return "in use: the kernel refuses to open `%s` exclusively" % path
        return "`%s` cannot be opened: %s" % (path, error.strerror)
    os.close(handle)
    return None


def contents_hash(drive: Drive, root: str = "/") -> str:
    """A quick hash of a drive's contents; equal while nobody writes to the labels.

    It covers identity (serial, size, block size), every signature, the partitions with their places, and the first
    and last MiB of the drive, of each partition and of each idle array over them. A file deep inside a file system
    may change without it: hashing terabytes is no step of a plan. Raises ``UnreadableDevice``.
    """
    devices = devices_of(drive, root)
    signatures = read_signatures(list(devices))
    parts: list[object] = [drive.serial, drive.size_bytes, drive.lba_bytes]
    parts.append(
        sorted(
            [
                devices[signature.device],
                str(signature.offset),
                signature.type,
                signature.label or "",
                signature.uuid or "",
            ]
            for signature in signatures
        )
    )
    for name, kind in devices.items():
        base = os.path.join(root, "sys/class/block", name)
        parts.append([kind, read_int(os.path.join(base, "start")), read_int(os.path.join(base, "size"))])
        parts.append(ends_digest(os.path.join(root, "dev", name)))
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def devices_of(drive: Drive, root: str = "/") -> dict[str, str]:
    """Kernel names of all that holds a drive's contents, each with a name that outlives a reboot."""
    kinds = {drive.name: "drive"}
    kinds.update((name, name[len(drive.name) :]) for name in drive.partitions)
    for number, array in enumerate(drive.idle_arrays):
        # An inactive array has no size, and nothing in it can be read.
        for name in [array, *partitions_of(root, array)]:
            if read_int(os.path.join(root, "sys/class/block", name, "size")):
                kinds[name] = "array%d%s" % (number, name[len(array) :])
    return kinds


def ends_digest(path: str) -> str:
    """sha256 of the first and last MiB. Raises ``UnreadableDevice``."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb", buffering=0) as stream:
            # md writes to its members past their page cache, which may hold older data of an earlier reader.
            with contextlib.suppress(OSError):
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            end = stream.seek(0, os.SEEK_END)
            for start in (0, max(0, end - WINDOW)):
                stream.seek(start)
                left = min(WINDOW, end)
                while left:
                    data = stream.read(left)
                    if not data:
                        raise UnreadableDevice("`%s` ends early" % path)
                    digest.update(data)
                    left -= len(data)
    except OSError as error:
        raise UnreadableDevice("`%s` cannot be read: %s" % (path, error.strerror)) from error
    return digest.hexdigest()
