"""DeepSpeed's configuration for the fine-tune. Pure."""

from __future__ import annotations

from typing import Any

from tunetool.advise.precision import FP16
from tunetool.training.workload import Workload

BUCKET = 50_000_000
"""Elements that are reduced or gathered at once: 100 MB in bf16; DeepSpeed's default is ten times that."""
CLIP = 1.0


def ds_config(workload: Workload, world: int, cuda: bool, fp16: bool = False) -> dict[str, Any]:
    """The ds_config for ``deepspeed.initialize``: bf16 or fp16 on GPUs, fp32 on CPUs, where bf16 may be emulated.

    Stages differ in nothing but partitioning, so that the difference in their times is that of their traffic.
    """
    zero: dict[str, Any] = {
        "stage": workload.zero_stage,
        "contiguous_gradients": True,
        "overlap_comm": cuda,
        "reduce_scatter": True,
        "reduce_bucket_size": BUCKET,
        "allgather_bucket_size": BUCKET,
    }
    if workload.zero_stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": BUCKET,
            # Small tensors stay replicated: gathering norms and LoRA's factors would cost latency only.
            "stage3_param_persistence_threshold": 100_000,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    return {
        "train_micro_batch_size_per_gpu": workload.batch_size,
        "gradient_accumulation_steps": 1,
        "train_batch_size": workload.batch_size * world,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": cuda and not fp16},
        **({"fp16": dict(FP16)} if fp16 else {}),
        "zero_optimization": zero,
        # Every rank would print DeepSpeed's lines; the recorder has losses and times.
        "steps_per_print": 1_000_000_000,
        "wall_clock_breakdown": False,
    }
