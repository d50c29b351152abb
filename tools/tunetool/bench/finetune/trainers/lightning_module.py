"""The fine-tune as Lightning's module: hooks that hand on to the rank. Imports Lightning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl

from tunetool.bench.finetune.batches import Batch

if TYPE_CHECKING:
    from tunetool.bench.finetune.trainers.lightning import Delivery, LightningTrainer


class FineTune(pl.LightningModule):  # type: ignore[misc]  # the checker does not follow Lightning
    """``rank`` does the work and takes the times; ``delivery`` is set before the fit."""

    delivery: Delivery

    def __init__(self, rank: LightningTrainer, steps: int) -> None:
        super().__init__()
        self._rank, self._steps = rank, steps

    def setup(self, stage: str) -> None:
        """The group is there, ``deepspeed.zero.Init`` not yet: the model is loaded whole, then partitioned as ours"""
        self.model = self._rank.model()

    def configure_optimizers(self) -> dict[str, Any]:
        return self._rank.optimizer(self.model, self._steps)

    def on_train_start(self) -> None:
        self._rank.starts()

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        # Before the step: afterwards the schedule has moved on.
        self._rate = float(self.trainer.lr_scheduler_configs[0].scheduler.get_last_lr()[0])

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return self.model(**batch).loss

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        self._rank.stepped(self.delivery, batch, outputs["loss"], self._rate)

    def on_train_end(self) -> None:
        self._rank.ends(self.trainer)
