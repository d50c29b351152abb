"""What Lightning is told. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tunetool.bench.finetune.workload import Workload
from tunetool.bench.finetune.zero import ds_config


@dataclass(frozen=True)
class Configuration:
    """Keyword arguments."""

    trainer: dict[str, Any]
    """Of ``lightning.pytorch.Trainer``, without the strategy."""
    strategy: dict[str, Any]
    """Of ``lightning.pytorch.strategies.DeepSpeedStrategy``, without the environment."""


def configuration(workload: Workload, world: int, local_world: int, steps: int) -> Configuration:
    """What Lightning is told, so that it does what our own loop does and nothing beside it. Pure."""
    config = ds_config(workload, world, cuda=True)
    # Lightning refuses the key and sets it itself, from accumulate_grad_batches.
    accumulate = config.pop("gradient_accumulation_steps")
    return Configuration(
        trainer={
            "accelerator": "cuda",
            "devices": local_world,
            "num_nodes": world // local_world,
            "precision": "bf16-true",
            # The plan holds every epoch's batches, dealt out already: for Lightning it is one long epoch.
            "max_epochs": 1,
            "max_steps": steps,
            "accumulate_grad_batches": accumulate,
            "use_distributed_sampler": False,
            "num_sanity_val_steps": 0,
            # Each of these would take time of its own inside the steps.
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        },
        strategy={"config": config, "exclude_frozen_parameters": not workload.full},
    )
