"""What a run has made of drives, and how it is taken down: by the run itself, and by another process if it is killed.

Each thing is noted before it is made, with that process, the janitor. A label is removed only from a drive whose every
label has a UUID that this run drew; a drive with anything else on it is left as it is.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunetool.ctrl_c import CtrlC
from tunetool.errors import CannotJudge
from tunetool.measure.janitor import Entry, Janitor
from tunetool.node.array.create import refuse_unless_blank
from tunetool.node.common.commands import CommandError, NotInstalled, run
from tunetool.node.common.files import exact_text
from tunetool.node.common.refusal import Refusal
from tunetool.node.common.waiting import try_for
from tunetool.node.machine.drive_contents import (
    Signature,
    UnreadableDevice,
    plain_uuid,
    read_signatures,
    read_unlabelled,
    use_problems,
)
from tunetool.node.machine.drives import Drive, Link, disks_under, read_drives
from tunetool.node.machine.held_drives import held, untouched
from tunetool.node.machine.mounts import read_mounts
from tunetool.node.removal.wipe_drives import clear_labels

_PATIENCE = 30.0
"""Seconds for which an unmount may wait for a killed program's last write."""
_TRIES = 3
_SURE = 2
"""A program that a killed run had started, such as mount, may make what was not there at the janitor's first look."""
_LEFT = "it was left as it is"
_SYS_BLOCK = Path("/sys/block")


class NotTakenDown(Exception):
    """Something that a run made is still there. The message says what, and what to do."""


def virtual_drive(name: str, serial: str, size: int) -> Drive:
    """A loop device as a drive."""
    return Drive(
        name=name,
        serial=serial,
        model="loop device",
        firmware="",
        size_bytes=size,
        lba_bytes=512,
        metadata_bytes=0,
        transport="loop",
        pci_address=None,
        numa_node=None,
        by_id=None,
        link=Link(),
    )


def loops_over(file: str) -> list[str]:
    """Kernel names of the loop devices over a file, be it deleted by now."""
    names = []
    for backing in sorted(_SYS_BLOCK.glob("loop*/loop/backing_file")):
        # A name may hold any byte, line breaks too.
        if exact_text(str(backing)).removesuffix("\n").removesuffix(" (deleted)") == file:
            names.append(backing.parents[1].name)
    return names


def settle(written: Sequence[Drive] = ()) -> None:
    """Wait for udev, where there is one, until it has looked again at the drives that were written.

    Of itself it misses a write that ends while it still handles the event before: it does not watch the drive then.
    Later programs, `lsblk` too, would read the old label in its database.
    """
    with contextlib.suppress(NotInstalled):
        if written:
            run(["udevadm", "trigger", "--action=change", *(drive.path for drive in written)], accept=(0, 1))
        run(["udevadm", "settle", "--timeout=60"], accept=(0, 1))


@dataclass
class Made:
    """What is made now, the newest last. As a context: everything is taken down at its end."""

    left_behind: Callable[[str], None]
    entries: list[Entry] = field(default_factory=list)
    _failed: list[Entry] = field(default_factory=list)
    """What could not be taken down: the other process tries again."""
    _janitor: Janitor = field(default_factory=lambda: Janitor("bench drives", __name__, _SURE))

    def __enter__(self) -> Made:
        self._janitor.__enter__()
        return self

    def __exit__(self, *what: object) -> None:
        try:
            self.undo(0)
        finally:
            self._janitor.__exit__(*what)

    def note(self, kind: str, **facts: Any) -> None:
        """Something that will be made next."""
        self.entries.append({"kind": kind, **facts})
        self._tell()

    def undo(self, mark: int) -> None:
        """Take down all but the first ``mark``. Ctrl-C waits until that is done."""
        ctrl_c = CtrlC()
        while len(self.entries) > mark:
            for attempt in range(_TRIES):
                with ctrl_c.held():
                    problem = undone(self.entries[-1])
                    if problem and attempt + 1 < _TRIES:
                        continue
                    if problem:
                        self.left_behind(problem)
                        self._failed.insert(0, self.entries[-1])
                    break
            self.entries.pop()
            with ctrl_c.held():
                self._tell()
        ctrl_c.deliver()

    def _tell(self) -> None:
        try:
            self._janitor.note(*self._failed, *self.entries)
        except OSError:
            raise CannotJudge("the process that takes down what this run makes has ended", "run it again") from None


def undone(entry: Entry) -> str | None:
    """Take one thing down, if it is there; why that is not possible."""
    try:
        REMOVALS[entry["kind"]](entry)
    except (NotTakenDown, CommandError, UnreadableDevice, Refusal, OSError) as error:
        return f"{error}"
    return None


def _unmount(entry: Entry) -> None:
    def is_mounted() -> bool:
        return any(mount.mount_point == entry["path"] for mount in read_mounts("/"))

    while is_mounted():
        try_for(lambda: is_mounted() and run(["umount", entry["path"]]), CommandError, _PATIENCE, 0.2)


def _remove_directory(entry: Entry) -> None:
    path = Path(entry["path"])
    inside = [each.mount_point for each in read_mounts("/") if Path(each.mount_point).is_relative_to(path)]
    if inside:
        raise NotTakenDown(f"`{inside[0]}` is still mounted: `umount` it, then remove `{path}`")
    if path.is_dir():
        shutil.rmtree(path)


def _stop_array(entry: Entry) -> None:
    members = set(entry["members"])
    for base in sorted(_SYS_BLOCK.glob("md*/md")):
        device = base.parent.name
        below = disks_under("/", device)
        if below and below <= members:
            # Also an array that holds nothing yet is somebody's work.
            _refuse_others([*sorted(below), device], entry["uuids"], device)
            # Otherwise a later array at the same place would show the old file system again.
            run(["wipefs", "--all", "--quiet", f"/dev/{device}"])
            run(["mdadm", "--stop", f"/dev/{device}"])


def _clear(entry: Entry) -> None:
    drives = _all_present(entry)
    settle()
    with held(drives):
        # An event of a member may have made udev assemble the array again.
        _stop_array({"members": [drive.name for drive in drives], "uuids": entry["uuids"]})
        now = _all_present(entry)
        # A loop device is known by its file, which `held` does not look at.
        if [(drive.name, drive.serial) for drive in now] != [(drive.name, drive.serial) for drive in drives]:
            raise NotTakenDown("drives changed their names meanwhile: none of them was touched")
        problems, ours = _cleared(now, entry)
    entry["given_back"].extend(ours)
    # A loop device that is gone took its file along; a drive has what was written to it.
    gone = {each["serial"] for each in entry["drives"] if each["file"] is None} - {drive.serial for drive in drives}
    problems += [f"drive `{serial}` is gone: it may keep what this run made" for serial in sorted(gone)]
    if problems:
        raise NotTakenDown("; ".join(problems))


def _cleared(drives: Sequence[Drive], entry: Entry) -> tuple[list[str], list[str]]:
    """Clear drives that are held. Returns why some were left as they are, and the serials of the others."""
    problems, ours = [], []
    for drive in drives:
        try:
            if _is_left(drive, entry):
                with untouched([drive], _LEFT):
                    _refuse_others([drive.name, *drive.partitions], entry["uuids"], drive.serial)
                ours.append(drive)
        except (NotTakenDown, Refusal) as error:
            # The other drives are cleared nevertheless.
            problems.append(str(error))
    clear_labels(ours)
    settle(ours)
    serials = [drive.serial for drive in ours]
    refuse_unless_blank([drive for drive in _all_present(entry) if drive.serial in serials], deep=True)
    return problems, serials


def _all_present(entry: Entry) -> list[Drive]:
    return [drive for each in entry["drives"] if (drive := _present(each)) is not None]


def _is_left(drive: Drive, entry: Entry) -> bool:
    """Whether the drive still has to be cleared. Raises ``NotTakenDown`` where it must not be."""
    labels = _refuse_others([drive.name, *drive.partitions], entry["uuids"], drive.serial)
    seen = entry.get("seen", [])
    if drive.serial in entry["given_back"] and not labels:
        # It was blank: what is on it now without a label is somebody else's.
        return False
    if labels:
        seen.append(drive.serial)
    elif drive.serial not in seen:
        # Without a label of ours nothing shows who wrote: it may have been somebody else, before we came to it.
        if held := read_unlabelled(drive.name, deep=True):
            raise NotTakenDown(
                f"drive `{drive.serial}` holds {held[0]}, and no label of this run: it was left as it is. If nothing "
                f"on it is needed, `blkdiscard {drive.path}` makes it blank"
            )
        return False
    if problem := use_problems([drive]).get(drive.name):
        raise NotTakenDown(f"drive `{drive.serial}` keeps what this run made: {problem}")
    return True


def _refuse_others(names: Sequence[str], uuids: Sequence[str], what: str) -> list[Signature]:
    """The labels, all of which this run wrote. Raises ``NotTakenDown`` for others."""
    ours, labels = {plain_uuid(uuid) for uuid in uuids}, read_signatures(names)
    strange = [each for each in labels if plain_uuid(each.uuid) not in ours]
    if strange:
        raise NotTakenDown(f"`{what}` holds {strange[0]}, which this run did not make: it was left as it is")
    return labels


def _present(known: Mapping[str, Any]) -> Drive | None:
    """The drive of an entry as it is now; None if it is gone."""
    if known["file"] is not None:
        names = loops_over(known["file"])
        return virtual_drive(names[0], known["serial"], 0) if names else None
    same = [drive for drive in read_drives() if drive.serial == known["serial"]]
    if len(same) > 1:
        raise NotTakenDown(f"serial `{known['serial']}` is on {len(same)} drives: none of them was touched")
    return same[0] if same else None


def _detach(entry: Entry) -> None:
    for name in loops_over(entry["file"]):
        run(["losetup", "--detach", f"/dev/{name}"])


REMOVALS: Mapping[str, Callable[[Entry], None]] = {
    "directory": _remove_directory,
    "mount": _unmount,
    "array": _stop_array,
    "labels": _clear,
    "loop": _detach,
}


@contextlib.contextmanager
def down_to_here(made: Made) -> Iterator[None]:
    """What is made inside is taken down at its end."""
    mark = len(made.entries)
    try:
        yield
    finally:
        made.undo(mark)
