"""One rank of the fine-tune with Lightning on a CPU. Lightning refuses CPUs: only that refusal is removed.

Lightning, DeepSpeed, the module, its hooks and their records are the real ones. `argv`: the workload, a directory.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy

from tunetool.training.data.dataset import Samples
from tunetool.training.rank.recorder import Recorder, keep_result
from tunetool.training.trainers.lightning import LightningTrainer, as_module, configuration
from tunetool.training.workload import workload_from_json


class OnCpu(DeepSpeedStrategy):
    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", 0)  # with a number, which DeepSpeed asks for

    def setup_environment(self) -> None:
        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        self.set_world_ranks()
        self._init_deepspeed_distributed()


workload = workload_from_json(sys.argv[1])
rank, local_rank, world = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
trainer = LightningTrainer(workload, Recorder(rank, local_rank, world), int(os.environ["LOCAL_WORLD_SIZE"]))
trainer._import()
trainer._choose_precision(trainer._capability())
samples = Samples(Path(workload.dataset), Path(workload.model))
plan = trainer._plan(len(samples))
settings = configuration(workload, world, trainer.local_world, len(plan))
config: dict[str, Any] = settings.strategy["config"]
config["bf16"]["enabled"] = config["zero_optimization"]["overlap_comm"] = False
strategy = OnCpu(cluster_environment=TorchElasticEnvironment(), **settings.strategy)
on_cpu = {**settings.trainer, "accelerator": "cpu", "precision": "32-true"}
trainer.fit(pl.Trainer(strategy=strategy, **on_cpu), as_module(trainer, len(plan)), samples, plan)
directory = Path(sys.argv[2]) / f"rank-{rank}"
directory.mkdir(parents=True)
keep_result(directory, trainer.recorder.result())
