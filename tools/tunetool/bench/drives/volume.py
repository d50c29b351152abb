"""Makes virtual drives, and a layout over drives that hold nothing. Each thing is noted before it is made."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from tunetool.bench.drives.layouts import CHUNK, MOUNT_OPTIONS, Layout, mkfs
from tunetool.bench.drives.made import Made, down_to_here, loops_over, settle, virtual_drive
from tunetool.errors import CannotJudge
from tunetool.node.array.create import create, members_by_serial, refuse_unless_blank, settled
from tunetool.node.array.md_arrays import Array
from tunetool.node.common.commands import CommandError, run
from tunetool.node.common.files import read_int, read_text
from tunetool.node.common.raid_levels import Level
from tunetool.node.common.refusal import Refusal
from tunetool.node.machine.block_stack import BlockStack, Leaf, read_stack
from tunetool.node.machine.drive_contents import UnreadableDevice, read_signatures
from tunetool.node.machine.drives import Drive
from tunetool.node.machine.held_drives import held

VIRTUAL = "virtual-{number}"
_ARRAY = "tunetool_bench"
LOOP, NVME = "loop", "nvme"


@dataclass(frozen=True)
class Opened:
    """A layout that is made and mounted."""

    directories: Sequence[Path]
    """One for each drive."""
    array: str | None = None
    """Kernel name."""


@dataclass(frozen=True)
class BareDrive:
    """A drive that may get a file system."""

    drive: Drive
    file: Path | None = None
    """Of a virtual drive."""

    @property
    def noted(self) -> dict[str, str | None]:
        """By which it is known again."""
        return {"serial": self.drive.serial, "file": None if self.file is None else str(self.file)}


@contextlib.contextmanager
def cannot_judge() -> Iterator[None]:
    """What the reader of machines raises, as an error for people."""
    try:
        yield
    except (Refusal, UnreadableDevice, CommandError) as error:
        message, _, hint = str(error).partition(". hint: ")
        raise CannotJudge(message, hint or None) from None


def virtual_drives(made: Made, directory: Path, count: int, size: int) -> list[BareDrive]:
    """``count`` loop devices over sparse files in ``directory``, past the page cache. Raises ``CannotJudge``."""
    drives = []
    for number in range(1, count + 1):
        serial = VIRTUAL.format(number=number)
        file = directory / f"{serial}.img"
        with file.open("xb") as stream:
            os.truncate(stream.fileno(), size)
        made.note("loop", file=str(file))
        with cannot_judge():
            device = run(["losetup", "--find", "--show", "--direct-io=on", str(file)]).stdout.strip()
        name = Path(device).name
        if read_text(f"/sys/block/{name}/loop/dio") != "1":
            raise CannotJudge(
                f"`{directory}` takes no direct I/O from a loop device: the page cache would answer for the drives",
                "choose a directory on another file system",
            )
        drives.append(BareDrive(virtual_drive(name, serial, size), file))
    return drives


def stack_of(
    drives: Sequence[Drive], medium: str, directory: Path | None = None, mirror: str | None = None
) -> BlockStack:
    """The storage on these drives, whose own counters are the proof.

    ``mirror``: the array over them, if it keeps a byte on several: claimed bytes are those of its own counters then.
    """
    leaves = tuple(
        Leaf(
            name=drive.name,
            kind=LOOP if drive.transport == LOOP else NVME,
            serial=drive.serial or None,
            iostats=read_int(f"/sys/block/{drive.name}/queue/iostats") != 0,
            counted_by=_counted_by(drive, directory),
        )
        for drive in drives
    )
    number = read_text(f"/sys/class/block/{drives[0].name}/dev") if len(drives) == 1 else None
    return BlockStack(
        directory=str(directory or drives[0].path),
        mount=None,
        fs_type="",
        device=mirror,
        device_number=number,
        medium=medium,
        leaves=leaves,
        redundant=mirror is not None,
        in_memory=False,
        device_iostats=mirror is None or read_int(f"/sys/block/{mirror}/queue/iostats") != 0,
    )


def _counted_by(drive: Drive, directory: Path | None) -> tuple[str, ...]:
    """Before Linux 6.4 hidden paths count for an NVMe drive under multipath."""
    if directory is None or drive.transport == LOOP:
        return (drive.name,)
    known = {leaf.name: leaf.counted_by for leaf in read_stack(str(directory)).leaves}
    return known.get(drive.name, (drive.name,))


@contextlib.contextmanager
def volume(layout: Layout, bare: Sequence[BareDrive], made: Made, base: Path) -> Iterator[Opened]:
    """File systems on drives that are blank at this moment: a directory for each drive. Raises ``CannotJudge``."""
    # mount(8) shows where a path leads, and what is taken down is looked for by that.
    base = base.resolve()
    with down_to_here(made), cannot_judge():
        # What is written is what was looked at, also where a drive is pulled and another one gets its name.
        with held([each.drive for each in bare]):
            drives = as_they_are(bare)
            refuse_unless_blank(drives, deep=True)
            uuids = [str(uuid4()) for _ in range(len(drives) + 1)]
            made.note("labels", drives=[each.noted for each in bare], uuids=uuids, given_back=[], seen=[])
            array = None
            if level := layout.array(len(drives)):
                array = _array(level, drives, uuids, made)
                if old := read_signatures([array.device]):
                    # What an array over the same drives once held: mkfs.ext4 would overwrite it without a question.
                    raise CannotJudge(f"the drives hold {old[0]}, which an array over them shows: they are not blank")
                root = _mounted(layout, array.path, uuids[0], len(drives), made, base / "volume")
                directories = [root / f"part-{number}" for number in range(1, len(drives) + 1)]
                for directory in directories:
                    directory.mkdir()
            else:
                directories = []
                for number, (drive, uuid) in enumerate(zip(drives, uuids, strict=False), 1):
                    # Making the one before took its time; mkfs.ext4 asks nobody where it has no terminal.
                    refuse_unless_blank([drive], deep=True)
                    directories.append(_mounted(layout, drive.path, uuid, 1, made, base / f"volume-{number}"))
        yield Opened(directories, array.device if array else None)


def as_they_are(bare: Sequence[BareDrive]) -> list[Drive]:
    """The drives with their users and partitions at this moment. Raises ``Refusal`` for one that is gone, and for one
    that has another kernel name, which may be another drive's now."""
    now = iter(members_by_serial([each.drive.serial for each in bare if each.file is None]))
    drives = [each.drive if each.file is not None else next(now) for each in bare]
    for each, drive in zip(bare, drives, strict=True):
        if each.file is not None and loops_over(str(each.file)) != [drive.name]:
            raise Refusal(
                f"`{drive.path}` lies over `{each.file}` no more. hint: nothing was written to it; run it again"
            )
        if drive.name != each.drive.name:
            raise Refusal(
                f"drive `{drive.serial}` was `{each.drive.name}` and is `{drive.name}` now. hint: nothing was written "
                "to it since; run it again"
            )
    return drives


def _array(level: Level, drives: Sequence[Drive], uuids: Sequence[str], made: Made) -> Array:
    made.note("array", members=[drive.name for drive in drives], uuids=list(uuids))
    digits = uuids[-1].replace("-", "")
    uuid = ":".join(digits[start : start + 8] for start in range(0, 32, 8))
    # `site.yml` never assumes that, and its new mirror makes its copies alike for hours, which takes I/O from whatever
    # is measured meanwhile. Nor would freezing it do: md reads what is not alike yet from the first copy alone. This
    # array is thrown away, and everything that is read of it was written to both copies before.
    create(_ARRAY, CHUNK, list(drives), uuid, level.name, assume_clean=level.redundant)
    array = settled(drives[0].name)
    if array is None:
        raise CannotJudge("`mdadm --create` reported success, but there is no array", "see `dmesg | tail`")
    if array.sync is not None:
        raise CannotJudge(
            f"the new array `{array.device}` does a `{array.sync.action}`, which takes its drives",
            "see `mdadm --version`: it did not take `--assume-clean`",
        )
    return array


def _mounted(layout: Layout, device: str, uuid: str, drives: int, made: Made, path: Path) -> Path:
    run(mkfs(layout, device, uuid, drives), timeout=1800)
    settle()
    made.note("directory", path=str(path))
    path.mkdir(mode=0o700)
    made.note("mount", path=str(path))
    run(["mount", "-t", layout.file_system, "-o", MOUNT_OPTIONS[layout.file_system], device, str(path)])
    return path
