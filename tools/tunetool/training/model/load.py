"""Load a model from its directory to its device: with transformers, or with parallel reads into the tensors."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from tunetool.advise.qwen2_5_vl import published_name
from tunetool.loading.device_memory import device_of, need_memory
from tunetool.loading.parallel import load_parallel
from tunetool.training.model.reference_model import check

Loader = Literal["parallel", "transformers"]


@dataclass
class Loaded:
    """A loaded model, in evaluation mode on its device. ``bytes``: size of its stored tensors.

    ``seconds``: from the start of loading until every byte was on the device, without the import of transformers and
    the set-up of the device. ``how``: a description for people.
    """

    model: Any
    seconds: float
    bytes: int
    how: str


def load(directory: Path, device: str, loader: Loader, dtype: str | None = None) -> Loaded:
    """Load the model in ``directory`` to ``device`` ("cpu", "cuda", "cuda:1").

    ``dtype``: torch's name of a type, by default bfloat16, on a CPU float32. Raises ``UsageProblem`` where ``check``
    refuses the directory, ``CannotJudge`` where the model does not fit or a file cannot be read.
    """
    facts = check(directory)
    target = device_of(device)
    kept = getattr(torch, dtype or ("bfloat16" if target.type == "cuda" else "float32"))
    # Imports and the set-up of the device are not part of the time.
    from transformers import Qwen2_5_VLForConditionalGeneration as Model

    _finish(target)
    need_memory(target, facts.parameters * kept.itemsize)
    started = time.perf_counter()
    if loader == "transformers":
        model = Model.from_pretrained(directory, dtype=kept).to(target)
        how = "transformers' from_pretrained, then .to(device)"
    else:
        model, how = load_parallel(Model, directory, target, kept, published_name)
    _finish(target)
    return Loaded(model, time.perf_counter() - started, facts.bytes, how)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.zeros(1, device=device)
        torch.cuda.synchronize(device)
