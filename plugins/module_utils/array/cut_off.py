"""An array of ours whose creation was cut off: some drives carry its superblock, the rest are blank.

It can never be whole, and nothing was ever stored in it. It looks like one whose other members came too late, whose
data may be whole: what tells them apart is read here, and a doubt counts against giving anything up.
"""

from __future__ import annotations

import os
from typing import Mapping, Sequence

from ..common.raid_levels import DEFAULT, needs_every_member
from ..machine.unlabelled import PROBE, probes, written
from .adopt_or_wipe import plain_uuid
from .md_arrays import Array, Superblock

_WINDOW = 2**20
"""Bytes read where the data of the first member begins. A file system in the array would begin there."""


def cut_off(
    name: str,
    count: int,
    superblocks: Mapping[str, Superblock],
    arrays: Sequence[Array],
    known: str,
    level: str = DEFAULT,
    root: str = "/",
) -> dict[str, str]:
    """Arrays called ``name`` over ``count`` drives whose creation was cut off: what to say of each, by plain UUID.

    ``superblocks`` are those of all drives, by kernel name; ``known`` is the text of the manifest: what it names was
    built. An array whose first member is absent, or with anything in its data, is never among them.
    """
    found = {}
    for uuid in sorted({block.uuid for block in superblocks.values()}):
        blocks = [block for block in superblocks.values() if block.uuid == uuid]
        first = blocks[0]
        roles = [block.role for block in blocks]
        if (
            plain_uuid(uuid) not in plain_uuid(known)
            and {(block.name, block.level, block.raid_disks) for block in blocks} == {(name, level, count)}
            and needs_every_member(level)
            and len(blocks) < first.raid_disks
            and 0 in roles
            and None not in roles
            and len(set(roles)) == len(roles)
            and not any(array.uuid == uuid and array.state not in ("inactive", "clear") for array in arrays)
            and all(_empty(block, root) for block in blocks)
        ):
            found[plain_uuid(uuid)] = "making its array was cut off: %d of %d members were written, and no data" % (
                len(blocks),
                first.raid_disks,
            )
    return found


def _empty(member: Superblock, root: str) -> bool:
    """Whether nothing is found in this member's part of the array's data."""
    begin = member.data_offset_bytes
    if begin is None:
        return False
    try:
        handle = os.open(os.path.join(root, "dev", member.device), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        # md writes to its members past their page cache, which may hold older data of an earlier reader.
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        places = [at for at in probes(os.lseek(handle, 0, os.SEEK_END)) if at >= begin + _WINDOW]
        blocks = [os.pread(handle, _WINDOW, begin), *(os.pread(handle, PROBE, at) for at in places)]
    except OSError:
        return False
    finally:
        os.close(handle)
    return all(blocks) and not any(map(written, blocks))
