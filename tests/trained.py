"""Trains a small model by a ds_config, with real DeepSpeed on this machine's processors."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunetool.bench.offload.training import Training, losses_of
from tunetool.measure.aio import Probe

STEPS, TOKENS, RANKS = 4, 64, 2
OFFLOADS = ("offload_optimizer", "offload_param")


@dataclass
class Trained:
    """The result of a few steps."""

    losses: list[float] = field(default_factory=list)
    """Mean over the ranks, of each step; of a configuration without an optimizer, of each forward pass."""
    swapped: dict[str, int] = field(default_factory=dict)
    """Bytes of the swap files by folder, relative to the target, while they are there."""


def train(config: Path, ready: Probe, model: str = "llama-tiny") -> Trained:
    """By the configuration in a file. Raises ``RankFailed``."""
    return _train(json.loads(config.read_text()), ready, model)


def train_without_offload(config: Path, ready: Probe, model: str = "llama-tiny") -> Trained:
    """The same from the same seed, with nothing offloaded. Raises ``RankFailed``."""
    document = json.loads(config.read_text())
    for name in OFFLOADS:
        document["zero_optimization"].pop(name, None)
    if "optimizer" in document:
        document["optimizer"]["params"]["torch_adam"] = True
    return _train(document, ready, model)


def _train(document: Mapping[str, Any], ready: Probe, model: str) -> Trained:
    trained = Trained()
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    with Training("training", RANKS, ready, environment) as training:
        training.start(document, model, TOKENS)
        for _ in range(STEPS):
            trained.losses.append(losses_of(training.step("")))
        for root in _roots(document):
            for path in root.glob("zero_stage_3/**/*.swp"):
                name = str(path.parent.relative_to(root))
                trained.swapped[name] = trained.swapped.get(name, 0) + path.stat().st_size
        training.end()
    return trained


def _roots(document: Mapping[str, Any]) -> set[Path]:
    blocks = [document["zero_optimization"].get(name, {}) for name in OFFLOADS]
    return {Path(block["nvme_path"]) for block in blocks if "nvme_path" in block}
