"""The LBA formats that a drive offers, and the `nvme format` line for the wanted one.

Layout: NVM Express NVM Command Set Specification, Identify Namespace data structure (CNS 00h).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import Sequence

from .drives import Drive
from .nvme_admin import IDENTIFY, IDENTIFY_BYTES, NotOffered, Refused, Silent, ask, namespace_id, opened

_TABLE, _ENTRIES = 128, 64
_NAMESPACE = 0x00
_SMALLEST, _LARGEST = 9, 16
"""Powers of two that a block can have: 512 bytes, as the specification demands, to what no drive exceeds."""


@dataclass(frozen=True)
class LbaFormat:
    """One row of the drive's table."""

    index: int
    data_bytes: int
    metadata_bytes: int
    performance: int = 0
    """Relative performance: 0 best, 3 degraded."""


@dataclass(frozen=True)
class Formats:
    """The formats of a namespace, the present one, and its number of blocks."""

    offered: tuple[LbaFormat, ...]
    current: LbaFormat
    blocks: int

    @property
    def size_bytes(self) -> int:
        """Its capacity in bytes without metadata, even if the kernel shows none because it cannot use the format."""
        return self.blocks * self.current.data_bytes


def parse_formats(identity: bytes) -> Formats:
    """Read the formats from the Identify Namespace data structure. Raises ``ValueError``."""
    if len(identity) != IDENTIFY_BYTES:
        raise ValueError("an identity has %d bytes, not %d" % (IDENTIFY_BYTES, len(identity)))
    # Formats of both lists, the plain one and the one that needs a host to enable it.
    count = min(identity[25] + 1 + identity[43], _ENTRIES)
    offered = []
    for index in range(count):
        metadata, shift, performance = struct.unpack_from("<HBB", identity, _TABLE + 4 * index)
        if _SMALLEST <= shift <= _LARGEST:
            offered.append(LbaFormat(index, 1 << shift, metadata, performance & 3))
    # Bits 6:5 are the upper part of the index where there are more than 16 formats.
    chosen = identity[26] & 0xF | (identity[26] >> 1 & 0x30 if count > 16 else 0)
    current = next((form for form in offered if form.index == chosen), None)
    if current is None:
        raise ValueError("the format in use, %d, is none that it offers" % chosen)
    return Formats(tuple(offered), current, struct.unpack_from("<Q", identity, 0)[0])


def read_formats(name: str) -> Formats:
    """Ask the namespace ``/dev/NAME``. Raises ``Refused``, ``NotOffered``, ``Silent`` or ``ValueError``."""
    with opened("/dev/" + name) as handle:
        return parse_formats(ask(handle, IDENTIFY, namespace_id(handle), IDENTIFY_BYTES, _NAMESPACE))


def try_formats(name: str) -> Formats | None:
    """The same, or None without an answer; the owner must then look up the format."""
    try:
        return read_formats(name)
    except (Refused, NotOffered, Silent, ValueError):
        return None


def with_capacity(drive: Drive, formats: Formats | None) -> Drive:
    """The drive with the capacity of its identity, if sysfs shows none because the kernel cannot use its metadata."""
    if drive.size_bytes or formats is None:
        return drive
    current = formats.current
    return replace(
        drive, size_bytes=formats.size_bytes, lba_bytes=current.data_bytes, metadata_bytes=current.metadata_bytes
    )


def best_format(offered: Sequence[LbaFormat], data_bytes: int) -> LbaFormat | None:
    """The fastest format with blocks of ``data_bytes`` and without metadata; the first of equals."""
    fitting = [form for form in offered if form.data_bytes == data_bytes and not form.metadata_bytes]
    return min(fitting, key=lambda form: (form.performance, form.index), default=None)


def mending(path: str, formats: Formats | None, data_bytes: int) -> str:
    """The hint how to give the drive at ``path`` blocks of ``data_bytes`` without metadata, with the command line.

    Without ``--force``: nvme-cli then shows what it would erase and waits.
    """
    if formats is None:
        return (
            "`nvme id-ns -H %s` lists its formats; `nvme format %s --lbaf=N`, N being the one of %d bytes without "
            "metadata, mends it and erases the drive" % (path, path, data_bytes)
        )
    best = best_format(formats.offered, data_bytes)
    if best is None:
        return "it offers no format of %d bytes without metadata: replace it" % data_bytes
    return "`nvme format %s --lbaf=%d` mends it and erases the drive" % (path, best.index)
