"""Computes where a byte of an md RAID0 is on its members, from a few files of sysfs."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..common.files import read_int, read_text
from ..common.raid_levels import LEVELS

_SECTOR = 512
LOCATED = " or ".join(level.name for level in LEVELS.values() if level.located)
"""The levels whose bytes can be located."""


class NoStripe(Exception):
    """The device is not a RAID0 whose bytes can be located on its members."""


@dataclass(frozen=True)
class Range:
    """A byte range of one member."""

    member: int
    """Slot of the member."""
    offset: int
    length: int


@dataclass(frozen=True)
class Stripe:
    """A RAID0 of one zone: chunks go round the members, in the order of their slots."""

    chunk_bytes: int
    members: tuple[str, ...]
    """Kernel names, by slot."""
    data_offsets: tuple[int, ...]
    """Offset of the array's data on each member, in bytes."""

    def locate(self, address: int) -> tuple[int, int]:
        """Slot and member offset of a byte of the array."""
        number, inside = divmod(address, self.chunk_bytes)
        row, slot = divmod(number, len(self.members))
        return slot, self.data_offsets[slot] + row * self.chunk_bytes + inside

    def ranges(self, start: int, length: int) -> list[Range]:
        """The byte range of each member for a contiguous range of the array; contiguous too."""
        ranges = []
        for slot, offset in enumerate(self.data_offsets):
            first, last = self._before(slot, start), self._before(slot, start + length)
            if last > first:
                ranges.append(Range(slot, offset + first, last - first))
        return ranges

    def _before(self, slot: int, address: int) -> int:
        """Number of bytes on a member that belong to the array's first ``address`` bytes."""
        rows, rest = divmod(address, self.chunk_bytes * len(self.members))
        return rows * self.chunk_bytes + min(max(rest - slot * self.chunk_bytes, 0), self.chunk_bytes)


def read_stripe(device: str, root: str = "/") -> Stripe:
    """The stripe of an md device such as ``md127``. Raises ``NoStripe``."""
    base = os.path.join(root, "sys/block", device, "md")
    level = read_text(os.path.join(base, "level"))
    if level is None:
        raise NoStripe("`%s` is no md array" % device)
    if level not in LEVELS or not LEVELS[level].located:
        raise NoStripe("`%s` is %s, not %s" % (device, level, LOCATED))
    chunk = read_int(os.path.join(base, "chunk_size")) or 0
    count = read_int(os.path.join(base, "raid_disks")) or 0
    names, offsets, rows = [], [], set()
    for slot in range(count):
        slot_directory = os.path.join(base, "rd%d" % slot)
        sectors, kibibytes = (
            read_int(os.path.join(slot_directory, "offset")),
            read_int(os.path.join(slot_directory, "size")),
        )
        block = os.path.join(slot_directory, "block")
        if sectors is None or kibibytes is None or not os.path.exists(block):
            raise NoStripe("member %d of `%s` is gone" % (slot, device))
        names.append(os.path.basename(os.path.realpath(block)))
        offsets.append(sectors * _SECTOR)
        rows.add(kibibytes * 1024 // chunk if chunk else 0)
    if not names or not chunk:
        raise NoStripe("`%s` does not say its chunk and members" % device)
    if len(rows) > 1:
        # Beyond the end of the smallest member, stripes are narrower.
        raise NoStripe("the members of `%s` are of unequal size" % device)
    return Stripe(chunk, tuple(names), tuple(offsets))
