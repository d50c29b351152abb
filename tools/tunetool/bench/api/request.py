"""The request of `bench api`."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from tunetool.bench.defaults import CHECKPOINT_ROUNDS
from tunetool.measure.session import Run

KIND = "bench.api"


@dataclass(frozen=True)
class Request:
    """The options of the call."""

    target: Path
    io_bytes: int | None = None
    """Of the file whose transfers are timed; None: as large as space and memory allow, 1 GiB at most."""
    parallelism: int | None = None
    """Threads of one operation of the parallel handle; None: by the number of cores."""
    pending: int = 4
    """Operations that are in flight at once in the asynchronous rows."""
    samples: int = CHECKPOINT_ROUNDS
    """Of each figure."""
    python: Path = Path(sys.executable)
    run: Run = field(default_factory=Run)
