"""What the GPUDirect rung is to do, and whether it can be done."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tunetool.measure import Direction

Way = Literal["direct", "compat", "posix"]
"""cuFile without the host's memory; cuFile through it; kvikio alone, which reads and writes as any program does."""
Mode = Literal["require", "auto", "off"]

TASK = 16 * 2**20
LARGEST, SMALLEST = 2**30, 2**26


@dataclass(frozen=True)
class Spec:
    """One run: the same file again and again, from one buffer of its size on the GPU."""

    directory: Path
    io_bytes: int
    cufile: bool = True
    """Through cuFile; else through kvikio's own POSIX path."""
    python: Path = Path(sys.executable)
    threads: int = 8
    task_bytes: int = TASK
    directions: Sequence[Direction] = ("write", "read")
    samples: int = 6
    seconds: float = 0.5

    @property
    def file(self) -> Path:
        """The path of the data file."""
        return self.directory / "gds.data"


def io_bytes(free: int, bandwidth: float) -> int:
    """A size that a sample of half a second moves about twice, in whole requests."""
    wanted = min(LARGEST, int(free * 0.1))
    if bandwidth:
        wanted = min(wanted, max(SMALLEST, int(bandwidth / 4)))
    return wanted // TASK * TASK
