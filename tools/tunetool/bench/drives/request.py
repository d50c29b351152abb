"""The request of `bench drives`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tunetool.bench.defaults import CHECKPOINT_ROUNDS, DRIVES_SECONDS, VIRTUAL_BYTES
from tunetool.measure.session import Run
from tunetool.node.units import parse_size

KIND = "bench.drives"


@dataclass(frozen=True)
class Request:
    """The options of the call. Exactly one of: ``target`` alone, ``serials``, ``virtual`` with ``target``."""

    target: Path | None = None
    """A directory of a standing file system; with ``virtual``, where the files of the virtual drives are made."""
    serials: Sequence[str] = ()
    """Of blank drives, which get file systems."""
    virtual: int = 0
    """Number of virtual drives: loop devices over files of this run."""
    virtual_bytes: int = parse_size(VIRTUAL_BYTES)
    """Of each of these files, which is sparse."""
    layouts: Sequence[str] = ()
    """Names of ``layouts.LAYOUTS``; empty: ``layouts.DEFAULT``."""
    counts: Sequence[int] = ()
    """Numbers of drives; empty: 1, 2, 4, 8 ... and all."""
    bytes_per_drive: int | None = None
    """Of the run's files; None: as ``preflight`` decides."""
    engines: Sequence[str] = ("*",)
    duration: float = DRIVES_SECONDS
    """Seconds of a sample."""
    rounds: int = CHECKPOINT_ROUNDS
    seed: int = 0
    python: Path = Path(sys.executable)
    run: Run = field(default_factory=Run)
