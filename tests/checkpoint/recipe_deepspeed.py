"""One rank of DeepSpeed in bf16 with the recipe of the guide. ``argv``: the guide, a folder, the step at whose end every
rank is killed (0: none). The variable ``ZERO_STAGE`` has the stage. Its last line has the results as JSON.
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

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from tunetool.checkpoint import Saver, drain

guide, folder, killed = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
(recipe,) = re.findall(r"\n## DeepSpeed\n.*?```python\n(.*?)```", guide.read_text(), re.DOTALL)
told: dict[str, Any] = {}
exec(compile(recipe, str(guide), "exec"), told)

rank = int(os.environ["RANK"])
# An operator for ranks that share memory. To build it takes minutes, and a build that was killed blocks all later ones.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(16, 33), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(33, 16), torch.nn.LayerNorm(16)
)
torch.manual_seed(100 + rank)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=optimizer,
    lr_scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 7),
    config={
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        # The last layer stays whole on each rank under ZeRO-3; the others are partitioned.
        "zero_optimization": {"stage": int(os.environ["ZERO_STAGE"]), "stage3_param_persistence_threshold": 33},
    },
)
scratch, bulk = folder / "scratch", folder / "bulk"
found = told["resume"](engine, [scratch, bulk])
losses = []
with Saver([scratch], on_saved=lambda step: drain(step, bulk)) as saver:
    while engine.global_steps < 7:
        generator = torch.Generator().manual_seed(10 * engine.global_steps + rank)
        batch = torch.rand(4, 16, generator=generator).bfloat16()
        loss = (engine(batch) - batch).float().square().mean()
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
        if engine.global_steps % 2 == 0:
            saver.save_async(told["everything"](engine), engine.global_steps)
        if engine.global_steps == killed:
            saver.wait()
            os.kill(os.getpid(), signal.SIGKILL)
digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(safe_get_full_fp32_param(parameter).numpy().tobytes())
    for moment in ("exp_avg", "exp_avg_sq"):
        digest.update(safe_get_full_optimizer_state(parameter, moment).numpy().tobytes())
result = {
    "from": found and str(found.path.relative_to(folder)),
    "losses": losses,
    "rate": engine.get_lr(),
    "counted": [engine.global_samples, engine.micro_steps],
    "digest": digest.hexdigest(),
}
print(json.dumps(result))
