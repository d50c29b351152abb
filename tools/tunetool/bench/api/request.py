"""What `bench api` is asked: its options, and the help text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tunetool.bench.defaults import CHECKPOINT_ROUNDS
from tunetool.options import shared as options
from tunetool.options.fields import number, option
from tunetool.options.shared import StartingPython
from tunetool.options.values import SIZE

PREREQUISITES = ("DeepSpeed",)

KIND = "bench.api"
FIGURES = {
    "B/s": ("bandwidth",),
}
"""Figures of its records, by unit."""


@dataclass(frozen=True)
class Request(StartingPython):
    """Make every documented call of DeepNVMe, and see whether it does here what the documents say.

    Locked CPU tensors, synchronous and asynchronous reads and writes, file offsets, parallel handles, getters,
    GPU memory, and tensors as bytes: each in a process of its own, each compared bit for bit. Wrong uses too: which
    are refused, and which report a success that is none; these are shown and not judged. Then the speed of
    synchronous, asynchronous and parallel calls, proven by the drives' counters. Writes a record and a page into the
    runs directory.

    Exit codes: 0 every call that could be made does what is documented; 1 one does not; 2 the call was wrong; 3 it
    could not be judged, such as without DeepSpeed 0.17.1.
    """

    target: Path = options.target("Directory on drives for the files, which are removed at the end.", required=True)
    io_bytes: int | None = option(
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
