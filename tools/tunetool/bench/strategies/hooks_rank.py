"""One rank that times DeepSpeed's stages 2 and 3 on a small model.

``-m tunetool.bench.strategies.hooks_rank --order JSON``, started by any launcher, as the ranks of a cell are laid out.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deepspeed
import peft
import torch
import torch.distributed as dist
from transformers import AutoConfig, Qwen2_5_VLForConditionalGeneration

from tunetool.advise.precision import choose, need
from tunetool.advise.qwen2_5_vl import LORA_TARGETS
from tunetool.bench.strategies.hooks import CASES, FILE, STEPS, WARM_UP, Order, Probed, configuration, with_case
from tunetool.bench.strategies.measuring_rank import MeasuringRank
from tunetool.launch import rank as launched
from tunetool.training.rank.gpu_reading import least_of_ranks
from tunetool.training.rank.recorder import leave_answer
from tunetool.training.trainers.deepspeed_config import ds_config
from tunetool.training.workload import Workload

_TOKENS, _PATCHES = 24, 16


class Probe(MeasuringRank):
    """A rank of a group that stands."""

    def __init__(self, order: Order, local_rank: int) -> None:
        super().__init__(order.device, local_rank)
        self.order = order
        self.local_rank = local_rank
        self.precision = choose("auto", [])
        if not self.cuda:
            # It would be compiled during the run (see training.trainers.deepspeed).
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

    def run(self) -> Probed:
        """All cases."""
        deepspeed.init_distributed(dist_backend="nccl" if self.cuda else "gloo", verbose=False)
        if self.cuda:
            # As the cells compute.
            capabilities = [least_of_ranks(self.local_rank)]
            self.precision = need(choose(self.order.precision, capabilities), capabilities)
        probed = Probed({case: self._steps(case) for case in CASES})
        dist.barrier()
        dist.destroy_process_group()
        return probed

    def _steps(self, case: str) -> list[float]:
        engine = self._engine(case)
        batch = {name: tensor.to(self.device) for name, tensor in self._batch().items()}
        taken = []
        for _ in range(WARM_UP + STEPS):
            dist.barrier()
            self.synchronize()
            began = time.perf_counter()
            engine.backward(engine(**batch).loss)
            engine.step()
            self.synchronize()
            taken.append(time.perf_counter() - began)
            launched.beat()
        engine.destroy()
        slowest = torch.tensor(taken[WARM_UP:], dtype=torch.float32, device=self.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return [float(seconds) for seconds in slowest.tolist()]

    def _engine(self, case: str) -> Any:
        order = self.order
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory(prefix="tunetool-hooks-") as folder:
            (Path(folder) / "config.json").write_text(json.dumps(configuration()))
            settings = AutoConfig.from_pretrained(folder)
        model: Any = Qwen2_5_VLForConditionalGeneration(settings)
        model = model.to(device=self.device, dtype=self._dtype)
        model.config.use_cache = False
        if not order.full:
            lora = peft.LoraConfig(r=order.lora_rank, target_modules=LORA_TARGETS, task_type="CAUSAL_LM")
            model = peft.get_peft_model(model, lora, autocast_adapter_dtype=False)
        workload = Workload(
            model="",
            dataset="",
            zero_stage=CASES[case]["stage"],
            batch_size=1,
            full=order.full,
            lora_rank=order.lora_rank,
        )
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(trained, lr=1e-5, weight_decay=0.0),
            config=with_case(
                ds_config(workload, dist.get_world_size(), self.cuda, self.precision.format == "fp16"), case
            ),
        )
        engine.train()
        return engine

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.precision.dtype)
        return dtype

    def _batch(self) -> dict[str, Any]:
        """One picture of a few patches between a few tokens."""
        settings = configuration()
        vision = settings["vision_config"]
        tokens = torch.randint(0, 255, (1, _TOKENS))
        pictures = _PATCHES // vision["spatial_merge_size"] ** 2
        tokens[0, 1] = settings["vision_start_token_id"]
        tokens[0, 2 : 2 + pictures] = settings["image_token_id"]
        width = vision["in_chans"] * vision["temporal_patch_size"] * vision["patch_size"] ** 2
        pixels = torch.randn(_PATCHES, width, dtype=self._dtype)
        return {
            "input_ids": tokens,
            "labels": tokens.clone(),
            "attention_mask": torch.ones_like(tokens),
            "pixel_values": pixels,
            "image_grid_thw": torch.tensor([[1, 4, 4]]),
            "mm_token_type_ids": (tokens == settings["image_token_id"]).long(),
        }


def main(arguments: Sequence[str]) -> int:
    """Exit status as tunetool's own, with the reason in the rank's directory."""
    return leave_answer(lambda: Probe(Order(**json.loads(arguments[1])), int(os.environ["LOCAL_RANK"])).run(), FILE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
