"""Defaults of the benchmarks. Quick to import, so that help texts can show them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CHECKPOINT_ROUNDS = 6
"""Fewest rounds whose range contains the median with 95 % (see ``measure.statistics``)."""
STAGING_ROUNDS = 3
STRATEGIES_ROUNDS = 2
"""The last two with ``--thorough``."""
CHECKPOINT_ENGINES = ("direct", "direct-async", "torch-save-zip", "dcp-t1-single", "deepspeed-fast-legacy")
"""Of a call that does not say which: ours, what frameworks do unless they are told otherwise, the fastest other."""
LOADING_ENGINES = ("direct", "instanttensor", "safetensors")
DATASET_ENGINES = ("mmap-sequential", "mmap-shuffled", "direct-shuffled", "gpu-direct", "files-*", "tar-*")
DRIVES_ENGINES = ("fio-libaio", "deepspeed-*")
STRATEGIES_STEPS = 8
NETWORK_SECONDS = 12
MATRIX = "1x1:z2,1x8:z2,2x8:z2,2x8:z3,1x8:z3"
"""Nodes x GPUs of a node : ZeRO stage. One GPU, one node, two nodes; the last shows whether it was the network between
the nodes."""
CHECKPOINT_MODEL = "phi3-mini"
STATE_BYTES = "8GB"
"""Of a checkpoint in ``bench reference``."""
EXPERT_BYTES, EXPERTS, EXPERT_THREADS, TOP_K = "19MB", 64, 8, 8
"""Of ``bench experts``: an expert of Qwen3-235B-A22B in FP8 has 18.9 MB (3 x 4,096 x 1,536), and a token wants 8."""
OFFLOAD_TOKENS = 512
"""Of a sequence in ``bench offload``."""
INFERENCE_MODEL, INFERENCE_BATCH, INFERENCE_PROMPT, INFERENCE_TOKENS = "70b", 96, 512, 32
"""Of ``bench inference``: as DeepSpeed published ZeRO-Inference of LLAMA-3-70B."""
INFERENCE_ROUNDS = 3
"""A round of a model that lies on drives takes minutes."""
SGLANG_BATCH = 128
"""Prompts of SGLang's offline benchmark, as DeepSpeed published it."""
SHM = "/dev/shm"
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "qwen2.5-vl-7b-lora": {"model": "7b", "images": 2000, "epochs": 10, "batch_size": 2}
}
"""A published comparison of /dev/shm with bulk storage, as a fine-tune."""
DRIVES_SECONDS = 2.0
VIRTUAL_BYTES = "1GiB"
"""Of ``bench drives``: a sample, and a virtual drive."""
KV_ENGINES = ("direct", "page-cache", "gds", "lmcache", "vllm")
KV_BYTES, KV_BLOCK_TOKENS, KV_PREFIXES = "4GB", 256, "1024,4096"
"""Of ``bench kv-cache``: a store; LMCache's chunk; prefixes whose time is measured apart."""
