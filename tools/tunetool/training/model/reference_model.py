"""Qwen2.5-VL in its published sizes: describe a model, build one with random weights, check that one is complete, and
load it to its device: with transformers, or with parallel reads into the tensors."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tunetool import regular_files
from tunetool.advise.qwen2_5_vl import CONFIGURATIONS, is_tied, published_name, read_configuration, tensors
from tunetool.advise.shapes import Tensor
from tunetool.errors import UsageProblem
from tunetool.loading import safetensors_files
from tunetool.stage.destination import making
from tunetool.stage.room import need_room
from tunetool.training.model import tokenizer

if TYPE_CHECKING:
    import torch

SIZES = frozenset(CONFIGURATIONS)
_SHARD_BYTES = {"tiny": 2 << 20}
SHARD_BYTES = 4 * 10**9
"""Bytes of one file of weights, as in the published models."""
MAX_PIXELS = {"tiny": 112 * 112}
PIXELS = 768 * 768
"""Pictures are scaled down to this, LLaMA-Factory's ``image_max_pixels``: one of 1928x1208 becomes 714 tokens."""


@dataclass(frozen=True)
class ModelFacts:
    """The sizes of a model by its configuration; ``bytes``: size of its stored tensors (bfloat16 by default)."""

    name: str
    parameters: int
    bytes: int
    language_parameters: int
    vision_parameters: int
    hidden: int
    layers: int
    tied: bool
    files: tuple[str, ...] = ()
    """The files with the weights; empty for a size that was not built."""


def describe(name_or_path: str | Path) -> ModelFacts:
    """The facts of one of ``SIZES``, or of the config.json in a directory, whose weights are not read.

    Raises ``UsageProblem`` where it is neither.
    """
    if str(name_or_path) in SIZES:
        return _facts(str(name_or_path), CONFIGURATIONS[str(name_or_path)], str(name_or_path))
    directory = Path(name_or_path)
    return _facts(directory.resolve().name, read_configuration(directory), str(directory / "config.json"))


def _facts(name: str, configuration: Mapping[str, Any], path: str) -> ModelFacts:
    all_tensors = tensors(configuration, path)
    parameters = sum(tensor.numel for tensor in all_tensors)
    vision = sum(tensor.numel for tensor in all_tensors if tensor.name.startswith("visual."))
    text = configuration.get("text_config") or configuration
    return ModelFacts(
        name=name,
        parameters=parameters,
        bytes=2 * parameters,
        language_parameters=parameters - vision,
        vision_parameters=vision,
        hidden=int(text["hidden_size"]),
        layers=int(text["num_hidden_layers"]),
        tied=is_tied(configuration),
    )


def check(directory: Path) -> ModelFacts:
    """The facts of a directory that holds a complete model, one built by ``build`` or one from Hugging Face.

    Reads config.json and the headers of the files, not the weights. Raises ``UsageProblem`` that names what is missing,
    truncated, or of another shape than in config.json.
    """
    configuration = read_configuration(directory)
    facts = describe(directory)
    listing = safetensors_files.list_tensors(directory)
    _require_all_tensors(directory, tensors(configuration, str(directory / "config.json")), listing.tensors.values())
    tokenizer_file = directory / tokenizer.FILE
    if not tokenizer_file.is_file():
        raise UsageProblem(f"`{tokenizer_file}` is missing", "copy or download the model again")
    regular_files.refuse_pointers(sorted(directory.glob("*.json")))
    return ModelFacts(
        **{
            **facts.__dict__,
            "bytes": listing.bytes,
            "files": tuple(dict.fromkeys(tensor.file for tensor in listing.tensors.values())),
        }
    )


def _require_all_tensors(
    directory: Path, expected: Iterable[Tensor], stored: Iterable[safetensors_files.Stored]
) -> None:
    shapes = {published_name(tensor.name): (tensor.shape, tensor.file) for tensor in stored}
    for tensor in expected:
        if tensor.name not in shapes:
            raise UsageProblem(
                f"`{directory}`: no file has the tensor `{tensor.name}`",
                "config.json and weights are of different models, or a file is missing from the index",
            )
        shape, file = shapes[tensor.name]
        if shape != tensor.shape:
            raise UsageProblem(
                f"`{directory / file}` has `{tensor.name}` with shape {list(shape)}, config.json has "
                f"{list(tensor.shape)}",
                "config.json and weights are of different models",
            )


def build(
    size: str,
    directory: Path,
    seed: int,
    shard_bytes: int | None = None,
    tick: Callable[[int], None] = lambda _: None,
) -> None:
    """Make ``directory``: config.json, random weights in bfloat16, tokenizer and image processor's settings.

    The content depends only on ``size`` and ``seed``. ``tick`` gets the bytes written so far. Raises ``UsageProblem``
    where the directory exists, ``CannotJudge`` where the model does not fit.
    """
    if size not in SIZES:
        raise UsageProblem(f"`{size}` is not a size of the reference model", "use one of `7b`, `3b`, `tiny`")
    with making(directory, "the model") as built:
        need_room(built, room(size), f"the model `{size}`")
        write(size, built, seed, shard_bytes, tick)


def room(size: str) -> int:
    """Bytes that ``build`` needs: the weights, and 8 MiB for tokenizer and headers."""
    return describe(size).bytes + (8 << 20)


def write(
    size: str, directory: Path, seed: int, shard_bytes: int | None = None, tick: Callable[[int], None] = lambda _: None
) -> None:
    """As ``build``, into an existing empty directory; on an error, what is written remains."""
    write_configured(CONFIGURATIONS[size], directory, seed, shard_bytes or _SHARD_BYTES.get(size, SHARD_BYTES), tick)
    pixels = MAX_PIXELS.get(size, PIXELS)
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "size": {"shortest_edge": 56 * 56, "longest_edge": pixels},
        "min_pixels": 56 * 56,
        "max_pixels": pixels,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def write_configured(
    configuration: Mapping[str, Any], directory: Path, seed: int, shard_bytes: int, tick: Callable[[int], None]
) -> None:
    """Write config.json, tokenizer and random weights for any configuration."""
    from tunetool.loading import random_weights

    (directory / "config.json").write_text(json.dumps(configuration, indent=2) + "\n")
    tokenizer.write(directory, configuration)
    random_weights.write(directory, tensors(configuration, "config.json"), seed, shard_bytes, tick)


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
    # Imports and the set-up of the device are not part of the time.
    import torch
    from transformers import Qwen2_5_VLForConditionalGeneration as Model

    from tunetool.loading.device_memory import device_of, need_memory
    from tunetool.loading.parallel import load_parallel

    target = device_of(device)
    kept = getattr(torch, dtype or ("bfloat16" if target.type == "cuda" else "float32"))
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
        import torch

        torch.zeros(1, device=device)
        torch.cuda.synchronize(device)
