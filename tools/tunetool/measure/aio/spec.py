"""The specification of the DeepSpeed rung, with every check that the op itself does not make. Pure."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tunetool.measure import Direction
from tunetool.measure.worker import Failed
from tunetool.node.units import format_size, format_size_binary

Device = Literal["cpu", "cuda", "gds"]
Call = Literal["pwrite", "sync", "async"]
"""What moves a pass: pwrite and pread with one wait each; sync_pwrite and sync_pread; or async_pwrite and async_pread
of its parts, all in flight until one wait."""

SECTOR = 512
FILE = "aio.data"
LARGEST = 2**30
"""Of the buffer, and of the file that holds it: what the published figures were moved in."""
SMALLEST = 64 * 2**20
MEMORY_SHARE = 0.1
"""Of the memory that is there, for the locked buffer."""
SPACE_SHARE = 0.1


@dataclass(frozen=True)
class Spec:
    """One run of the handle: the same file again and again, from one buffer of the file's size."""

    directory: Path
    """The run's own directory on the storage; the file is made there and left for its owner to remove."""
    io_bytes: int
    device: Device = "cpu"
    """cpu: memory locked by DeepSpeed; cuda: HBM by a bounce buffer, the copy timed; gds: HBM by cuFile."""
    block_bytes: int = 2**20
    queue_depth: int = 32
    intra_op_parallelism: int = 4
    single_submit: bool = False
    overlap_events: bool = True
    python: Path = Path(sys.executable)
    pinned_by: Literal["deepspeed", "cuda"] = "deepspeed"
    directions: Sequence[Direction] = ("write", "read")
    samples: int = 6
    seconds: float | None = 1.0
    """Each sample's box; None: a sample is one pass over the file."""
    warm_ups: int = 1
    """Passes before the first sample of a direction; a write's come after the one that lays out the file."""
    call: Call = "pwrite"
    pending: int = 1
    """Parts of a pass that are in flight at once; more than one with ``async`` alone."""

    @property
    def file(self) -> Path:
        """The path of the data file."""
        return self.directory / FILE

    @property
    def op(self) -> str:
        """Name of the op that moves it."""
        return "gds" if self.device == "gds" else "async_io"

    @property
    def handle(self) -> str:
        """DeepSpeed's name of what moves it."""
        return "gds_handle" if self.device == "gds" else "aio_handle"


def granule(parallelism: int, sector_bytes: int = SECTOR) -> int:
    """Of what a size must be a multiple: each thread moves an equal part, and direct I/O moves whole sectors."""
    return max(sector_bytes, SECTOR) * parallelism


def misfit(io_bytes: int, parallelism: int, sector_bytes: int = SECTOR) -> str | None:
    """Which sizes near ``io_bytes`` could be moved exactly; None where that one can."""
    unit = granule(parallelism, sector_bytes)
    if io_bytes > 0 and io_bytes % unit == 0:
        return None
    below, above = io_bytes // unit * unit, -(-max(io_bytes, 1) // unit) * unit
    near = f"{below} or {above}" if below else str(above)
    each = unit // parallelism
    return f"{near} bytes are possible: sizes must be multiples of {unit} ({each} x parallelism {parallelism})"


def check_shape(spec: Spec, sector_bytes: int) -> None:
    """Raises ``Failed`` for values on which the op would do nothing, abort or divide by zero."""
    if min(spec.intra_op_parallelism, spec.queue_depth, spec.block_bytes) < 1:
        raise Failed("block size, queue depth and parallelism must be at least 1")
    if spec.pending < 1 or (spec.pending > 1 and spec.call != "async"):
        raise Failed(f"`{spec.pending}` parts cannot be in flight by `{spec.call}`", "use `async`")
    hint = misfit(spec.io_bytes, spec.intra_op_parallelism * spec.pending, sector_bytes)
    if hint:
        raise Failed(f"`{spec.io_bytes}` bytes cannot be moved exactly", hint)
    if spec.block_bytes % max(sector_bytes, SECTOR):
        raise Failed(
            f"a block of `{spec.block_bytes}` bytes is not a multiple of the device's sector of {sector_bytes}",
            "use a block size such as 1 MiB",
        )


def check_limits(spec: Spec, free_bytes: int, memlock: int | None, file_limit: int | None) -> None:
    """Raises ``Failed``. ``memlock`` and ``file_limit`` in bytes; None: no limit."""
    if free_bytes < spec.io_bytes:
        raise Failed(
            f"`{spec.directory.parent}` has too little space: {format_size(free_bytes)} free, "
            f"{format_size(spec.io_bytes)} needed",
            "free some space, or move less",
        )
    if file_limit is not None and file_limit < spec.io_bytes:
        raise Failed(
            f"RLIMIT_FSIZE ends files at {format_size_binary(file_limit)}, {format_size_binary(spec.io_bytes)} needed",
            "`ulimit -f unlimited`, or move less",
        )
    if spec.device != "gds" and spec.pinned_by == "deepspeed" and memlock is not None and memlock < spec.io_bytes:
        raise Failed(
            f"RLIMIT_MEMLOCK is {format_size_binary(memlock)}, DeepSpeed's buffer locks "
            f"{format_size_binary(spec.io_bytes)}",
            "set memlock to unlimited (role `host_memory` does), or `ulimit -l unlimited`",
        )


def largest_io_bytes(free_bytes: int, memory_bytes: int) -> int:
    """The most that a file takes of the space and the memory that there are."""
    return int(min(LARGEST, free_bytes * SPACE_SHARE, memory_bytes * MEMORY_SHARE))


def default_io_bytes(free_bytes: int, memory_bytes: int, parallelism: int, bandwidth: float = 0.0) -> int:
    """A size that a sample of half a second moves twice, that fits, and that can be moved exactly.

    ``bandwidth`` is what the storage was seen to do; 0: unknown.
    """
    wanted = largest_io_bytes(free_bytes, memory_bytes)
    if bandwidth:
        wanted = min(wanted, max(SMALLEST, int(bandwidth / 4)))
    unit = max(granule(parallelism, 4096), 2**20 * parallelism)
    return wanted // unit * unit


def default_parallelism(cpu_count: int) -> int:
    """Threads of one operation: 8 moved most in the published tables; fewer where there are fewer cores."""
    return 8 if cpu_count >= 8 else 4


def script(name: str) -> Path:
    """A program of this package that runs by itself."""
    return Path(__file__).with_name(name)
