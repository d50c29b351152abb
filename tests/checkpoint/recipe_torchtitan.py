"""One rank that does what torchtitan's trainer does, with the recipe of the guide. ``argv``: the guide, a folder, the step at
whose end every rank is killed (0: none). Its last line has the results as JSON.

The manager, the optimizer, the scheduler and the loader are torchtitan's; its trainer needs a GPU.
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

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

guide, folder, killed = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
(recipe,) = re.findall(r"\n## torchtitan\n.*?```python\n(.*?)```", guide.read_text(), re.DOTALL)
told: dict[str, Any] = {}
exec(compile(recipe, str(guide), "exec"), told)
rank = int(os.environ["RANK"])


class Samples(IterableDataset[torch.Tensor]):
    def __init__(self) -> None:
        self.used = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.used += 1
            yield torch.rand(16, generator=torch.Generator().manual_seed(1000 * rank + self.used))

    def state_dict(self) -> dict[str, int]:
        return {"used": self.used}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.used = state["used"]


class Trainer:
    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 33), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(33, 16))
for layer in (model[0], model[3], model):
    fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
torch.manual_seed(100 + rank)
group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.01})
optimizers = OptimizersContainer.Config(param_groups=[group], implementation="for-loop").build(model_parts=[model])
schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=7)
# With a generator of its own: to iterate would take one of torch's random numbers, and torchtitan does so after it loads.
loader = ParallelAwareDataloader(Samples(), rank, 2, batch_size=4, generator=torch.Generator())
trainer = Trainer()
config = told["DirectCheckpointManager"].Config(
    enable=True, folder=str(folder / "scratch"), bulk=str(folder / "bulk"), interval=2, keep_latest_k=0
)
manager = config.build(
    dataloader=loader,
    model_parts=[model],
    optimizers=optimizers,
    lr_schedulers=schedulers,
    states={"train_state": trainer},
    sd_adapter=None,
)
loaded = manager.load()
losses, batches = [], iter(loader)
while trainer.step < 7:
    trainer.step += 1
    optimizers.zero_grad()
    batch = next(batches)
    loss = (model(batch) - batch).square().mean()
    losses.append(loss.item())
    loss.backward()
    manager.maybe_wait_for_staging()
    optimizers.step()
    schedulers.step()
    manager.save(trainer.step, last_step=trainer.step == 7)
    if trainer.step == killed:
        manager.saver.wait()
        os.kill(os.getpid(), signal.SIGKILL)
manager.close()
digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.full_tensor().detach().numpy().tobytes())
    for moment in ("exp_avg", "exp_avg_sq"):
        digest.update(optimizers.optimizers[0].state[parameter][moment].full_tensor().numpy().tobytes())
result = {
    "from": str(manager.loaded.relative_to(folder)) if loaded else None,
    "losses": losses,
    "rate": schedulers.schedulers[0].get_last_lr(),
    "digest": digest.hexdigest(),
}
print(json.dumps(result))
