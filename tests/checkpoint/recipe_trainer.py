"""One rank of Hugging Face's Trainer under FSDP2 with the recipe of the guide. ``argv``: the guide, a folder, the step at
whose end every rank is killed (0: none). Its last line has the results as JSON.

accelerate refuses FSDP on CPUs: only that refusal is removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

guide, folder, killed = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
(recipe,) = re.findall(r"\n## Hugging Face Trainer\n.*?```python\n(.*?)```", guide.read_text(), re.DOTALL)
told: dict[str, Any] = {}
exec(compile(recipe, str(guide), "exec"), told)


class Killed(TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == killed:
            trainer.saver.wait()
            # A peer's is to be whole: what a node that is lost with its last save resumes from.
            while (replica := trainer.saver.replica) and "step_4" not in str(replica.wait(check=True).path):
                time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)


args = TrainingArguments(
    output_dir=str(folder / "out"),
    use_cpu=True,
    max_steps=7,
    save_steps=2,
    logging_steps=1,
    per_device_train_batch_size=2,
    report_to=[],
    disable_tqdm=True,
    fsdp=True,
    fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
)
assert args.device.type == "cpu"  # after this, the state is that of its ranks
PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
torch.manual_seed(0)
sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(num_key_value_heads=4, attention_dropout=0.1, **sizes))
tokens = torch.randint(97, (64, 16), generator=torch.Generator().manual_seed(5))
data = [{"input_ids": each, "labels": each} for each in tokens]
trainer = told["DirectTrainer"](model=model, args=args, train_dataset=data, callbacks=[Killed()])
trainer.resume(Path(os.environ.get("SCRATCH", folder / "scratch")), folder / "bulk")
digest = hashlib.sha256()
for parameter in trainer.model.parameters():
    digest.update(parameter.full_tensor().detach().numpy().tobytes())
for state in trainer.optimizer.state.values():
    for moment in ("exp_avg", "exp_avg_sq"):
        digest.update(state[moment].full_tensor().numpy().tobytes())
result = {
    "from": getattr(trainer, "loaded", None) and "/".join(trainer.loaded.parts[-2:]),
    "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    "digest": digest.hexdigest(),
}
print(json.dumps(result))
