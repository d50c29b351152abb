"""The same fine-tune with PyTorch Lightning's DeepSpeed strategy; model, data, optimizer and figures are tunetool's.

The strategy runs on CUDA only. Lightning's extra requires deepspeed < 0.17, but Lightning does not check it; both
versions are in every result.
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

from tunetool.advise.precision import Format, choose
from tunetool.errors import CannotJudge
from tunetool.origin import install_hint
from tunetool.training.data.batches import Batch, Cost
from tunetool.training.rank.recorder import Recorder
from tunetool.training.trainers.deepspeed import Made, Trainer, lowest_scale_named
from tunetool.training.trainers.deepspeed_config import ds_config
from tunetool.training.workload import Workload

_WITHOUT = "`--trainer deepspeed` needs neither Lightning nor a GPU"


@dataclass
class LightningTrainer(Trainer):
    """The training of one rank with Lightning."""

    began: float = 0.0

    def run(self) -> None:
        """As ``Trainer.run``; also raises ``CannotJudge`` where Lightning or a GPU is missing."""
        self._need()
        with self.recorder.phase("imports"):
            self._import()
            self._need_cuda()
            import lightning.pytorch as pl
            from lightning.pytorch.plugins.environments import TorchElasticEnvironment
            from lightning.pytorch.strategies import DeepSpeedStrategy

            from tunetool.training.data.dataset import Samples
        self._check()
        # Lightning takes the format before the ranks have met: ``model`` holds it against the others'.
        self._choose_precision(self._capability())
        samples = Samples(Path(self.workload.dataset), Path(self.workload.model), self.workload.entry)
        plan = self._plan(len(samples))
        settings = configuration(self.workload, self.recorder.world, self.local_world, len(plan), self.precision.format)
        # Every launcher sets torchrun's variables; by default Lightning would use Slurm's, which differ.
        strategy = DeepSpeedStrategy(cluster_environment=TorchElasticEnvironment(), **settings.strategy)
        self.fit(pl.Trainer(strategy=strategy, **settings.trainer), as_module(self, len(plan)), samples, plan)

    def fit(self, trainer: Any, module: Any, samples: Any, plan: Sequence[Sequence[int]]) -> None:
        """Run ``trainer.fit``; the hooks of ``module`` call the methods below."""
        import torch

        if self.cuda:
            torch.cuda.set_device(self.recorder.local_rank)
            self.recorder.device = torch.cuda.get_device_name()
        delivery = Delivery(self._batches(samples, plan), len(plan))
        module.delivery = delivery
        self.began = time.monotonic()
        try:
            with lowest_scale_named():
                trainer.fit(module, train_dataloaders=delivery)
        finally:
            delivery.close()
        if delivery.count != len(plan):
            raise CannotJudge(f"rank {self.recorder.rank} made {delivery.count} of {len(plan)} steps")

    def model(self) -> Any:
        """Run the first collective and load the model to this rank's device; called when the process group exists."""
        import torch

        torch.distributed.all_reduce(torch.ones(1, device=self._device))
        self._synchronize()
        self._need_one_precision()
        self._mark("communicator")
        if self.workload.cold:
            self.drop()
        model = self._load()
        self.began = time.monotonic()
        return model

    def optimizer(self, model: Any, steps: int) -> dict[str, Any]:
        """The optimizer and its schedule in Lightning's format."""
        optimizer, schedule = self._optimizer(model, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def starts(self) -> None:
        """Record the end of the engine's start-up; called before the first step."""
        self._synchronize()
        self._mark("engine")

    def stepped(self, delivery: Delivery, batch: Batch, loss: Any, rate: float, skipped: bool) -> None:
        """Record a step; called when Lightning has finished a batch. ``skipped``: without its update."""
        self._synchronize()
        took = time.monotonic() - delivery.at
        self.recorder.count("data", delivery.cost.read)
        tokens, images = int(batch["attention_mask"].sum()), len(batch.get("image_grid_thw", ()))
        rank_loss = float(loss.item())
        waited, made = delivery.waited, delivery.cost.seconds
        self.recorder.step(waited, made, took, rank_loss, rate, tokens, images, skipped=skipped)

    def ends(self, trainer: Any) -> None:
        """Save the checkpoint; called after the last step, while the engine still exists."""
        if self.workload.checkpoint is not None:
            by_lightning = SimpleNamespace(save_checkpoint=lambda path, **_: trainer.save_checkpoint(path))
            self._save(by_lightning, Path(self.workload.checkpoint))

    def _need(self) -> None:
        if self.workload.device == "cpu":
            raise _no_gpu()
        if importlib.util.find_spec("lightning") is None:
            raise CannotJudge(
                f"Lightning is not installed in `{sys.executable}`", f"{install_hint('lightning')}; {_WITHOUT}"
            )

    def _need_cuda(self) -> None:
        if not self.cuda:
            raise _no_gpu()

    def _need_one_precision(self) -> None:
        least = self._least_capability()
        if least is not None and choose(self.workload.precision, [least]).format != self.precision.format:
            raise CannotJudge(
                f"rank {self.recorder.rank} would train in {self.precision}, but another rank's GPU has no bf16",
                "Lightning needs one format for all ranks: `--precision fp16`",
            )

    def _mark(self, phase: str) -> None:
        now = time.monotonic()
        self.recorder.seconds[phase] = now - self.began
        self.recorder.beat()
        self.began = now


class Delivery:
    """An iterator over the batches for Lightning, without their costs, which it keeps as attributes."""

    def __init__(self, made: Made, steps: int) -> None:
        self._made, self._steps = made, steps
        self.count = 0
        self.waited = self.at = 0.0
        """Seconds of the wait for the last batch, and the monotonic time when it arrived."""
        self.cost: Cost

    def __len__(self) -> int:
        # With a length Lightning prefetches no batch, so that a wait belongs to the batch that follows.
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
    return CannotJudge("Lightning's DeepSpeed strategy runs on CUDA only, but this rank has no GPU", _WITHOUT)


def train(workload: Workload, recorder: Recorder) -> None:
    """Train one rank with Lightning; the worker's entry point."""
    LightningTrainer(workload, recorder, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))).run()


@dataclass(frozen=True)
class Configuration:
    """Keyword arguments for Lightning's classes."""

    trainer: dict[str, Any]
    """Arguments of ``lightning.pytorch.Trainer``, without the strategy."""
    strategy: dict[str, Any]
    """Arguments of ``lightning.pytorch.strategies.DeepSpeedStrategy``, without the environment."""


def configuration(
    workload: Workload, world: int, local_world: int, steps: int, precision: Format = "bf16"
) -> Configuration:
    """The configuration with which Lightning does the same as ``Trainer`` and nothing else. Pure."""
    config = ds_config(workload, world, cuda=True, fp16=precision == "fp16")
    # Lightning refuses the key and sets it itself, from accumulate_grad_batches.
    accumulate = config.pop("gradient_accumulation_steps")
    return Configuration(
        trainer={
            "accelerator": "cuda",
            "devices": local_world,
            "num_nodes": world // local_world,
            # DeepSpeed keeps the master weights in fp32, which Lightning calls mixed.
            "precision": "16-mixed" if precision == "fp16" else "bf16-mixed",
            # The plan has the batches of all epochs, already distributed: for Lightning it is one long epoch.
            "max_epochs": 1,
            "max_steps": steps,
            "accumulate_grad_batches": accumulate,
            "use_distributed_sampler": False,
            "num_sanity_val_steps": 0,
            # Each of these would take time within the steps.
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        },
        strategy={"config": config, "exclude_frozen_parameters": not workload.full},
    )


def as_module(rank: LightningTrainer, steps: int) -> Any:
    """The fine-tune as a LightningModule, whose hooks call the methods of ``rank``. Imports Lightning."""
    import lightning.pytorch as pl

    class FineTune(pl.LightningModule):  # type: ignore[misc]  # the checker does not follow Lightning
        """``rank`` does the work and records the times; ``delivery`` must be set before the fit."""

        delivery: Delivery

        def setup(self, stage: str) -> None:
            """Load the whole model: the process group exists, but ``deepspeed.zero.Init`` is not active yet."""
            self.model = rank.model()

        def configure_optimizers(self) -> dict[str, Any]:
            return rank.optimizer(self.model, steps)

        def on_train_start(self) -> None:
            rank.starts()

        def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
            # Before the step, since the step advances the schedule.
            self._rate = float(self.trainer.lr_scheduler_configs[0].scheduler.get_last_lr()[0])

        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            return self.model(**batch).loss

        def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
            rank.stepped(self.delivery, batch, outputs["loss"], self._rate, not self.trainer.model.was_step_applied())

        def on_train_end(self) -> None:
            rank.ends(self.trainer)

    return FineTune()
