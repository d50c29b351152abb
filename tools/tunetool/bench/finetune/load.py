"""A model from its directory onto its device: as transformers does it, or by parallel reads straight to its place."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from tunetool.bench.finetune.architecture import published_name
from tunetool.bench.finetune.models import check
from tunetool.bench.finetune.shards import Stored, stored
from tunetool.checkpoint.archive import Plain
from tunetool.checkpoint.fetch import Fetch, Want, plan_reads
from tunetool.checkpoint.source import Files
from tunetool.checkpoint.writer import BUFFER_BYTES, default_threads
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.node.units import format_size

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
        model, how = _parallel(Model, directory, place, kept)
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


def _parallel(model_class: Any, directory: Path, device: torch.device, dtype: torch.dtype) -> tuple[Any, str]:
    config = model_class.config_class.from_pretrained(directory)
    with _parameters_on_meta():
        model = model_class._from_config(config, dtype=dtype)
    _give_memory(model, device)
    # Whichever version has tied them by now.
    model.tie_weights()
    by_name = {tensor.name: tensor for tensor in stored(directory)}
    threads, files = default_threads(), Files(directory)
    # Past the page cache everyone reads the drives anew; ranks of one node had better share what one has read.
    files.direct = files.direct and int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1) == 1
    try:
        reads = plan_reads(_wants(model, by_name, directory), files, BUFFER_BYTES)
        Fetch(files, device, threads, BUFFER_BYTES).run(reads)
    finally:
        files.close()
    model.eval()
    way = "O_DIRECT" if files.direct else "page cache"
    return model, f"{min(threads, len(reads))} threads, {way}, buffers of {BUFFER_BYTES >> 20} MiB"


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules made meanwhile have parameters without memory, and buffers with it.

    Not ``torch.device("meta")``: what is computed once and stored nowhere, such as rotary frequencies, would be lost.
    """
    module = torch.nn.Module
    register = module.register_parameter

    def on_meta(self: Any, name: str, param: Any) -> None:
        if param is not None and param.device.type != "meta":
            param = torch.nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    module.register_parameter = on_meta
    try:
        yield
    finally:
        module.register_parameter = register


def _give_memory(model: Any, device: torch.device) -> None:
    """Memory for every parameter, once for tied ones; buffers move."""
    if device.type == "cuda":
        # One block that torch's allocator keeps and cuts up: asking the driver for each tensor takes longer.
        torch.empty(
            sum(each.numel() * each.element_size() for each in model.parameters()), dtype=torch.uint8, device=device
        )
    given: dict[Any, Any] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            own = given.get(parameter)
            if own is None:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                own = given[parameter] = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)
            module._parameters[name] = own
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = buffer.to(device)


def _wants(model: Any, by_name: dict[str, Stored], directory: Path) -> list[Want]:
    published = {published_name(name): tensor for name, tensor in by_name.items()}
    wants = []
    # Tied ones are listed once.
    for name, parameter in model.named_parameters():
        tensor = by_name.get(name) or published.get(published_name(name))
        if tensor is None or tensor.shape != tuple(parameter.shape):
            found = "no file holds it" if tensor is None else f"`{tensor.file}` holds it with {list(tensor.shape)}"
            raise UsageProblem(
                f"`{directory}`: the model has `{name}` of shape {list(parameter.shape)}, and {found}",
                "`--loader transformers` knows more ways to name tensors",
            )
        plain = Plain(0, tensor.length, tensor.dtype, tensor.shape, None)
        none = (0,) * len(tensor.shape)
        target = parameter.detach()
        wants.append(Want(name, tensor.file, tensor.start, plain, none, tensor.shape, target))
    return wants
