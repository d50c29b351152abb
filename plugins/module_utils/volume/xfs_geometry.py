"""XFS on RAID0: the required and the present stripe geometry. Pure arithmetic and parsing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Sequence

from ..common.commands import CommandError
from ..common.files import whole_number
from ..units import format_size_binary

LOG_STRIPE_UNIT_MAX = 256 * 1024
"""XFS caps the log stripe unit at 256 KiB: ``mkfs.xfs -l su=1m`` fails (xfsprogs 6.1)."""

LABEL_MAX = 12
"""Characters in an XFS label (xfs(5))."""


@dataclass(frozen=True)
class Geometry:
    """Stripe geometry in bytes; ``data_sw`` counts data members."""

    data_su_bytes: int
    data_sw: int
    log_su_bytes: int


def wanted_geometry(chunk_bytes: int, members: int) -> Geometry:
    """``su`` = chunk, ``sw`` = members (RAID0 has no parity), log ``su`` = min(chunk, 256 KiB)."""
    return Geometry(data_su_bytes=chunk_bytes, data_sw=members, log_su_bytes=min(chunk_bytes, LOG_STRIPE_UNIT_MAX))


def mkfs_arguments(geometry: Geometry, label: str) -> list[str]:
    """Arguments of ``mkfs.xfs`` before the device. Never ``-f``, so that mkfs itself refuses a device with contents."""
    return [
        "-d",
        "su=%d,sw=%d" % (geometry.data_su_bytes, geometry.data_sw),
        "-l",
        "su=%d" % geometry.log_su_bytes,
        "-L",
        label,
    ]


def parse_xfs_info(text: str) -> Geometry:
    """Geometry from ``xfs_info``, which counts in file system blocks. Raises ``CommandError`` on anything else."""
    block = re.search(r"^data\s+=.*?\bbsize=(\d+)", text, flags=re.MULTILINE)
    data = re.search(r"\bsunit=(\d+)\s+swidth=(\d+) blks", text)
    log = re.search(r"^log\s+=.*?\bbsize=(\d+).*?\bsunit=(\d+) blks", text, flags=re.MULTILINE | re.DOTALL)
    words = [*block.groups(), *data.groups(), *log.groups()] if block and data and log else []
    numbers = [number for number in map(whole_number, words) if number is not None]
    if not words or len(numbers) < len(words):
        raise CommandError("`xfs_info` printed no geometry")
    block_bytes, stripe_unit, stripe_width, log_block_bytes, log_unit = numbers
    return Geometry(
        data_su_bytes=stripe_unit * block_bytes,
        data_sw=stripe_width // stripe_unit if stripe_unit else 0,
        log_su_bytes=log_block_bytes * log_unit,
    )


def geometry_of_mount(options: Sequence[str]) -> tuple[int, int] | None:
    """(stripe unit, stripe width) in bytes from XFS's options in mountinfo, if it has any.

    The kernel prints both in 512-byte units (xfs(5), mount options ``sunit`` and ``swidth``).
    """
    values = dict(option.split("=", 1) for option in options if "=" in option)
    unit, width = (whole_number(values.get(name)) for name in ("sunit", "swidth"))
    return None if unit is None or width is None else (unit * 512, width * 512)


def apart(wanted: Geometry, present: Geometry) -> list[tuple[str, str, str]]:
    """Each difference: name, expected, found."""
    rows = (
        ("data_stripe_unit", wanted.data_su_bytes, present.data_su_bytes),
        ("log_stripe_unit", wanted.log_su_bytes, present.log_su_bytes),
    )
    wrong = [
        (name, format_size_binary(expected), format_size_binary(actual))
        for name, expected, actual in rows
        if expected != actual
    ]
    if wanted.data_sw != present.data_sw:
        wrong.append(("data_stripe_width", "%d members" % wanted.data_sw, "%d members" % present.data_sw))
    return wrong
