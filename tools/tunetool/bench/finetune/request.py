"""The request of a fine-tune: model and data, ranks, settings."""

from __future__ import annotations

from dataclasses import dataclass, field

from tunetool.measure.session import Run
from tunetool.training.settings import TrainingRequest

KIND = "bench.finetune"


@dataclass(frozen=True)
class Request(TrainingRequest):
    """The options of the call."""

    prepare_only: bool = False
    """Only make model and data; a record is then kept only after an error."""
    run: Run = field(default_factory=Run)
