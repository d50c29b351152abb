"""What lies on block devices: file systems, partition tables, RAID, LVM, ZFS and LUKS labels."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import dataclass
from typing import Sequence

from .commands import CommandError, run

RAID_MEMBER = "linux_raid_member"


@dataclass(frozen=True)
class Signature:
    """One thing that libblkid recognises on a device."""

    device: str
    """Kernel name of the disk or partition."""
    type: str
    label: str | None
    uuid: str | None

    def __str__(self) -> str:
        parts = [self.type]
        if self.label:
            parts.append("label `%s`" % self.label)
        if self.uuid:
            parts.append("UUID %s" % self.uuid)
        return " ".join(parts)


class UnreadableDevice(Exception):
    """A device whose contents could not be asked for; nothing may be concluded about it."""


def read_signatures(names: Sequence[str]) -> list[Signature]:
    """Signatures on the devices ``/dev/NAME``. Reads only; one process for all of them.

    Raises ``UnreadableDevice`` when any of them cannot be read: an unread drive is never a blank drive.
    """
    if not names:
        return []
    try:
        # --no-act twice over: without --all wipefs only lists, and this makes a slip of ours harmless.
        result = run(["wipefs", "--no-act", "--json"] + ["/dev/" + name for name in names], timeout=120)
    except CommandError as error:
        raise UnreadableDevice(str(error)) from error
    return parse_signatures(result.stdout)


def parse_signatures(text: str) -> list[Signature]:
    """The JSON of ``wipefs --json``; nothing at all means no signature."""
    if not text.strip():
        return []
    try:
        rows = json.loads(text)["signatures"]
        return [
            Signature(
                device=os.path.basename(row["device"]),
                type=row["type"],
                label=row.get("label") or None,
                uuid=row.get("uuid") or None,
            )
            for row in rows
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise UnreadableDevice("`wipefs --json` printed something else than its JSON: %r" % error) from error


def claim_problem(path: str) -> str | None:
    """Why the kernel will not hand the device out exclusively, or None when it will.

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
