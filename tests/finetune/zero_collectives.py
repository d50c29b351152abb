"""One rank that counts DeepSpeed's real collectives. Rank 0 prints a line of JSON for each case.

Arguments: a directory with config.json, then cases: ``STAGE:lora|full:PREFETCH:LIVE:REUSE``.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import peft
import torch
from transformers import AutoConfig, Qwen2_5_VLForConditionalGeneration

from tunetool.advise.qwen2_5_vl import LORA_TARGETS
from tunetool.training.trainers.deepspeed_config import ds_config
from tunetool.training.workload import Workload

_NAMES = {"all_reduce": "all_reduce", "all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}
_STEPS = 4
"""Number of steps: stage 3 learns the order of modules in the first two."""


def count(calls: list[tuple[str, int]]) -> None:
    """Note every collective of DeepSpeed's: its kind, and the bytes of the whole vector."""
    backend: Any = importlib.import_module("deepspeed.comm.torch").TorchBackend

    def noted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *given: Any, **named: Any) -> Any:
            tensors = [each for each in [*given, *named.values()] if isinstance(each, torch.Tensor)]
            calls.append((_NAMES.get(name, name), max(each.numel() * each.element_size() for each in tensors)))
            return original(self, *given, **named)

        return call

    for name in (*_NAMES, "broadcast", "reduce", "all_gather", "reduce_scatter"):
        setattr(backend, name, noted(name, getattr(backend, name)))


def run(directory: Path, case: str, calls: list[tuple[str, int]]) -> dict[str, Any]:
    stage, tuning, prefetch, live, reuse = case.split(":")
    torch.manual_seed(0)
    model: Any = Qwen2_5_VLForConditionalGeneration(AutoConfig.from_pretrained(directory)).float()
    if tuning == "lora":
        settings = peft.LoraConfig(r=8, target_modules=LORA_TARGETS, task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, settings, autocast_adapter_dtype=False)
    workload = Workload(model=str(directory), dataset="", zero_stage=int(stage), full=tuning == "full", batch_size=1)
    config = ds_config(workload, int(os.environ["WORLD_SIZE"]), cuda=False)
    if stage == "3":
        config["zero_optimization"] |= {
            "stage3_prefetch_bucket_size": int(prefetch),
            "stage3_max_live_parameters": int(live),
            "stage3_max_reuse_distance": int(reuse),
        }
    trained = [each for each in model.parameters() if each.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(trained), config=config)
    image = json.loads((directory / "config.json").read_text())
    tokens = torch.randint(0, 255, (1, 24))
    tokens[0, 1], tokens[0, 2:6] = image["vision_start_token_id"], image["image_token_id"]
    batch = {
        "input_ids": tokens,
        "labels": tokens.clone(),
        "attention_mask": torch.ones_like(tokens),
        "pixel_values": torch.randn(16, 3 * 2 * 14 * 14),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": (tokens == image["image_token_id"]).long(),
    }
    for _ in range(_STEPS):
        calls.clear()
        engine.backward(engine(**batch).loss)
        engine.step()
    counted = {"case": case, "calls": list(calls)}
    engine.destroy()
    return counted


def main() -> None:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    calls: list[tuple[str, int]] = []
    deepspeed.init_distributed("gloo", verbose=False)
    count(calls)
    for case in sys.argv[2:]:
        counted = run(Path(sys.argv[1]), case, calls)
        if os.environ["RANK"] == "0":
            with Path(os.environ["TUNETOOL_COUNTED"]).open("a") as stream:
                stream.write(json.dumps(counted) + "\n")
    # A rank that ended with its communicator open was once aborted (SIGABRT).
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
