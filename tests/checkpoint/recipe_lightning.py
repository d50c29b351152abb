"""One rank of Lightning under FSDP2 with the recipe of the guide. ``argv``: the guide, a folder, the step at whose end
every rank is killed (0: none). Its last line has the results as JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DistributedSampler

from tunetool.checkpoint import latest

guide, folder, killed = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
(recipe,) = re.findall(r"\n## Lightning\n.*?```python\n(.*?)```", guide.read_text(), re.DOTALL)
told: dict[str, Any] = {}
exec(compile(recipe, str(guide), "exec"), told)
losses: list[float] = []


class Batches:
    """Lightning sets the epoch of the sampler, and saves and restores the place in it. Each batch has random noise."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data, self.sampler, self.used = data, DistributedSampler(data), 0  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.sampler) // 4

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = list(self.sampler)
        self.used %= len(self)
        while self.used < len(self):
            batch = self.data[order[4 * self.used : 4 * self.used + 4]]
            self.used += 1
            yield batch + torch.rand_like(batch)

    def state_dict(self) -> dict[str, int]:
        return {"used": self.used}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.used = state["used"]


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(16, 33), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(33, 16)
        )

    def configure_model(self) -> None:
        for layer in self.layers:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss = (self.layers(batch) - batch).square().mean()
        losses.append(loss.item())
        return loss


class Killed(pl.Callback):
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if killed and trainer.global_step == killed:
            strategy.saver.wait()
            os.kill(os.getpid(), signal.SIGKILL)


torch.manual_seed(0)
model = Model()
torch.manual_seed(100 + int(os.environ["RANK"]))
torch.distributed.init_process_group("gloo")
loader = Batches(torch.rand(24, 16, generator=torch.Generator().manual_seed(5)))  # three batches an epoch on each rank
scratch, bulk = folder / "scratch", folder / "bulk"
strategy = told["DirectStrategy"](scratch, bulk, data_parallel_size=2, tensor_parallel_size=1)
trainer = pl.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=strategy,
    max_steps=7,
    callbacks=[ModelCheckpoint(every_n_train_steps=2), Killed()],
    default_root_dir=folder / "out",
    logger=False,
    enable_progress_bar=False,
)
found = latest([scratch, bulk])
with strategy.saver:
    trainer.fit(model, loader, ckpt_path=found and found.path)
digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.full_tensor().detach().numpy().tobytes())
for state in trainer.optimizers[0].state.values():
    for moment in ("exp_avg", "exp_avg_sq"):
        digest.update(state[moment].full_tensor().numpy().tobytes())
result = {
    "from": found and str(found.path.relative_to(folder)),
    "losses": losses,
    "rate": trainer.optimizers[0].param_groups[0]["lr"],
    "epoch": trainer.current_epoch,
    "digest": digest.hexdigest(),
}
print(json.dumps(result))
