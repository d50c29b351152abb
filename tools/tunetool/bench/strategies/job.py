"""Computes the traffic of each step from a model's configuration and the ranks' ds_config. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunetool.advise.communication import Backend, Zero
from tunetool.advise.modules import in_full, modules_of, with_lora
from tunetool.advise.qwen2_5_vl import LORA_TARGETS, is_tied, tensors
from tunetool.bench.strategies.predict import Job
from tunetool.training.trainers.deepspeed_config import ds_config
from tunetool.training.workload import Workload

_STAGES = range(4)
_DEFAULTS = Zero(0)


def job(workload: Workload, configuration: Mapping[str, Any], cuda: bool) -> Job:
    """What is trained, and DeepSpeed's settings at each stage."""
    shapes = tensors(configuration, f"{workload.model}/config.json")
    parts = in_full(shapes) if workload.full else with_lora(shapes, workload.lora_rank, LORA_TARGETS)
    backend: Backend = "nccl" if cuda else "gloo"
    settings = {stage: zero(stage, workload, cuda) for stage in _STAGES}
    return Job(modules_of(parts, is_tied(configuration)), settings, 2 if cuda else 4, backend)


def zero(stage: int, workload: Workload, cuda: bool) -> Zero:
    """The settings of the ds_config that decide about traffic; DeepSpeed's defaults where it has none."""
    config = ds_config(Workload(**{**workload.__dict__, "zero_stage": stage}), 1, cuda)
    zero_config = config["zero_optimization"]
    return Zero(
        stage=stage,
        reduce_bucket=int(zero_config.get("reduce_bucket_size", _DEFAULTS.reduce_bucket)),
        prefetch_bucket=int(zero_config.get("stage3_prefetch_bucket_size", _DEFAULTS.prefetch_bucket)),
        persistence=int(zero_config.get("stage3_param_persistence_threshold", _DEFAULTS.persistence)),
        live=int(zero_config.get("stage3_max_live_parameters", _DEFAULTS.live)),
        reuse=int(zero_config.get("stage3_max_reuse_distance", _DEFAULTS.reuse)),
        clip=bool(config.get("gradient_clipping")),
        overlap=bool(zero_config.get("overlap_comm", stage == 3)),
    )
