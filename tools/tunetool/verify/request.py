"""What a verification is asked, and what it ends with."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tunetool.errors import ExitCode
from tunetool.measure.gds.spec import Mode
from tunetool.record import Record

Level = Literal["config", "quick", "full"]


@dataclass(frozen=True)
class Request:
    """What the caller asked for."""

    expect: Mapping[str, float] = field(default_factory=dict)
    """Bytes per second by direction, requests per second by random read; empty: the manifest's."""
    target: Path | None = None
    duration: float = 4.0
    tolerance: float = 0.0
    """Fraction of an expectation that may be missing."""
    level: Level = "quick"
    manifest: Path | None = None
    """None: the node's own, if there is one."""
    runs_dir: Path | None = None
    allow_busy: bool = False
    dry_run: bool = False
    python: Path = Path(sys.executable)
    """Whose torch and DeepSpeed the upper rungs use."""
    require: Sequence[str] = ()
    """Rungs without which there is no pass."""
    gds: Mode | None = None
    """Whether GPUDirect Storage is to be proven; None: where the manifest says that it was set up."""
    command: Sequence[str] = ()


@dataclass(frozen=True)
class Result:
    """The record, where it lies, and what the process ends with. No record for a dry run."""

    record: Record | None
    path: Path | None
    code: ExitCode
