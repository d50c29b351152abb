"""Creates or assembles the array; every step checks the drives again before it writes.

Also what lay on an array when it was made here, while it has no file system. That is no data of anybody's: drives that
a plan or a teardown wiped hold their old data between the places that were read. What differs from it was written
since, before there was a file system: somebody's data.
"""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass

from ..common.commands import run
from ..common.files import read_text, replace_file
from ..common.raid_levels import DEFAULT, LEVELS
from ..common.refusal import Refusal
from ..machine.drive_contents import read_signatures, read_unlabelled, use_problems
from ..machine.drives import Drive, disks_under, read_drives
from ..machine.held_drives import refuse, sectors_written, untouched
from ..machine.unlabelled import fingerprint
from .md_arrays import Array, find, read_arrays


def members_by_serial(serials: list[str]) -> list[Drive]:
    """The drives in the requested order. Raises ``Refusal`` if one is absent or a serial is not unique."""
    drives = read_drives()
    chosen = []
    for serial in serials:
        matching = [drive for drive in drives if drive.serial == serial]
        if len(matching) != 1:
            cure = (
                "every member needs its own"
                if matching
                else "see `lsblk -do NAME,SERIAL`, or `tunetool inspect` where drives share one"
            )
            raise Refusal("serial `%s` is on %d drives. hint: %s" % (serial, len(matching), cure))
        chosen.append(matching[0])
    return chosen


def refuse_unless_blank(members: list[Drive], deep: bool = False) -> None:
    """Check the drives again before md writes to them: they may have changed during the run.

    ``deep``: data of no known kind counts too.
    """
    for drive in members:
        problem = "; ".join(drive.uses)
        if drive.partitions:
            problem = "has partitions " + ", ".join(drive.partitions)
        refuse(drive, problem)
    used = use_problems(members)
    for drive in members:
        refuse(drive, used.get(drive.name))
    with untouched(members):
        signatures = read_signatures([drive.name for drive in members])
        for drive in members if not signatures else ():
            signatures += read_unlabelled(drive.name, deep)
    for drive in members:
        held_there = [str(signature) for signature in signatures if signature.device == drive.name]
        refuse(drive, "holds %s" % held_there[0] if held_there else None)


def create(
    name: str,
    chunk: int,
    members: list[Drive],
    uuid: str | None = None,
    level: str = DEFAULT,
    assume_clean: bool = False,
) -> None:
    """Create the array. Without --run, mdadm asks if it sees something on a drive, gets no answer and stops.

    ``assume_clean``: md makes no copies alike first. Only for an array that is thrown away and of which nothing is read
    that was not written: the copies of anything else may differ.
    """
    run(
        ["mdadm", "--create", "/dev/md/" + name, *LEVELS[level].create_arguments(chunk)]
        # One drive is a mistake to mdadm, unless it reads this before the number. It still asks about what it sees.
        + (["--force"] if len(members) == 1 else [])
        + ["--metadata=1.2", "--name=" + name, "--raid-devices=%d" % len(members)]
        + (["--uuid=" + uuid] if uuid else [])
        + (["--assume-clean"] if assume_clean else [])
        + [drive.path for drive in members]
    )


def assemble(name: str, uuid: str, members: list[Drive]) -> None:
    """Assemble an array whose members are all present; md itself refuses members that do not fit.

    What udev began with some of them is stopped first. Often it would take the others; not once its start was tried
    (`mdadm --run`, as Debian's initramfs does where the root file system is late).
    """
    names = {drive.name for drive in members}
    inactive = {array.device for array in read_arrays() if array.state == "inactive"}
    for device in sorted(inactive & {array for drive in members for array in drive.idle_arrays}):
        if disks_under("/", device) <= names:
            run(["mdadm", "--stop", "/dev/" + device])
    run(["mdadm", "--assemble", "/dev/md/" + name, "--uuid=" + uuid] + [drive.path for drive in members])


def settled(uuid_or_member: str) -> Array | None:
    """The array once udev has named it: found by UUID, or by a member's kernel name right after creation."""
    run(["udevadm", "settle", "--timeout=60"], accept=(0, 1))
    arrays = read_arrays()
    return find(arrays, uuid_or_member) or next((array for array in arrays if uuid_or_member in array.members), None)


_BEGUN_PATH = "/etc/tunetool/array%s.begun"
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

    @property
    def made(self) -> bool:
        """Whether its making is known to have ended."""
        return bool(self.lay) or self.formatting

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


def drawn_uuid() -> str:
    """A UUID for a new array, as mdadm writes it."""
    digits = uuid.uuid4().hex
    return ":".join(digits[start : start + 8] for start in range(0, 32, 8))


def begin(drawn: str, volume: str = "") -> str:
    """Note the UUID for a new array before the array exists, and return it. ``volume``: the name of the volume on it,
    where it is one of several. Raises ``OSError``."""
    replace_file(begun_path(volume), drawn + "\n")
    return drawn


def note_as_made(array_uuid: str, device: str, root: str = "/", volume: str = "") -> None:
    """Note what lies on the array ``/dev/DEVICE``, on which nobody can have written yet. Raises ``OSError``."""
    lay = fingerprint(os.path.join(root, "dev", device))
    words = [(_LAY, lay), (_WRITTEN, "%s %s" % (read_text(_BOOT_ID), sectors_written(device)))]
    replace_file(_path(root, volume), "\n".join([array_uuid, *("%s %s" % pair for pair in words)]) + "\n")


def note_formatting(array_uuid: str, root: str = "/", volume: str = "") -> None:
    """Note that mkfs begins on it: if it is cut off, the next run does it again. Raises ``OSError``."""
    replace_file(_path(root, volume), "%s\n%s\n" % (array_uuid, _FORMATTING))


def begun(root: str = "/", volume: str = "") -> Begun | None:
    """The array noted by ``begin`` that no file system was made on since, or None."""
    lines = (read_text(_path(root, volume)) or "").splitlines()
    if not lines:
        return None
    words = {word: rest for word, _, rest in (line.partition(" ") for line in lines[1:])}
    boot, _, sectors = words.get(_WRITTEN, "").partition(" ")
    return Begun(lines[0], words.get(_LAY, ""), boot, sectors, _FORMATTING in words)


def begun_path(volume: str = "") -> str:
    """The file with that note, one for the array of each volume."""
    return _BEGUN_PATH % ("-" + volume if volume else "")


def _path(root: str, volume: str) -> str:
    return os.path.join(root, begun_path(volume).lstrip("/"))
