"""What `bench ds-io` is asked: its options, which have `ds_io`'s names, and the help text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tunetool.options import shared as options
from tunetool.options.fields import option
from tunetool.options.shared import Measuring
from tunetool.options.values import DIRECTORY, IO_SIZE

if TYPE_CHECKING:
    from tunetool.measure import Direction
    from tunetool.measure.aio.spec import Device

PREREQUISITES = ("DeepSpeed",)
KIND = "bench.ds-io"
DURABLE = "durable_bandwidth"
"""The figure of a write until it is synced."""
FIGURES = {
    "B/s": ("bandwidth", DURABLE, "ceiling"),
}
"""Figures of its records, by unit."""


@dataclass(frozen=True)
class Request(Measuring):
    """Move one file with DeepSpeed's own I/O handle, as DeepSpeed's `ds_io` does, with proof.

    The options have `ds_io`'s names. The drives' counters prove the bytes, and another process reads the file
    back. Writes a record into the runs directory.

    Exit codes: 0 measured and proven; 2 the call was wrong, such as a size that cannot be moved exactly; 3 it could not
    be measured or proven.
    """

    folder: Path = option(
        "--folder",
        "--target",
        required=True,
        type=DIRECTORY,
        metavar="DIR",
        help="Directory of the file, which is removed at the end.",
    )
    io_size: int = option("--io_size", required=True, type=IO_SIZE, help="Bytes to move: `1G` and `1GiB` are 2^30.")
    block_size: int = option("--block_size", type=IO_SIZE, default="1M", help="Bytes of one request.")
    queue_depth: int = option(
        "--queue_depth", type=int, default=32, help="Number of requests in flight for each thread."
    )
    io_parallel: int = option("--io_parallel", type=int, default=1, help="Number of threads of one operation.")
    single_submit: bool = option("--single_submit", is_flag=True, help="Submit requests one by one.")
    sequential_requests: bool = option(
        "--sequential_requests", is_flag=True, help="Do not overlap submission with completion."
    )
    read: bool = option("--read", is_flag=True, help="Read instead of write.")
    gpu: bool = option("--gpu", is_flag=True, help="Move data from or to GPU memory, through a bounce buffer.")
    use_gds: bool = option("--use_gds", is_flag=True, help="With --gpu: GPUDirect Storage instead of a buffer.")
    use_accelerator_pin_memory: bool = option(
        "--use_accelerator_pin_memory", is_flag=True, help="With --gpu: a bounce buffer pinned by CUDA."
    )
    loops: int = option("--loops", type=int, default=3, help="Number of measured operations.")
    warmup_loops: int = option(
        "--warmup_loops", type=click.IntRange(min=0), default=1, help="Number of operations before the measured ones."
    )
    python: str | None = options.python()

    @property
    def direction(self) -> Direction:
        """The direction that is timed."""
        return "read" if self.read else "write"

    @property
    def device(self) -> Device:
        """The memory that holds the data."""
        if not self.gpu:
            return "cpu"
        return "gds" if self.use_gds else "cuda"
