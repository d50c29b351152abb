"""The same fine-tune by PyTorch Lightning with its DeepSpeed strategy: model, data, optimizer and figures are ours.

The strategy runs on CUDA alone. Its extra asks for deepspeed < 0.17, which Lightning itself never checks; both versions
are in every result.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tunetool.bench.finetune.batches import Batch, Cost
from tunetool.bench.finetune.loop import Made, Trainer
from tunetool.bench.finetune.recorder import Recorder
from tunetool.bench.finetune.trainers.lightning_settings import configuration
from tunetool.bench.finetune.workload import Workload
from tunetool.errors import CannotJudge

_WITHOUT = "`--trainer deepspeed` runs without it, on CPUs too"


@dataclass
class LightningTrainer(Trainer):
    """One rank."""

    began: float = 0.0

    def run(self) -> None:
        """All of it. Raises ``CannotJudge`` where Lightning or a GPU is missing, else as ``Trainer.run``."""
        self._need()
        with self.recorder.phase("imports"):
            self._import()
            self._need_cuda()
            import lightning.pytorch as pl
            from lightning.pytorch.plugins.environments import TorchElasticEnvironment
            from lightning.pytorch.strategies import DeepSpeedStrategy

            from tunetool.bench.finetune.dataset import Samples
            from tunetool.bench.finetune.trainers.lightning_module import FineTune
        self._check()
        samples = Samples(Path(self.workload.dataset), Path(self.workload.model))
        plan = self._plan(len(samples))
        settings = configuration(self.workload, self.recorder.world, self.local_world, len(plan))
        # Every launcher sets torchrun's variables; left to itself Lightning would ask Slurm's for another answer.
        strategy = DeepSpeedStrategy(cluster_environment=TorchElasticEnvironment(), **settings.strategy)
        self.fit(pl.Trainer(strategy=strategy, **settings.trainer), FineTune(self, len(plan)), samples, plan)

    def fit(self, trainer: Any, module: Any, samples: Any, plan: Sequence[Sequence[int]]) -> None:
        """``trainer.fit``, whose hooks in ``module`` call the methods below."""
        import torch

        if self.cuda:
            torch.cuda.set_device(self.recorder.local_rank)
            self.recorder.device = torch.cuda.get_device_name()
        delivery = Delivery(self._batches(samples, plan), len(plan))
        module.delivery = delivery
        self.began = time.monotonic()
        try:
            trainer.fit(module, train_dataloaders=delivery)
        finally:
            delivery.close()
        if delivery.count != len(plan):
            raise CannotJudge(f"rank {self.recorder.rank} made {delivery.count} of {len(plan)} steps")

    def model(self) -> Any:
        """Once Lightning has made the group: the first collective, and the model on this rank's device."""
        import torch

        torch.distributed.all_reduce(torch.ones(1, device=self._device))
        self._synchronize()
        self._mark("communicator")
        if self.workload.cold:
            self.drop()
        model = self._load()
        self.began = time.monotonic()
        return model

    def optimizer(self, model: Any, steps: int) -> dict[str, Any]:
        """As Lightning wants it."""
        optimizer, schedule = self._optimizer(model, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def starts(self) -> None:
        """Lightning and DeepSpeed have their engine; what follows are steps."""
        self._synchronize()
        self._mark("engine")

    def stepped(self, delivery: Delivery, batch: Batch, loss: Any, rate: float) -> None:
        """Lightning is done with a batch."""
        self._synchronize()
        took = time.monotonic() - delivery.at
        self.recorder.count("data", delivery.cost.read)
        tokens, images = int(batch["attention_mask"].sum()), len(batch.get("image_grid_thw", ()))
        own = float(loss.item())
        self.recorder.step(delivery.waited, delivery.cost.seconds, took, own, rate, tokens, images)

    def ends(self, trainer: Any) -> None:
        """After the last step, while the engine is still there."""
        if self.workload.checkpoint is not None:
            by_lightning = SimpleNamespace(save_checkpoint=lambda path, **_: trainer.save_checkpoint(path))
            self._save(by_lightning, Path(self.workload.checkpoint))

    def _need(self) -> None:
        if self.workload.device == "cpu":
            raise _no_gpu()
        if importlib.util.find_spec("lightning") is None:
            raise CannotJudge(
                f"Lightning is not installed in `{sys.executable}`", f"`pip install 'tunetool[lightning]'`; {_WITHOUT}"
            )

    def _need_cuda(self) -> None:
        if not self.cuda:
            raise _no_gpu()

    def _mark(self, phase: str) -> None:
        now = time.monotonic()
        self.recorder.seconds[phase] = now - self.began
        self.recorder.beat()
        self.began = now


class Delivery:
    """The batches as Lightning fetches them: tensors alone, what each cost beside them."""

    def __init__(self, made: Made, steps: int) -> None:
        self._made, self._steps = made, steps
        self.count = 0
        self.waited = self.at = 0.0
        """Seconds that the last one was waited for, and when it came."""
        self.cost: Cost

    def __len__(self) -> int:
        # With a length Lightning fetches no batch ahead, and a wait is that of the batch that follows.
        return self._steps

    def __iter__(self) -> Delivery:
        return self

    def __next__(self) -> Batch:
        asked = time.monotonic()
        batch, self.cost = next(self._made)
        self.at = time.monotonic()
        self.waited = self.at - asked
        self.count += 1
        return batch

    def close(self) -> None:
        """End the loading processes."""
        self._made.close()


def _no_gpu() -> CannotJudge:
    return CannotJudge("Lightning's DeepSpeed strategy runs on CUDA alone, and this rank has no GPU", _WITHOUT)


def train(workload: Workload, recorder: Recorder) -> None:
    """What the worker calls."""
    LightningTrainer(workload, recorder, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))).run()
