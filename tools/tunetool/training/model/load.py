"""A model from its directory onto its device: as transformers does it, or by parallel reads straight to its place."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from tunetool.advise.qwen2_5_vl import published_name
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.loading.parallel import load_parallel
from tunetool.node.units import format_size
from tunetool.training.model.reference_model import check

Loader = Literal["parallel", "transformers"]


@dataclass
class Loaded:
    """``model`` is in evaluation mode, on its device. ``bytes``: of its tensors as they are stored.

    ``seconds``: from the call until every byte was on the device; transformers was imported and the device set up
    before. ``how``: for people.
    """

    model: Any
    seconds: float
    bytes: int
    how: str


def load(directory: Path, device: str, loader: Loader, dtype: str | None = None) -> Loaded:
    """The model in ``directory`` on ``device`` ("cpu", "cuda", "cuda:1").

    ``dtype``: torch's name, by default bfloat16, on a CPU float32. Raises ``UsageProblem`` for what ``check`` finds
    wrong, ``CannotJudge`` naming file and tensor where reading fails.
    """
    facts = check(directory)
    place = torch.device(device)
    if place.type == "cuda":
        if not torch.cuda.is_available():
            raise UsageProblem(f"`{device}`: torch sees no GPU", "`--device cpu`, or look at `nvidia-smi`")
        place = torch.device("cuda", torch.cuda.current_device() if place.index is None else place.index)
    kept = getattr(torch, dtype or ("bfloat16" if place.type == "cuda" else "float32"))
    # Imports, and what a process does once for its device, are no part of reading a model.
    from transformers import Qwen2_5_VLForConditionalGeneration as Model

    _finish(place)
    _need_memory(place, facts.parameters * kept.itemsize)
    started = time.perf_counter()
    if loader == "transformers":
        model = Model.from_pretrained(directory, dtype=kept).to(place)
        how = "transformers' from_pretrained, then .to(device)"
    else:
        model, how = load_parallel(Model, directory, place, kept, published_name)
    _finish(place)
    return Loaded(model, time.perf_counter() - started, facts.bytes, how)


def _need_memory(device: torch.device, count: int) -> None:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if count > free:
            raise CannotJudge(
                f"the model takes {format_size(count)}, and `{device}` has {format_size(free)} free",
                "see `nvidia-smi` for who holds the rest, or take a smaller `--model`",
            )


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.zeros(1, device=device)
        torch.cuda.synchronize(device)
