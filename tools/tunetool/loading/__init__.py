"""Weights from .safetensors files into a GPU or into host memory, at the speed of the drives or of the copy to the GPU.

>>> from tunetool.loading import load, load_into
>>> tensors = load("/dev/shm/model", "cuda:0")
>>> load_into(module, "/dev/shm/model", "cuda:0", progress=print)

torch alone is imported, when one of these names is used for the first time. The room may import ``checkpoint``, whose
reader moves the bytes, and what lies under it; it knows no model.
"""

from __future__ import annotations

import importlib
from typing import Any

from tunetool.errors import UsageProblem

_MODULES = {
    "DoesNotFit": "module_weights",
    "Progress": "fill",
    "load": "weights",
    "load_into": "weights",
    "release_buffers": "weights",
}
__all__ = sorted(_MODULES)  # noqa: PLE0605  names, known only to __getattr__


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing == "tunetool":
            raise
        raise UsageProblem(
            f"`{name}` needs `{missing}`, which this Python does not have", "pip install 'tunetool[checkpoint]'"
        ) from error
