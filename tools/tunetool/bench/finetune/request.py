"""What a fine-tune is asked: which model and data, on which ranks, with which settings."""

from __future__ import annotations

from dataclasses import dataclass, field

from tunetool.measure.session import Run
from tunetool.training.settings import Cluster, Material, Settings

KIND = "bench.finetune"


@dataclass(frozen=True)
class Request:
    """What the caller asked for."""

    material: Material
    cluster: Cluster = field(default_factory=Cluster)
    settings: Settings = field(default_factory=Settings)
    prepare_only: bool = False
    """Make model and data, and train nothing: then a record is kept only of what went wrong."""
    run: Run = field(default_factory=Run)
