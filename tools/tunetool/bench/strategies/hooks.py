"""What DeepSpeed's hooks of ZeRO-3 cost around each module, from a short probe of a small model. Pure.

The probe times three engines on the same ranks: stage 2, stage 3 that keeps what it gathered, and stage 3 that gathers
again. What stage 3 takes beyond stage 2, less its communication, is a time for each use of a module and a time for each
gather that is started; both are the CPU's work and depend on the layout, not on the model's width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tunetool.advise.communication import Zero
from tunetool.advise.precision import Asked
from tunetool.advise.qwen2_5_vl import CONFIGURATIONS
from tunetool.advise.zero_steps import Event, events, uses
from tunetool.bench.strategies.link import Network
from tunetool.bench.strategies.matrix import Layout
from tunetool.bench.strategies.predict import Hooks, Job
from tunetool.bench.strategies.replay import compute_of, gathers

MODULE = "tunetool.bench.strategies.hooks_rank"
FILE = "hooks.json"
WARM_UP, STEPS = 3, 7
_HIDDEN, _LAYERS = 512, 3
REPLICATED, KEPT, AGAIN = "replicated", "kept", "again"
CASES: Mapping[str, Mapping[str, Any]] = {
    REPLICATED: {"stage": 2},
    KEPT: {"stage": 3},
    AGAIN: {"stage": 3, "prefetch_bucket": 300_000, "live": 600_000, "reuse": 0},
}
"""The engines, by the fields of ``Zero`` that differ from the benchmark's own."""
_KEYS = {
    "prefetch_bucket": "stage3_prefetch_bucket_size",
    "live": "stage3_max_live_parameters",
    "reuse": "stage3_max_reuse_distance",
}


@dataclass(frozen=True)
class Order:
    """What the ranks are asked to do."""

    device: str
    full: bool
    lora_rank: int
    precision: Asked = "auto"


@dataclass(frozen=True)
class Probed:
    """What a rank tells: seconds of the steps by case, the slowest rank's."""

    steps: dict[str, list[float]] = field(default_factory=dict)


def configuration() -> dict[str, Any]:
    """The small model: of the reference model's family, its matrices just too large to stay gathered."""
    tiny = CONFIGURATIONS["tiny"]
    sizes = {"hidden_size": _HIDDEN, "num_hidden_layers": _LAYERS, "num_attention_heads": 16, "num_key_value_heads": 16}
    vision = {**tiny["vision_config"], "out_hidden_size": _HIDDEN}
    return {**tiny, **sizes, "intermediate_size": 2 * _HIDDEN, "vision_config": vision}


def with_case(config: dict[str, Any], case: str) -> dict[str, Any]:
    """A ds_config of the case's stage with its other settings. In fp16 its loss scale is 1 and stays.

    A dynamic scale begins with overflows, whose steps update nothing, and more of them with one engine than another.
    """
    more = {_KEYS[name]: value for name, value in CASES[case].items() if name in _KEYS}
    scale = {"fp16": {**config["fp16"], "loss_scale": 1.0}} if "fp16" in config else {}
    return {**config, **scale, "zero_optimization": {**config["zero_optimization"], **more}}


def hooks_of(job: Job, layout: Layout, network: Network | None, steps: Mapping[str, float]) -> Hooks:
    """``job``: of the small model; ``network``: of the layout; ``steps``: seconds by case. No part is below zero."""
    computes = {case: compute_of(_events(job, case, layout), network, step) for case, step in steps.items()}
    kept, again = (max(0.0, computes[case] - computes[REPLICATED]) for case in (KEPT, AGAIN))
    used = len(uses(job.modules, recompute=False))
    few, many = (gathers(_events(job, case, Layout(1, 2))) for case in (KEPT, AGAIN))
    each = max(0.0, (again - kept) / (many - few))
    rest = kept - few * each
    if rest < 0:  # the gathers alone explain more than there is
        each = (kept + again) / (few + many)
        rest = 0.0
    return Hooks(rest / used, each)


def _events(job: Job, case: str, layout: Layout) -> list[Event]:
    given = CASES[case]
    zero: Zero = replace(job.settings[given["stage"]], **given)
    return list(events(job.modules, zero, layout.world, job.element_bytes))
