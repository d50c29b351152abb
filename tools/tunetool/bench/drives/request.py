"""What `bench drives` is asked: its options, and the help text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tunetool.bench.defaults import DRIVES_ENGINES, DRIVES_SECONDS, VIRTUAL_BYTES
from tunetool.options import shared as options
from tunetool.options.fields import number, option
from tunetool.options.shared import InRounds, StartingPython
from tunetool.options.values import COUNTS, DURATION, NAMES, SIZE

PREREQUISITES = ("fio",)

KIND = "bench.drives"
FIGURES = {
    "B/s": ("bandwidth", "ceiling"),
    "1": ("efficiency", "xfs_over_ext4", "raid0_over_per_drive", "raid10_over_raid0", "raid1_over_raid0"),
}
"""Figures of its records, by unit."""


@dataclass(frozen=True)
class Request(StartingPython, InRounds):
    """Measure how bandwidth grows with the number of drives, and which layout and file system is faster.

    With `--target`: reads the member drives of the array under a directory, 1, 2, 4 ... at once, where this run's own
    files lie, and writes through files only. With `--drives`: makes RAID0, RAID10, RAID1 or single drives with XFS and
    ext4 on drives that are blank, and leaves them blank. With `--virtual`: the same on loop devices. By fio and by
    DeepSpeed's handle, to memory and, where there is a GPU, to its memory. The drives' own counters prove the bytes.
    Writes a record and a page into the runs directory.

    Exit codes: 0 measured and proven; 2 the call was wrong; 3 it could not be measured or proven.
    """

    target: Path | None = options.target(
        "Directory on the array: its drives are read alone and together, and files are written and read. With "
        "--virtual: directory for the files of virtual drives."
    )
    serials: tuple[str, ...] = option(
        "--drives",
        type=NAMES,
        default="",
        metavar="SERIAL,...",
        show_default=False,
        help="Serials of blank drives, which get file systems again and again and are blank afterwards. A drive that "
        "holds anything is refused.",
    )
    virtual: int = number(
        "--virtual", default=0, least=0, show_default=False, help="Number of virtual drives: loop devices over files."
    )
    virtual_bytes: int = option(
        "--virtual-size", type=SIZE, default=VIRTUAL_BYTES, help="Bytes of a virtual drive, whose file is sparse."
    )
    layouts: tuple[str, ...] = option(
        "--layout",
        type=NAMES,
        default="",
        metavar="NAME,...",
        show_default=False,
        help="Layouts to make: raid0-xfs, raid0-ext4, xfs-per-drive, ext4-per-drive, raid10-xfs (4, 6, 8 ... drives), "
        "raid1-xfs (2 or more). Default: the first three.",
    )
    counts: tuple[int, ...] = option(
        "--counts", type=COUNTS, default=(), metavar="N,...", show_default=False, help="Numbers of drives. "
        "Default: 1, 2, 4, 8 ... and all."
    )  # fmt: skip
    bytes_per_drive: int | None = option(
        "--bytes-per-drive",
        type=SIZE,
        help="Bytes of files on each drive. Default: 4 GiB, or less where there is less room.",
    )
    engines: tuple[str, ...] = options.engines("fio-*,deepspeed-cpu", DRIVES_ENGINES)
    duration: float = option(
        "--duration", type=DURATION, default=f"{DRIVES_SECONDS:g}s", help="Duration of one sample, such as `5s`."
    )
    seed: int = options.seed("the order of measurements")
