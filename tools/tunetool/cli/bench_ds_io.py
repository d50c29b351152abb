"""``tunetool bench ds-io``: its options, and the call."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from tunetool.cli.output import finish
from tunetool.options import shared as options
from tunetool.options.fields import option, takes
from tunetool.options.shared import Measuring
from tunetool.options.values import DIRECTORY, Value


def _io_size(name: str, text: str) -> int:
    from tunetool.bench.ds_io import parse_io_size

    return parse_io_size(text)


IO_SIZE: Any = Value("size", _io_size)
"""A size with `ds_io`'s meaning: `1G` is 2^30 bytes."""


@dataclass(frozen=True)
class Options(Measuring):
    """What the call says; the options have `ds_io`'s names."""

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


@click.command("ds-io")
@takes(Options)
def ds_io(given: Options) -> int:
    """Move one file with DeepSpeed's own I/O handle, as DeepSpeed's `ds_io` does, with proof.

    The options have `ds_io`'s names. The drives' counters prove the bytes, and another process reads the file
    back. Writes a record into the runs directory.

    Exit codes: 0 measured and proven; 2 the call was wrong, such as a size that cannot be moved exactly; 3 it could not
    be measured or proven.
    """
    from tunetool.bench import ds_io as bench
    from tunetool.report.progress import best_progress
    from tunetool.training_python import choose

    chosen = choose(given.python).need()
    request = bench.Request(
        folder=given.folder,
        io_size=given.io_size,
        block_size=given.block_size,
        queue_depth=given.queue_depth,
        io_parallel=given.io_parallel,
        single_submit=given.single_submit,
        sequential_requests=given.sequential_requests,
        read=given.read,
        gpu=given.gpu,
        use_gds=given.use_gds,
        use_accelerator_pin_memory=given.use_accelerator_pin_memory,
        loops=given.loops,
        warmup_loops=given.warmup_loops,
        python=chosen.path,
        run=given.run,
    )
    return finish(bench.ds_io(request, best_progress(), chosen.environment(os.environ)), given.json_to)
