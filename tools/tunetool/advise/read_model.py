"""Read a model's tensor shapes from a preset's name, a config.json, or the files of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunetool import regular_files
from tunetool.advise import expert_decoder, gpt2, qwen2_5_vl
from tunetool.advise.packed_weights import Unproven
from tunetool.advise.shapes import (
    PRESETS,
    Decoder,
    Model,
    decoder_from_config,
    in_module_order,
)
from tunetool.advise.weight_files import ENDING, INDEX, check_alone, choose, read_parameters
from tunetool.errors import UsageProblem

CONFIG = "config.json"
_BY_SIZES: Mapping[str, tuple[str, Decoder | gpt2.Gpt2]] = {**PRESETS, **gpt2.PRESETS, **expert_decoder.PRESETS}
_OTHER_TYPES = (qwen2_5_vl.MODEL_TYPE, gpt2.MODEL_TYPE, *expert_decoder.FAMILIES)
NAMES = (*qwen2_5_vl.CONFIGURATIONS, *_BY_SIZES)
"""The names of the known models, which are the same in every command."""


def load_model(text: str) -> Model:
    """The preset called ``text``, or the model at that path. Raises ``UsageProblem`` where neither can be read."""
    if text in qwen2_5_vl.CONFIGURATIONS:
        source = "Qwen2.5-VL, as `bench finetune` builds it"
        return Model(text, source, qwen2_5_vl.tensors(qwen2_5_vl.CONFIGURATIONS[text], text))
    if text in _BY_SIZES:
        source, sizes = _BY_SIZES[text]
        return Model(text, source, sizes.tensors(), _per_token(sizes))
    path = Path(text)
    if not path.exists():
        raise UsageProblem(
            f"`{text}` is neither a known model nor a path",
            f"known: {', '.join(NAMES)}; or a config.json, a .safetensors file, or a folder that holds them",
        )
    if path.is_dir():
        weights = [each.name for each in path.glob(f"*{ENDING}")]
        if weights:
            return _from_weights(path.name, _of_index(path) or choose(path, weights))
        path = path / CONFIG
    if path.name.endswith(".index.json"):
        return _from_weights(path.parent.name, _of_index(path.parent, path.name) or [])
    if path.suffix == ENDING:
        check_alone(path)
        return _from_weights(path.stem, [path])
    document = _json(path)
    return _from_config(document, path, f"the sizes in `{path}`")


def _from_config(document: Mapping[str, Any], path: Path, source: str) -> Model:
    chosen = None
    kind = document.get("model_type")
    if kind == qwen2_5_vl.MODEL_TYPE:
        tensors = qwen2_5_vl.tensors(document, str(path))
    elif kind == gpt2.MODEL_TYPE:
        tensors = gpt2.from_config(document, str(path)).tensors()
    elif isinstance(kind, str) and kind in expert_decoder.FAMILIES:
        decoder = expert_decoder.decoder_from_config(document, str(path))
        tensors, chosen = decoder.tensors(), decoder.experts.per_token
    else:
        tensors = decoder_from_config(document, str(path), _OTHER_TYPES).tensors()
    return Model(path.parent.name or path.stem, source, tuple(tensors), chosen)


def _per_token(sizes: object) -> int | None:
    return sizes.experts.per_token if isinstance(sizes, expert_decoder.ExpertsDecoder) else None


def load_decoder(text: str) -> Decoder:
    """The sizes of a model of the Llama family: one of ``PRESETS``, or a config.json. Raises ``UsageProblem``."""
    if text in PRESETS:
        return PRESETS[text][1]
    return decoder_from_config(*load_config(Path(text)))


def load_config(path: Path) -> tuple[dict[str, Any], str]:
    """A config.json, or that of a directory, and its path. Raises ``UsageProblem``."""
    path = path / CONFIG if path.is_dir() else path
    return _json(path), str(path)


def _json(path: Path) -> dict[str, Any]:
    try:
        document = regular_files.read_json(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not JSON"
        raise UsageProblem(f"`{path}` cannot be read: {reason}", "name a transformers config.json") from None
    if not isinstance(document, dict):
        raise UsageProblem(f"`{path}` is not a JSON object", "name a transformers config.json")
    return document


def _of_index(folder: Path, name: str = INDEX) -> list[Path] | None:
    """The weight files that a safetensors index lists; None without an index."""
    path = folder / name
    if not path.exists():
        return None
    named = _json(path).get("weight_map")
    if not isinstance(named, dict) or not named:
        raise UsageProblem(f"`{path}` names no files", "is it an index of safetensors files?")
    files = [each for each in named.values() if isinstance(each, str) and each.isprintable() and Path(each).name]
    if len(files) < len(named):
        raise UsageProblem(f"`{path}` names something that is no file", "is it an index of safetensors files?")
    return [folder / Path(each).name for each in dict.fromkeys(files)]


def _from_weights(name: str, files: list[Path]) -> Model:
    path = files[0].parent / CONFIG if files else Path(CONFIG)
    config = _json(path) if files and path.exists() else {}
    try:
        found = read_parameters(files, config)
    except Unproven as unproven:
        return _of_packed(path, config, files[0], unproven)
    if not found.tensors:
        raise UsageProblem(f"`{name}` has no tensors", "name a folder with a model's files")
    source = f"the {len(files)} file(s) of its weights{', unpacked' if found.packed else ''}"
    mixed = any(map(expert_decoder.is_expert, found.tensors))
    return Model(name, source, in_module_order(found.tensors), expert_decoder.per_token(config) if mixed else None)


def _of_packed(path: Path, config: Mapping[str, Any], file: Path, unproven: Unproven) -> Model:
    """By the sizes in the config.json at ``path``. Raises ``UsageProblem`` where those do not give the tensors."""
    try:
        return _from_config(config, path, f"the sizes in `{path}`: its weights are packed")
    except UsageProblem:
        raise UsageProblem(
            f"`{file}`: {unproven}, nor does a `{CONFIG}` of a known type",
            f"name the model from which it was packed, or its `{CONFIG}`",
        ) from None
