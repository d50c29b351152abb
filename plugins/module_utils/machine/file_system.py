"""The file systems that a volume is made with: how one is made, recognised, read and mounted.

Everything that depends on the type of the volume that is built asks here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Sequence

from ..common.commands import CommandError, run
from ..common.files import whole_number
from ..units import format_size_binary


@dataclass(frozen=True)
class Geometry:
    """Stripe geometry in bytes; ``data_sw`` counts data members."""

    data_su_bytes: int
    data_sw: int
    log_su_bytes: int

    def apart(self, present: Geometry) -> list[tuple[str, str, str]]:
        """Each difference of the present geometry from this one: name, expected, found."""
        rows = (
            ("data_stripe_unit", self.data_su_bytes, present.data_su_bytes),
            ("log_stripe_unit", self.log_su_bytes, present.log_su_bytes),
        )
        wrong = [
            (name, format_size_binary(expected), format_size_binary(actual))
            for name, expected, actual in rows
            if expected != actual
        ]
        if self.data_sw != present.data_sw:
            wrong.append(("data_stripe_width", "%d members" % self.data_sw, "%d members" % present.data_sw))
        return wrong


class Xfs:
    """XFS. One class for each type; a second one has the same attributes."""

    type = "xfs"
    program = "mkfs.xfs"
    block_bytes = 4096
    """As mkfs makes it without being asked."""
    label_max = 12
    """Characters in a label (xfs(5))."""
    remounted = ("inode32", "inode64")
    """Options of its own that it changes on a remount (kernel: fs/xfs/xfs_super.c)."""
    project_quota = "prjquota"
    """The mount option with which it keeps to limits of projects."""
    log_buffer_max = log_stripe_unit_max = 256 * 1024
    """XFS caps the log stripe unit at 256 KiB: ``mkfs.xfs -l su=1m`` fails (xfsprogs 6.1)."""
    look = "xfs_repair -n %s"
    """A command for people that looks for what was on a device, and writes nothing."""

    def __str__(self) -> str:
        return self.type.upper()

    def geometry(self, chunk_bytes: int, data_members: int) -> Geometry:
        """``su`` = chunk, ``sw`` = members with distinct data, log ``su`` = min(chunk, 256 KiB). Without a chunk there
        is no stripe, and the log is written in blocks."""
        if not chunk_bytes:
            return Geometry(0, 0, self.block_bytes)
        return Geometry(chunk_bytes, data_members, min(chunk_bytes, self.log_stripe_unit_max))

    def shape(self, geometry: Geometry, label: str) -> list[str]:
        """Arguments of mkfs before the device. Never ``-f``, so that mkfs itself refuses a device with contents."""
        stripe = "su=%d,sw=%d" % (geometry.data_su_bytes, geometry.data_sw) if geometry.data_sw else "noalign"
        return ["-d", stripe, "-l", "su=%d" % geometry.log_su_bytes, "-L", label]

    def described(self, geometry: Geometry) -> str:
        """The geometry as a line, for a diff."""
        words = (self.type, geometry.data_su_bytes, geometry.data_sw, geometry.log_su_bytes)
        return "%s su=%d sw=%d, log su=%d\n" % words

    def mkfs(self, path: str, geometry: Geometry, label: str, uuid: str | None = None) -> None:
        """Make it on a device that holds nothing; mkfs itself refuses any other. ``uuid``: a given UUID."""
        known = ["-m", "uuid=" + uuid] if uuid else []
        run([self.program, *self.shape(geometry, label), *known, path], timeout=1800)
        run(["udevadm", "settle", "--timeout=60"], accept=(0, 1))

    _MAGIC, _LABEL, _IN_PROGRESS = slice(0, 4), slice(108, 120), 126
    """Offsets in the superblock (xfs_format.h, struct xfs_dsb)."""

    def half_made(self, path: str, label: str) -> bool:
        """Whether a device holds one of this label that mkfs did not finish, as when the power failed.

        mkfs.xfs writes the superblock with a mark first and takes the mark away last. The kernel mounts no file system
        with that mark, so it never held a file. libblkid and xfs_info show it like any other.
        """
        with open(path, "rb") as device:
            block = device.read(512)
        return (
            len(block) == 512
            and block[self._MAGIC] == b"XFSB"
            and block[self._LABEL].rstrip(b"\0") == label.encode()
            and block[self._IN_PROGRESS] == 1
        )

    def read_geometry(self, place: str) -> Geometry:
        """Of a mounted one by its mount point, of an unmounted one by its device. Raises ``CommandError``."""
        return self.parse_geometry(run(["xfs_info", place]).stdout)

    def parse_geometry(self, text: str) -> Geometry:
        """From ``xfs_info``, which counts in file system blocks. Raises ``CommandError`` on anything else."""
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

    def mounted_stripe(self, options: Sequence[str]) -> tuple[int, int] | None:
        """(stripe unit, stripe width) in bytes from the options in mountinfo, if it has any.

        The kernel prints both in 512-byte units (xfs(5), mount options ``sunit`` and ``swidth``).
        """
        values = dict(option.split("=", 1) for option in options if "=" in option)
        unit, width = (whole_number(values.get(name)) for name in ("sunit", "swidth"))
        return None if unit is None or width is None else (unit * 512, width * 512)

    def option_problem(self, option: str, log_su_bytes: int) -> str | None:
        """Why it does not mount with this option of its own, with the hint; None if it does."""
        if option in ("barrier", "nobarrier"):
            return "XFS has no mount option `%s` since Linux 4.19. hint: remove it" % option
        if option.startswith("logbsize="):
            match = re.fullmatch(r"(\d{1,9})(k?)", option.partition("=")[2])
            size = int(match.group(1)) * (1024 if match.group(2) else 1) if match else 0
            if size < log_su_bytes or size % log_su_bytes or size > self.log_buffer_max:
                return "`%s` does not mount with a log stripe unit of %d. hint: use `logbsize=256k`" % (
                    option,
                    log_su_bytes,
                )
        return None

    def set_label(self, mount_point: str, label: str) -> None:
        """While it is mounted."""
        run(["xfs_io", "-c", "label -s " + label if label else "label -c", mount_point])


BUILT = Xfs()
"""The type that a volume is made with."""


def wipe_half_made(path: str) -> None:
    """Remove what ``half_made`` found. wipefs itself refuses a device in use."""
    run(["wipefs", "--all", "--quiet", path])
