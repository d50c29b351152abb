"""Loads a model of transformers from safetensors files directly to the device, with parallel reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tunetool.errors import UsageProblem
from tunetool.loading.fill import BUFFER_BYTES, loading_threads
from tunetool.loading.module_weights import DoesNotFit, Rename
from tunetool.loading.weights import load_into


def load_parallel(
    model_class: Any, directory: Path, device: torch.device, dtype: torch.dtype, rename: Rename
) -> tuple[Any, str]:
    """A model of the transformers class ``model_class`` with the weights in ``directory`` on ``device``, and a text
    that describes how it was read.

    ``rename`` maps the names of parameters and of stored tensors to a common name by which they are matched. Raises
    ``UsageProblem`` if the files do not fit the model.
    """
    config = model_class.config_class.from_pretrained(directory)
    with parameters_on_meta():
        model = model_class._from_config(config, dtype=dtype)
    # Whichever version has tied them by now.
    model.tie_weights()
    try:
        came = load_into(model, directory, device, rename=rename, ignore_unused=True)
    except DoesNotFit as error:
        raise UsageProblem(
            error.message, "`tunetool bench finetune --loader transformers` supports more names of tensors"
        ) from None
    model.eval()
    how = f"up to {loading_threads()} threads, buffers of {BUFFER_BYTES >> 20} MiB"
    return model, f"{how}, {came.source}" if came.source else how


@contextmanager
def parameters_on_meta() -> Iterator[None]:
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
