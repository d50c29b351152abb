"""What a fine-tune is asked: which model and data, on which ranks, with which settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tunetool.errors import ExitCode
from tunetool.record import Record
from tunetool.training.settings import Cluster, Material, Settings

KIND = "bench.finetune"


@dataclass(frozen=True)
class Request:
    """All of it."""

    material: Material
    cluster: Cluster = field(default_factory=Cluster)
    settings: Settings = field(default_factory=Settings)
    runs_dir: Path | None = None
    allow_busy: bool = False
    prepare_only: bool = False
    dry_run: bool = False
    command: Sequence[str] = ()


@dataclass(frozen=True)
class Result:
    """The record, where it lies, and what the process ends with. No record for a dry run, nor for `--prepare`."""

    record: Record | None
    path: Path | None
    code: ExitCode
