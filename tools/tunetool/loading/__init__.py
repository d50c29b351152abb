"""Weights from .safetensors files, and samples of training data, into a GPU or into host memory, at the speed of the
drives or of the copy to the GPU.

>>> from tunetool.loading import load, load_into
>>> tensors = load("/dev/shm/model", "cuda:0")
>>> load_into(module, "/dev/shm/model", "cuda:0", progress=print)
>>> for name, tensor in iterate("/dev/shm/model", "cuda:0"): ...
>>> dataset = GpuDirectDataset("/mnt/nvme_raid0/tokens.bin", 8192, dtype=torch.uint16)

torch alone is imported, when one of these names is used for the first time. The room may import ``checkpoint``, whose
reader moves the bytes, and what lies under it; it knows no model.
"""

from __future__ import annotations

from typing import Any

from tunetool.lazy_names import first_use

_MODULES = {
    "BouncingBytes": "gpu_direct",
    "DoesNotFit": "module_weights",
    "GpuDirectDataset": "gpu_direct",
    "Progress": "fill",
    "ShardPlan": "shard_plan",
    "iterate": "iteration",
    "load": "weights",
    "load_into": "weights",
    "release_buffers": "weights",
}
__all__ = sorted(_MODULES)  # noqa: PLE0605  names, known only to __getattr__


def __getattr__(name: str) -> Any:
    return first_use(__name__, _MODULES, name)
