"""The array that was made on this node and has no file system yet, and what lay on it when it was made.

That is no data of anybody's: drives that a plan or a teardown wiped hold their old data between the places that were
read. What differs from it was written since, before there was a file system: somebody's data.
"""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass

from ..common.files import read_text, replace_file
from ..machine.held_drives import sectors_written
from ..machine.unlabelled import fingerprint

BEGUN_PATH = "/etc/tunetool/array.begun"
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_LAY, _WRITTEN, _FORMATTING = "lay", "written", "formatting"


@dataclass(frozen=True)
class Begun:
    """What is noted of an array. A note of an older version, or of a run that was cut off, has its UUID alone."""

    uuid: str
    lay: str = ""
    """``fingerprint`` of the array as it was made."""
    boot: str = ""
    sectors: str = ""
    """Sectors that were written to it then, in that boot."""
    formatting: bool = False
    """mkfs has begun on it: it may have discarded and written any of it."""

    def problem(self, device: str, path: str) -> str | None:
        """Why the array (``/dev/DEVICE``, read by ``path``) is not as it was made, or None. Raises ``OSError``."""
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # What somebody wrote and closed may wait in the page cache, where no counter sees it.
            os.fsync(handle)
        finally:
            os.close(handle)
        # One that was stopped and assembled since begins with none.
        if self.boot == read_text(_BOOT_ID) and str(sectors_written(device)) not in (self.sectors, "0"):
            return "was written since it was made"
        return None if fingerprint(path) == self.lay else "does not hold what it held when it was made"


def begin() -> str:
    """The UUID for a new array, as mdadm writes it, noted before the array exists. Raises ``OSError``."""
    digits = uuid.uuid4().hex
    drawn = ":".join(digits[start : start + 8] for start in range(0, 32, 8))
    replace_file(BEGUN_PATH, drawn + "\n")
    return drawn


def note_as_made(array_uuid: str, device: str, root: str = "/") -> None:
    """Note what lies on the array ``/dev/DEVICE``, on which nobody can have written yet. Raises ``OSError``."""
    lay = fingerprint(os.path.join(root, "dev", device))
    words = [(_LAY, lay), (_WRITTEN, "%s %s" % (read_text(_BOOT_ID), sectors_written(device)))]
    replace_file(_path(root), "\n".join([array_uuid, *("%s %s" % pair for pair in words)]) + "\n")


def note_formatting(array_uuid: str, root: str = "/") -> None:
    """Note that mkfs begins on it: if it is cut off, the next run does it again. Raises ``OSError``."""
    replace_file(_path(root), "%s\n%s\n" % (array_uuid, _FORMATTING))


def begun(root: str = "/") -> Begun | None:
    """The array noted by ``begin`` that no file system was made on since, or None."""
    lines = (read_text(_path(root)) or "").splitlines()
    if not lines:
        return None
    words = {word: rest for word, _, rest in (line.partition(" ") for line in lines[1:])}
    boot, _, sectors = words.get(_WRITTEN, "").partition(" ")
    return Begun(lines[0], words.get(_LAY, ""), boot, sectors, _FORMATTING in words)


def _path(root: str) -> str:
    return os.path.join(root, BEGUN_PATH.lstrip("/"))
