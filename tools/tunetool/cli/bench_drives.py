"""``tunetool bench drives``: its options, and the call."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path

import click

from tunetool.bench.defaults import CHECKPOINT_ROUNDS, DRIVES_SECONDS, VIRTUAL_BYTES
from tunetool.cli.output import finish
from tunetool.options import shared as options
from tunetool.options.fields import number, option, takes
from tunetool.options.shared import Measuring
from tunetool.options.values import COUNTS, DURATION, NAMES, SIZE


@dataclass(frozen=True)
class Options(Measuring):
    """What the call says."""

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
        help="Layouts to make: raid0-xfs, raid0-ext4, xfs-per-drive, ext4-per-drive. Default: the first three.",
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
    engines: tuple[str, ...] = options.engines("fio-*,deepspeed-cpu")
    duration: float = option(
        "--duration", type=DURATION, default=f"{DRIVES_SECONDS:g}s", help="Duration of one sample, such as `5s`."
    )
    rounds: int = options.rounds(CHECKPOINT_ROUNDS)
    seed: int = options.seed("the order of measurements")
    python: str | None = options.python()


@click.command("drives")
@takes(Options)
def drives(given: Options) -> int:
    """Measure how bandwidth grows with the number of drives, and which layout and file system is faster.

    With `--target`: reads the member drives of the array under a directory, 1, 2, 4 ... at once, where this run's own
    files lie, and writes through files only. With `--drives`: makes RAID0 or single drives with XFS and ext4 on drives
    that are blank, and leaves them blank. With `--virtual`: the same on loop devices. By fio and by DeepSpeed's handle,
    to memory and, where there is a GPU, to its memory. The drives' own counters prove the bytes. Writes a record and a
    page into the runs directory.

    Exit codes: 0 measured and proven; 2 the call was wrong; 3 it could not be measured or proven.
    """
    from tunetool.bench.drives.request import Request
    from tunetool.bench.drives.run import bench
    from tunetool.report.progress import best_progress
    from tunetool.training_python import choose

    # Without torch fio measures: the handles are left out.
    chosen = choose(given.python)
    own = ("run", "python")
    # The options have the names of the request's fields.
    asked = {each.name: getattr(given, each.name) for each in fields(Request) if each.name not in own}
    request = Request(**asked, python=chosen.path, run=given.run)
    return finish(bench(request, best_progress(), chosen.environment(os.environ)), given.json_to)
