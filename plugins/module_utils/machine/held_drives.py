"""Drives stay the drives that were looked at, and nobody uses them, until they are written."""

from __future__ import annotations

import contextlib
import os
import stat
from typing import Iterator, Sequence

from ..common.files import read_text
from ..common.refusal import Refusal
from .drive_contents import use_problems
from .drives import Drive, read_drives

UNCHANGED = "nothing was changed"


@contextlib.contextmanager
def held(drives: Sequence[Drive]) -> Iterator[None]:
    """Keep the drives' kernel names from being given to others, as happens when drives are pulled and plugged.

    The kernel gives a name again when the last handle of the device that had it is closed. What writes to ``/dev/NAME``
    inside writes to the drive that was looked at, or fails. Raises ``Refusal`` if one is another drive's by now. A loop
    device has no serial number: who made it knows it by its file.
    """
    with contextlib.ExitStack() as stack:
        for drive in drives:
            try:
                handle = os.open(drive.path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                refuse(drive, "cannot be opened: %s" % error.strerror)
                raise
            stack.callback(os.close, handle)
            status = os.fstat(handle)
            number = read_text("/sys/class/block/%s/dev" % drive.name)
            if stat.S_ISBLK(status.st_mode) and number != "%d:%d" % (
                os.major(status.st_rdev),
                os.minor(status.st_rdev),
            ):
                refuse(drive, "is `%s` in the kernel, and `%s` is another device" % (number, drive.path))
        now = {drive.name: drive for drive in read_drives()}
        for drive in drives:
            if drive.transport == "loop":
                continue
            found = now.get(drive.name)
            if found is None or found.serial != drive.serial:
                refuse(drive, "is `%s` by now" % (found.serial if found else "gone"))
            elif found.controller != drive.controller:
                refuse(drive, "is at controller `%s` by now" % found.controller)
        yield


@contextlib.contextmanager
def untouched(drives: Sequence[Drive], hint: str = UNCHANGED) -> Iterator[None]:
    """What is read of the drives inside is still so at the end. Raises ``Refusal`` if one was written, or if anything
    uses one in this moment: reading takes its time, in which somebody may open a drive, or write to it and close it.
    """
    before = {drive.name: sectors_written(drive.name) for drive in drives}
    yield
    used = use_problems(drives, patience=0.0)
    for drive in drives:
        refuse(drive, used.get(drive.name), hint)
        if sectors_written(drive.name) != before[drive.name]:
            refuse(drive, "was written while it was read: somebody uses it", hint)


def sectors_written(name: str) -> str | None:
    """Sectors that were written to the device since it appeared."""
    fields = (read_text("/sys/class/block/%s/stat" % name) or "").split()
    return fields[6] if len(fields) > 6 else None


def refuse(drive: Drive, problem: str | None, hint: str = UNCHANGED) -> None:
    """Raises ``Refusal`` if there is a problem."""
    if problem:
        raise Refusal("drive `%s` (%s) %s. hint: %s" % (drive.serial, drive.name, problem, hint))
