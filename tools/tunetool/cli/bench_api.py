"""``tunetool bench api``: its options, and the call."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import click

from tunetool.bench.defaults import CHECKPOINT_ROUNDS
from tunetool.cli.output import finish
from tunetool.options import shared as options
from tunetool.options.fields import number, option, takes
from tunetool.options.shared import Measuring
from tunetool.options.values import SIZE


@dataclass(frozen=True)
class Options(Measuring):
    """What the call says."""

    target: Path = options.target("Directory on drives for the files, which are removed at the end.", required=True)
    size: int | None = option(
        "--size",
        type=SIZE,
        help="Bytes of the file that is timed. Default: 1 GiB, or a tenth of the free space or of the memory.",
    )
    parallelism: int | None = number(
        "--parallelism", help="Number of threads of the parallel handle. Default: 8, or 4 on fewer cores."
    )
    pending: int = number("--pending", default=4, help="Number of asynchronous operations in flight at once.")
    samples: int = number(
        "--samples", default=CHECKPOINT_ROUNDS, help="Number of samples of a figure. 95 % confidence needs 6."
    )
    python: str | None = options.python()


@click.command("api")
@takes(Options)
def api(given: Options) -> int:
    """Make every documented call of DeepNVMe, and see whether it does here what the documents say.

    Locked CPU tensors, synchronous and asynchronous reads and writes, file offsets, parallel handles, getters,
    GPU memory, and tensors as bytes: each in a process of its own, each compared bit for bit. Wrong uses too: which
    are refused, and which report a success that is none; these are shown and not judged. Then the speed of
    synchronous, asynchronous and parallel calls, proven by the drives' counters. Writes a record and a page into the
    runs directory.

    Exit codes: 0 every call that could be made does what is documented; 1 one does not; 2 the call was wrong; 3 it
    could not be judged, such as without DeepSpeed 0.17.1.
    """
    from tunetool.bench.api.request import Request
    from tunetool.bench.api.run import bench
    from tunetool.report.progress import best_progress
    from tunetool.training_python import choose

    chosen = choose(given.python)
    request = Request(
        target=given.target,
        io_bytes=given.size,
        parallelism=given.parallelism,
        pending=given.pending,
        samples=given.samples,
        python=chosen.path,
        run=given.run,
    )
    return finish(bench(request, best_progress(), chosen, chosen.environment(os.environ)), given.json_to)
