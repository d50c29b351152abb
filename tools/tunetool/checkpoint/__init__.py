"""Checkpoints written and read with O_DIRECT, past the page cache, in torch's own distributed checkpoint format.

>>> from torch.distributed import checkpoint as dcp
>>> from tunetool.checkpoint import DirectReader, DirectSavePlanner, DirectWriter
>>> dcp.save(state, storage_writer=DirectWriter("/scratch/step-100"), planner=DirectSavePlanner())
>>> dcp.load(state, storage_reader=DirectReader("/scratch/step-100"))

torch is imported when one of these names is used for the first time.
"""

from __future__ import annotations

import importlib
from typing import Any

from tunetool.errors import UsageProblem

_MODULES = {
    "DirectReader": "reader",
    "DirectSavePlanner": "planner",
    "DirectStager": "stager",
    "DirectWriter": "writer",
    "Drain": "draining",
    "Saved": "writer",
    "agree": "tiers",
    "drain": "draining",
    "latest": "tiers",
    "release_buffers": "host_buffers",
    "saving": "pace",
    "survey": "tiers",
    "verify_drained": "markers",
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
