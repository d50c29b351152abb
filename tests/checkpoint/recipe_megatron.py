"""One rank of Megatron-core with the recipe of the guide. ``argv``: the guide, a folder, the step at whose end every
rank is killed (0: none). Its last line has the results as JSON.

What Megatron makes on a GPU is made on the CPU, and its table of a GPU's random numbers is the one that it has for
inference, without states.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from megatron.core import optimizer as optimizers
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer import TransformerConfig
from torch.overrides import TorchFunctionMode

from tunetool.checkpoint import Saver, drain

guide, folder, killed = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
(recipe,) = re.findall(r"\n## Megatron-core\n.*?```python\n(.*?)```", guide.read_text(), re.DOTALL)
told: dict[str, Any] = {}
exec(compile(recipe, str(guide), "exec"), told)


class OnTheCpu(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        if function is torch.Tensor.type and len(arguments) == 1:  # by which it looks whether a tensor is on a GPU
            return function(*arguments).replace("torch.", "torch.cuda.")
        return function(*arguments, **(options | {"device": "cpu"} if options.get("device") == "cuda" else options))


class FusedAdam(torch.optim.AdamW):
    """Its groups count the steps, like those of Apex and Transformer Engine, which are for GPUs."""

    def __init__(self, adam_w_mode: bool, **options: Any) -> None:
        super().__init__(**options)

    def __setstate__(self, state: Any) -> None:
        torch.optim.Optimizer.__setstate__(self, state)  # torch's AdamW wants each parameter's count

    def step(self, closure: Any = None) -> None:
        done = self.param_groups[0].get("step", 0)
        for states in self.state.values():
            states["step"] = torch.tensor(float(done))
        super().step(closure)
        for states in self.state.values():
            del states["step"]
        for group in self.param_groups:
            group["step"] = done + 1


torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
OnTheCpu().__enter__()
torch.distributed.init_process_group("gloo")
tensor_parallel = int(os.environ["TENSOR_PARALLEL"])  # 1: two data-parallel ranks, and the distributed optimizer
distributed = tensor_parallel == 1
parallel_state.initialize_model_parallel(tensor_parallel)
if distributed:
    optimizers.Adam, optimizers.USING_PYTORCH_OPTIMIZER = FusedAdam, False
    distrib_optimizer.Adam, distrib_optimizer.HAVE_APEX_OR_TE = FusedAdam, True
    distrib_optimizer.USING_APEX_OPTIMIZER = True
initialize_rng_tracker(inference_rng_tracker=True)
torch.manual_seed(0)
config = TransformerConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    tensor_model_parallel_size=tensor_parallel,
    use_cpu_initialization=True,
    gated_linear_unit=True,
)
model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=96, max_sequence_length=16)
parallel = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=distributed), model)

settings = OptimizerConfig(lr=0.01, min_lr=0.0, use_distributed_optimizer=distributed)
optimizer = get_megatron_optimizer(settings, [parallel])
(inner,) = optimizer.chained_optimizers
scheduler = OptimizerParamScheduler(
    optimizer,
    init_lr=0.0,
    max_lr=0.01,
    min_lr=0.0,
    lr_warmup_steps=1,
    lr_decay_steps=7,
    lr_decay_style="cosine",
    start_wd=0.01,
    end_wd=0.1,
    wd_incr_steps=7,
    wd_incr_style="linear",
)
torch.manual_seed(100)  # the same in both ranks, which drop the same of what both have
scratch, bulk = folder / "scratch", folder / "bulk"
found = told["resume"](model, optimizer, scheduler, [scratch, bulk])
losses = []
with Saver([scratch], on_saved=lambda step: drain(step, bulk)) as saver:
    for step in range(found.step + 1 if found else 1, 8):
        seed = 10 * step + parallel_state.get_data_parallel_rank()
        tokens = torch.randint(96, (4, 16), generator=torch.Generator().manual_seed(seed))
        positions = torch.arange(16).expand(4, 16)
        mask = torch.ones(1, 1, 16, 16).tril() < 0.5
        parallel.zero_grad_buffer()
        optimizer.zero_grad()
        loss = parallel(tokens, positions, mask, labels=tokens).mean()
        losses.append(loss.item())
        loss.backward()
        parallel.finish_grad_sync()
        optimizer.step()
        scheduler.step(1)
        if step % 2 == 0:
            saver.save_async(told["everything"](model, optimizer, scheduler), step)
        if step == killed:
            saver.wait()
            os.kill(os.getpid(), signal.SIGKILL)
digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.detach().numpy().tobytes())
for states in inner.optimizer.state.values():
    for moment in ("exp_avg", "exp_avg_sq"):
        digest.update(states[moment].numpy().tobytes())
result = {
    "from": found and str(found.path.relative_to(folder)),
    "losses": losses,
    "rate": optimizer.param_groups[0]["lr"],
    "digest": digest.hexdigest(),
}
print(json.dumps(result))
