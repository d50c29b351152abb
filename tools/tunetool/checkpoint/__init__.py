"""Checkpoints written and read with O_DIRECT, past the page cache, in torch's own distributed checkpoint format.

>>> from torch.distributed import checkpoint as dcp
>>> from tunetool.checkpoint import DirectLoadPlanner, DirectReader, DirectSavePlanner, DirectWriter
>>> dcp.save(state, storage_writer=DirectWriter("/scratch/step-100"), planner=DirectSavePlanner())
>>> dcp.load(state, storage_reader=DirectReader("/scratch/step-100"), planner=DirectLoadPlanner())

torch is imported when one of these names is used for the first time.
"""

from __future__ import annotations

from typing import Any

from tunetool.lazy_names import first_use

_MODULES = {
    "DirectLoadPlanner": "load_planner",
    "DirectReader": "reader",
    "DirectSavePlanner": "planner",
    "DirectStager": "stager",
    "DirectWriter": "writer",
    "Drain": "draining",
    "Replica": "replicating",
    "Replicated": "replicating",
    "FailedSave": "saver",
    "Saved": "writer",
    "Saver": "saver",
    "agree": "agreement",
    "drain": "draining",
    "latest": "resume",
    "peer_of": "peers",
    "random_states": "random_numbers",
    "recover": "recovering",
    "release_buffers": "host_buffers",
    "replicate": "replicating",
    "saving": "pace",
    "set_random_states": "random_numbers",
    "survey": "resume",
    "switch_of": "peers",
    "verify_drained": "markers",
}
__all__ = sorted(_MODULES)  # noqa: PLE0605  names, known only to __getattr__


def __getattr__(name: str) -> Any:
    return first_use(__name__, _MODULES, name)
