"""Loads a model's weights from safetensors files directly to the device, with parallel reads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tunetool.checkpoint.archive import Plain
from tunetool.checkpoint.fetch import Fetch, Want, plan_reads
from tunetool.checkpoint.source import Files
from tunetool.checkpoint.writer import BUFFER_BYTES, default_threads
from tunetool.errors import UsageProblem
from tunetool.loading.safetensors_files import Stored, stored

Rename = Callable[[str], str]


def load_parallel(
    model_class: Any, directory: Path, device: torch.device, dtype: torch.dtype, rename: Rename
) -> tuple[Any, str]:
    """A model of the transformers class ``model_class`` with the weights in ``directory`` on ``device``, and a text
    that describes how it was read.

    ``rename`` maps the names of parameters and of stored tensors to a common name by which they are matched. Raises
    ``UsageProblem`` if the files do not fit the model.
    """
    config = model_class.config_class.from_pretrained(directory)
    with _parameters_on_meta():
        model = model_class._from_config(config, dtype=dtype)
    _give_memory(model, device)
    # Whichever version has tied them by now.
    model.tie_weights()
    by_name = {tensor.name: tensor for tensor in stored(directory)}
    threads, files = default_threads(), Files(directory)
    # With O_DIRECT every rank reads the drives; several ranks of one node should share the page cache instead.
    files.direct = files.direct and int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1) == 1
    try:
        reads = plan_reads(_wants(model, by_name, directory, rename), files, BUFFER_BYTES)
        Fetch(files, device, threads, BUFFER_BYTES).run(reads)
    finally:
        files.close()
    model.eval()
    cache_use = "O_DIRECT" if files.direct else "page cache"
    return model, f"{min(threads, len(reads))} threads, {cache_use}, buffers of {BUFFER_BYTES >> 20} MiB"


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules created in this context have parameters without memory, but buffers with memory.

    Not ``torch.device("meta")``, which would lose computed values that no file stores, such as rotary frequencies.
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
    """Allocate every parameter on ``device`` (tied ones once), and move the buffers there."""
    if device.type == "cuda":
        # One block that torch's allocator keeps and cuts up: asking the driver for each tensor takes longer.
        torch.empty(
            sum(
                parameter_on_meta.numel() * parameter_on_meta.element_size() for parameter_on_meta in model.parameters()
            ),
            dtype=torch.uint8,
            device=device,
        )
    replaced: dict[Any, Any] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            replacement = replaced.get(parameter)
            if replacement is None:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                replacement = replaced[parameter] = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)
            module._parameters[name] = replacement
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = buffer.to(device)


def _wants(model: Any, by_name: dict[str, Stored], directory: Path, rename: Rename) -> list[Want]:
    published = {rename(name): tensor for name, tensor in by_name.items()}
    wants = []
    # Tied ones are listed once.
    for name, parameter in model.named_parameters():
        tensor = by_name.get(name) or published.get(rename(name))
        if tensor is None or tensor.shape != tuple(parameter.shape):
            mismatch = "no file holds it" if tensor is None else f"`{tensor.file}` holds it with {list(tensor.shape)}"
            raise UsageProblem(
                f"`{directory}`: the model has `{name}` of shape {list(parameter.shape)}, and {mismatch}",
                "use `--loader transformers`, which supports more names of tensors",
            )
        plain = Plain(0, tensor.length, tensor.dtype, tensor.shape, None)
        none = (0,) * len(tensor.shape)
        target = parameter.detach()
        wants.append(Want(name, tensor.file, tensor.start, plain, none, tensor.shape, target))
    return wants
