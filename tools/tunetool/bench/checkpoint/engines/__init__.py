"""Every engine of the benchmark by its name. Importing this imports neither torch nor any engine's library."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, cast

from tunetool.bench.checkpoint.engines.base import Engine, Factory

DCP_THREADS = (1, 2, 4, 8, 16)
REFERENCE = "torch-save-zip"
"""``torch.save`` with its defaults; the other engines are compared with it."""
ASYNCHRONOUS = ("dcp-async-thread", "dcp-async-process", "nvidia-resiliency-ext", "orbax-async", "direct-async")
"""Engines that keep a copy of the state in host memory."""


def _made_by(module: str, kind: str, *arguments: Any) -> Factory:
    def make() -> Engine:
        imported = importlib.import_module(f"{__name__}.{module}")
        return cast(Engine, getattr(imported, kind)(*arguments))

    return make


def _engines() -> Mapping[str, Factory]:
    dcp = {
        f"dcp-t{threads}-{'single' if single else 'multi'}": _made_by("dcp", "Dcp", threads, single)
        for threads in DCP_THREADS
        for single in (True, False)
    }
    return {
        "torch-save-zip": _made_by("torch_save", "TorchSave", True),
        "torch-save-legacy": _made_by("torch_save", "TorchSave", False),
        "safetensors": _made_by("safe", "Safetensors"),
        **dcp,
        "dcp-async-thread": _made_by("dcp_async", "DcpAsync", "thread"),
        "dcp-async-process": _made_by("dcp_async", "DcpAsync", "process"),
        "nvidia-resiliency-ext": _made_by("nvidia_resiliency", "NvidiaResiliency"),
        "fsdp-sharded": _made_by("fsdp", "FsdpSharded"),
        "fsdp-consolidated": _made_by("fsdp", "FsdpConsolidated"),
        "fsdp2-dcp": _made_by("fsdp2", "Fsdp2Dcp"),
        "fsdp2-direct": _made_by("fsdp2", "Fsdp2Direct"),
        "fsdp2-consolidated": _made_by("fsdp2", "Fsdp2Consolidated"),
        "deepspeed-torch": _made_by("deepspeed_engine", "DeepSpeedTorch"),
        "deepspeed-fast-zip": _made_by("deepspeed_fast", "FastFile", True),
        "deepspeed-fast-legacy": _made_by("deepspeed_fast", "FastFile", False),
        "megatron-dist": _made_by("megatron_dist", "MegatronDist"),
        "orbax": _made_by("orbax_engine", "Orbax"),
        "orbax-async": _made_by("orbax_engine", "OrbaxAsync"),
        "direct": _made_by("direct", "Direct"),
        "direct-async": _made_by("direct", "DirectAsync"),
        "direct-gds": _made_by("direct", "DirectGds"),
    }


ENGINES: Mapping[str, Factory] = _engines()
