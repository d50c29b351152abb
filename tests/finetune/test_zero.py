"""The configuration for DeepSpeed, read by DeepSpeed, which silently ignores many keys."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from calls import call
from tunetool.training.trainers.deepspeed_config import ds_config
from tunetool.training.workload import Workload

if not find_spec("deepspeed"):
    pytest.skip("DeepSpeed is not installed", allow_module_level=True)

READS = """
import json, sys
from deepspeed.runtime.config import DeepSpeedConfig
found = []
for document in json.load(sys.stdin):
    read = DeepSpeedConfig(document)
    zero = read.zero_config
    found.append({
        "batch": [read.train_batch_size, read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps],
        "bf16": bool(read.bfloat16_config.enabled),
        "clip": read.gradient_clipping,
        "stage": int(zero.stage),
        "buckets": [int(zero.reduce_bucket_size), int(zero.allgather_bucket_size)],
        "overlap": bool(zero.overlap_comm),
        "whole": int(zero.param_persistence_threshold),
        "unknown": sorted(zero.model_extra or {}),
    })
json.dump(found, sys.stdout)
"""


def test_deepspeed_reads_every_stage_as_it_is_meant() -> None:
    stages = (0, 1, 2, 3)
    documents = [ds_config(Workload("m", "d", zero_stage=stage, batch_size=3), 1, stage != 1) for stage in stages]
    done = call(sys.executable, "-W", "ignore", "-c", READS, input=json.dumps(documents))
    assert done.returncode == 0, done.stderr
    answers: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    for stage, read in zip(stages, answers, strict=True):
        assert read["stage"] == stage
        assert read["batch"] == [3, 3, 1]
        assert read["bf16"] == read["overlap"] == (stage != 1)
        assert read["clip"] == 1.0
        assert read["buckets"] == [50_000_000, 50_000_000]
        assert read["unknown"] == [], "it would be ignored"
    assert answers[3]["whole"] == 100_000
