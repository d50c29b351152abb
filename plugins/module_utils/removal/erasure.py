"""Erases drives that lose their labels next: how each can, the erasing itself, and whether its data is gone.

A drive keeps its label until its data is gone, so that the next run knows what an interrupted one had still to erase.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import random
import struct
from concurrent.futures import ThreadPoolExecutor  # noqa: TID251  (Ctrl-C does not reach a module)
from dataclasses import dataclass
from typing import Any, Collection, Sequence

from ..common.commands import CommandError
from ..common.files import read_int
from ..common.waiting import wait_for
from ..machine import nvme_erase
from ..machine.drives import Drive, read_drives
from ..machine.held_drives import UNCHANGED
from ..machine.nvme_admin import NotOffered, Refused, Silent
from ..machine.unlabelled import END, PROBE, clear_between, clear_ends, written

NONE, DISCARD, CRYPTO = "none", "discard", "crypto"
ERASE: dict[str, Any] = {"type": "str", "choices": [NONE, DISCARD, CRYPTO], "default": NONE}
"""A module's argument."""
SAMPLES = 256
_LABEL = 4096
"""Where the superblock of md's format 1.2 lies."""
_UNIT = 128 * END
"""At least what any drive calls its granularity."""
_BLKDISCARD = 0x1277
_SANITIZE_SECONDS = 900.0
_CANNOT = (Refused, NotOffered, Silent, ValueError)


@dataclass(frozen=True)
class Way:
    """How one drive is erased."""

    drive: Drive
    by: str
    """``DISCARD``, ``nvme_erase.FORMAT`` or ``nvme_erase.SANITIZE``."""
    reads_as: int | None = None
    """The byte that its discarded blocks read as, if it says that."""

    def __str__(self) -> str:
        if self.by != DISCARD:
            return "cryptographic erase by %s" % self.by
        if self.reads_as is None:
            return "discard; it does not say what discarded blocks read as"
        return "discard; discarded blocks read as bytes %#04x" % self.reads_as


def decide(drives: Sequence[Drive], wish: str, so_far: str = UNCHANGED) -> tuple[list[Way], list[str]]:
    """How each drive is erased, and why one cannot be; ``so_far``: what is true then. Only asks."""
    ways, problems = [], []
    for drive in drives if wish != NONE else ():
        try:
            ways.append(_way(drive, wish))
        except _CANNOT as error:
            other = "" if wish == DISCARD else "`teardown_erase: discard`, or "
            problems.append(
                "drive `%s` (%s) cannot be erased by `teardown_erase: %s`: %s. hint: %s; make a plan "
                "with %s`teardown_erase: none`, and erase that drive by its manufacturer's program"
                % (drive.serial, drive.name, wish, error, so_far, other)
            )
    return ways, problems


def _way(drive: Drive, wish: str) -> Way:
    if wish == CRYPTO:
        return Way(drive, nvme_erase.ask_crypto(drive.controller, drive.name))
    if not read_int("/sys/class/block/%s/queue/discard_max_bytes" % drive.name):
        raise NotOffered("it takes no discards")
    try:
        return Way(drive, DISCARD, nvme_erase.ask_reads_as(drive.name))
    except _CANNOT:
        return Way(drive, DISCARD)


def await_sanitizing(wish: str, serials: Collection[str]) -> None:
    """Let an erasure end that an earlier run began: until then the drive can be neither read nor written.

    ``serials``: of the drives that the applied plan names. Another drive is its owner's, and may take hours. Raises
    ``CommandError`` if it does not.
    """
    for drive in read_drives() if wish == CRYPTO and serials else ():
        if drive.serial not in serials:
            continue
        with contextlib.suppress(*_CANNOT):
            if nvme_erase.sanitize_status(drive.controller).runs:
                _await_sanitized(drive)


def _await_sanitized(drive: Drive) -> None:
    def ended() -> nvme_erase.SanitizeStatus | None:
        status = nvme_erase.sanitize_status(drive.controller)
        return None if status.runs else status

    status = wait_for(ended, _SANITIZE_SECONDS, 1.0)
    if status is None:
        raise _failed(drive, "still sanitizes itself after %d s" % _SANITIZE_SECONDS)
    if status.failed:
        raise _failed(
            drive,
            "says that its sanitize operation failed",
            "until one succeeds it refuses all reads and writes; check the serial twice, then `nvme sanitize "
            "--sanact=start-crypto-erase /dev/%s`" % drive.controller,
        )
    if not status.done:
        raise _failed(drive, "does not say that it has sanitized itself")


def erase(ways: Sequence[Way]) -> list[str]:
    """Erase all of them at once. They are ``held``, and were just looked at. Returns what could not be shown.

    Raises ``CommandError`` if one is not erased; the others are then.
    """
    with ThreadPoolExecutor(max(1, len(ways))) as pool:
        # `map` would cancel what has not begun when one fails.
        begun = [pool.submit(_erase, way) for way in ways]
    doubts: list[str | None] = []
    failures = []
    for each in begun:
        try:
            doubts.append(each.result())
        except CommandError as error:
            failures.append(str(error))
    shown = [doubt for doubt in doubts if doubt]
    if failures:
        # What has no label any more is not looked at again.
        raise CommandError("; ".join([*shown, *failures]))
    return shown


def _erase(way: Way) -> str | None:
    drive = way.drive
    try:
        # O_DIRECT: the page cache does not know what the drive itself has changed.
        handle = os.open(drive.path, os.O_RDWR | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC)
        try:
            size = os.lseek(handle, 0, os.SEEK_END)
            doubt = _discard(way, handle, size) if way.by == DISCARD else _crypto(way, handle, size)
        finally:
            os.close(handle)
        if way.by != DISCARD:
            # What the old data reads as with another key is no data, and would not count as blank. Not later: another
            # drive may fail, and the next run does not see this one, which has no label.
            clear_between(drive.path)
            clear_ends(drive.path)
        return doubt
    except OSError as error:
        raise _failed(drive, error.strerror or str(error)) from error
    except _CANNOT as error:
        raise _failed(drive, str(error)) from error


def _discard(way: Way, handle: int, size: int) -> str | None:
    # The label last. The drive may discard in large units.
    ends = [(size - END, END), (0, min(size, _UNIT))]
    discard(handle, END, size - 2 * END)
    data = [at for at in places(size) if not _blank(_read(handle, at), way.reads_as)]
    if data and way.reads_as is not None:
        raise _failed(way.drive, "still holds data at byte %d after a discard" % data[0])
    for start, length in ends:
        discard(handle, start, length)
    # Of all blocks that one had data for certain: the others show little of a drive that has little on it.
    if way.reads_as is not None and not _blank(_read(handle, _LABEL), way.reads_as):
        raise _failed(way.drive, "still holds data at byte %d after a discard" % _LABEL)
    if way.reads_as is None:
        return "drive `%s` does not say what discarded blocks read as: %d of %d sampled blocks hold data" % (
            way.drive.serial,
            len(data),
            SAMPLES,
        )
    return None


def _crypto(way: Way, handle: int, size: int) -> str | None:
    drive = way.drive
    # A member of an array has data at its label at least.
    blocks = {at: _read(handle, at) for at in (_LABEL, *places(size))}
    before = {at: block for at, block in blocks.items() if written(block)}
    if way.by == nvme_erase.FORMAT:
        nvme_erase.format_crypto(drive.name)
    else:
        nvme_erase.sanitize_crypto(drive.controller, drive.serial)
        _await_sanitized(drive)
    same = [at for at, block in before.items() if _read(handle, at) == block]
    if same:
        raise _failed(drive, "says that it is erased, and byte %d reads as before" % same[0])
    with contextlib.suppress(OSError):
        discard(handle, 0, size)
    return None if before else "drive `%s` says that it is erased; no sampled block held data before" % drive.serial


def places(size: int) -> list[int]:
    """Where a drive is read to see whether its data is gone: any blocks between the first and the last MiB."""
    chosen = random.sample(range(END // PROBE, (size - END) // PROBE), SAMPLES)
    return sorted(block * PROBE for block in chosen)


def _blank(block: bytes, reads_as: int | None) -> bool:
    return not written(block) if reads_as is None else block.count(reads_as) == len(block)


def _read(handle: int, offset: int) -> bytes:
    # O_DIRECT wants a buffer that begins with a page.
    with mmap.mmap(-1, PROBE) as buffer:
        if os.preadv(handle, [buffer], offset) != PROBE:
            raise OSError("byte %d cannot be read" % offset)
        return buffer[:]


def discard(handle: int, start: int, length: int) -> None:
    """Tell the drive that nobody needs these bytes. Raises ``OSError``."""
    fcntl.ioctl(handle, _BLKDISCARD, struct.pack("=QQ", start, length))


_GOES_ON = "run the playbook again with the same plan, which goes on, or erase the drive by its manufacturer's program"


def _failed(drive: Drive, why: str, cure: str = _GOES_ON) -> CommandError:
    return CommandError(
        "drive `%s` (%s) is not erased: %s. hint: the volume is gone; %s" % (drive.serial, drive.name, why, cure)
    )
