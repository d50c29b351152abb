"""What DeepSpeed makes of a configuration. Self-contained; runs under the user's Python, from 3.8.

``measure/child_server.py`` hands it the orders of ``check.py``.
"""

from __future__ import annotations

import json
from typing import Any

# Keys of the file that DeepSpeedConfig keeps unchanged in an attribute of the same name.
PLAIN = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
)


def parse(path: str, world: int) -> dict[str, Any]:
    """The file as DeepSpeed's own classes understand it, for one of ``world`` ranks."""
    import deepspeed.runtime.config as module

    # There are no other ranks: without this it would count itself as the only rank and refuse a batch for several.
    module.dist.get_rank = lambda *_, **__: 0
    module.dist.get_world_size = lambda *_, **__: world
    parsed = module.DeepSpeedConfig(path)
    keys = {key: getattr(parsed, key) for key in PLAIN}
    keys["aio"] = parsed.aio_config
    keys["zero_optimization"] = json.loads(parsed.zero_config.model_dump_json(by_alias=True))
    keys["bf16"] = {"enabled": parsed.bfloat16_config.enabled}
    keys["fp16"] = json.loads(parsed.float16_config.model_dump_json())
    keys["optimizer"] = {"type": parsed.optimizer_name, "params": parsed.optimizer_params}
    return keys


def facts() -> dict[str, Any]:
    """DeepSpeed's accelerator."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    name, capabilities = accelerator.device_name(), []
    if name == "cuda":
        import torch

        # What torch says of bf16 counts its emulation on older GPUs.
        capabilities = [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]
    return {"accelerator": name, "bf16": bool(accelerator.is_bf16_supported()), "capabilities": capabilities}


def answer(order: dict[str, Any]) -> dict[str, Any]:
    if order["do"] == "facts":
        return facts()
    try:
        return {"parsed": parse(order["path"], order["world"])}
    except Exception as error:
        return {"refused": " ".join(str(error).split()) or repr(error), "kind": type(error).__name__}
