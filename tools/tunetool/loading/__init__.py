"""Weights from .safetensors files into a GPU or into host memory, at the speed of the drives or of the copy to the GPU.

>>> from tunetool.loading import load, load_into
>>> tensors = load("/dev/shm/model", "cuda:0")
>>> load_into(module, "/dev/shm/model", "cuda:0", progress=print)

torch alone is imported, when one of these names is used for the first time. The room may import ``checkpoint``, whose
reader moves the bytes, and what lies under it; it knows no model.
"""

from __future__ import annotations

from typing import Any

from tunetool.lazy_names import first_use

_MODULES = {
    "DoesNotFit": "module_weights",
    "Progress": "fill",
    "load": "weights",
    "load_into": "weights",
    "release_buffers": "weights",
}
__all__ = sorted(_MODULES)  # noqa: PLE0605  names, known only to __getattr__


def __getattr__(name: str) -> Any:
    return first_use(__name__, _MODULES, name)
