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

from tunetool.errors import CannotJudge
from tunetool.training.data.batches import Batch, Cost
from tunetool.training.rank.recorder import Recorder
from tunetool.training.trainers.deepspeed import Made, Trainer
from tunetool.training.trainers.deepspeed_config import ds_config
from tunetool.training.workload import Workload

_WITHOUT = "`--trainer deepspeed` runs without it, on CPUs too"


@dataclass
class LightningTrainer(Trainer):
    """One rank."""

    began: float = 0.0

    def run(self) -> None:
        """As ``Trainer.run``; raises ``CannotJudge`` where Lightning or a GPU is missing, too."""
        self._need()
        with self.recorder.phase("imports"):
            self._import()
            self._need_cuda()
            import lightning.pytorch as pl
            from lightning.pytorch.plugins.environments import TorchElasticEnvironment
            from lightning.pytorch.strategies import DeepSpeedStrategy

            from tunetool.training.data.dataset import Samples
        self._check()
        samples = Samples(Path(self.workload.dataset), Path(self.workload.model))
        plan = self._plan(len(samples))
        settings = configuration(self.workload, self.recorder.world, self.local_world, len(plan))
        # Every launcher sets torchrun's variables; left to itself Lightning would ask Slurm's for another answer.
        strategy = DeepSpeedStrategy(cluster_environment=TorchElasticEnvironment(), **settings.strategy)
        self.fit(pl.Trainer(strategy=strategy, **settings.trainer), as_module(self, len(plan)), samples, plan)

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


def as_module(rank: LightningTrainer, steps: int) -> Any:
    """The fine-tune as Lightning's module, whose hooks hand on to the rank. Imports Lightning."""
    import lightning.pytorch as pl

    class FineTune(pl.LightningModule):  # type: ignore[misc]  # the checker does not follow Lightning
        """``rank`` does the work and takes the times; ``delivery`` is set before the fit."""

        delivery: Delivery

        def setup(self, stage: str) -> None:
            """The group is there, ``deepspeed.zero.Init`` not yet: the model is loaded whole, then partitioned."""
            self.model = rank.model()

        def configure_optimizers(self) -> dict[str, Any]:
            return rank.optimizer(self.model, steps)

        def on_train_start(self) -> None:
            rank.starts()

        def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
            # Before the step: afterwards the schedule has moved on.
            self._rate = float(self.trainer.lr_scheduler_configs[0].scheduler.get_last_lr()[0])

        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            return self.model(**batch).loss

        def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
            rank.stepped(self.delivery, batch, outputs["loss"], self._rate)

        def on_train_end(self) -> None:
            rank.ends(self.trainer)

    return FineTune()
