"""Read a model's tensor shapes from a preset's name, a config.json, or the .safetensors files of its weights: each
parameter once, and packed ones as what they unpack to."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tunetool import regular_files, safetensors_header
from tunetool.advise import expert_decoder, gpt2, qwen2_5_vl
from tunetool.advise.packed_weights import Parameters, Unproven, parameters
from tunetool.advise.shapes import (
    PRESETS,
    Decoder,
    Model,
    decoder_from_config,
    in_module_order,
)
from tunetool.errors import UsageProblem
from tunetool.safetensors_header import Entry, Header

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ENDING = ".safetensors"
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<count>\d+)(?P<variant>.*)\.safetensors")
_ADAPTERS = ("adapter_model", "pytorch_lora_weights")
_HINT = "name a folder with a model's files"
_LARGEST_TEXT = 1 << 16
"""Bytes of a tensor that says how another one is packed."""


class _Set(NamedTuple):
    """Files of one model, by number, ``of`` so many. A file whose name has no number is a set of its own."""

    stem: str
    of: int
    files: dict[int, str]


def choose(folder: Path, names: Sequence[str]) -> list[Path]:
    """Of the .safetensors files ``names`` in ``folder``, which has no index, those of the model.

    A model may lie there twice: in its maker's own format (`consolidated`), in a second precision; and an adapter
    beside. Raises ``UsageProblem`` where a file is missing, and where several may be the model.
    """
    if SINGLE in names:  # as the loader
        return [folder / SINGLE]
    sets = _sets(names)
    sets = [each for each in sets if not each.stem.startswith(_ADAPTERS)] or sets
    candidates = [each for each in sets if each.stem == "model"] or sets
    if len(candidates) > 1:
        shown = ", ".join(f"`{next(iter(each.files.values()))}`" for each in candidates[:4])
        raise UsageProblem(
            f"`{folder}` has no `{INDEX}`, and each of {shown} may be the model or a part of it",
            "name the file that is the model, or bring the index",
        )
    (chosen,) = candidates
    _check_complete(folder, chosen)
    return [folder / name for _, name in sorted(chosen.files.items())]


def _sets(names: Sequence[str]) -> list[_Set]:
    sets: dict[tuple[str, str], _Set] = {}
    for name in sorted(names):
        match = _SHARD.fullmatch(name)
        if match is None:
            sets[name, ""] = _Set(name.removesuffix(ENDING), 1, {1: name})
        else:
            key = (match["stem"] + match["variant"], match["count"])
            sets.setdefault(key, _Set(key[0], int(key[1]), {})).files[int(match["number"])] = name
    return list(sets.values())


def _check_complete(folder: Path, chosen: _Set) -> None:
    first = 0 if 0 in chosen.files else 1
    missing = next((number for number in range(first, first + chosen.of) if number not in chosen.files), None)
    if missing is None:
        return
    example = next(iter(chosen.files.values()))
    name = _SHARD.sub(
        lambda of: f"{of['stem']}-{missing:0{len(of['number'])}d}-of-{of['count']}{of['variant']}{ENDING}", example
    )
    raise UsageProblem(
        f"`{folder / name}` is missing: `{example}` is one of {chosen.of} files, {len(chosen.files)} are there",
        "bring the whole model",
    )


def check_alone(path: Path) -> None:
    """Raises ``UsageProblem`` for a file that is by its name one of several of a model."""
    match = _SHARD.fullmatch(path.name)
    if match is not None and int(match["count"]) > 1:
        raise UsageProblem(f"`{path}` is one of the {int(match['count'])} files of a model", "name their folder")


def read_parameters(files: Sequence[Path], config: Mapping[str, Any]) -> Parameters:
    """The parameters in ``files``, of one model whose config.json is ``config``.

    Raises ``UsageProblem``, and ``Unproven`` with the file's name in front.
    """
    entries: dict[str, Entry] = {}
    file_of: dict[str, tuple[Path, int]] = {}
    for file in files:
        header = _header(file)
        for entry in header.entries:
            if entry.name in entries:
                raise UsageProblem(
                    f"`{ascii(entry.name[:200])[1:-1]}` is in `{file_of[entry.name][0].name}` and in `{file.name}` of "
                    f"`{file.parent}`",
                    "which of them the model has is not known: name the file that is the model",
                )
            entries[entry.name], file_of[entry.name] = entry, (file, header.begin)
    if files and (files[0].name.startswith(_ADAPTERS) or (entries and all("lora_" in name for name in entries))):
        raise UsageProblem(
            f"`{files[0]}` holds an adapter, which is trained beside a model",
            "name the folder of the model that it was made for; its `adapter_config.json` says which",
        )

    def content(entry: Entry) -> bytes:
        file, begin = file_of[entry.name]
        return _bytes_of(file, begin + entry.begin, entry.end - entry.begin)

    return parameters(entries.values(), config, content)


def _header(file: Path) -> Header:
    try:
        return safetensors_header.read(file)
    except OSError as error:
        raise UsageProblem(f"`{file}` cannot be read: {error.strerror}", "download all files of the model") from None
    except safetensors_header.CutShort as error:
        raise UsageProblem(f"`{file}` is {error}", _HINT) from None
    except safetensors_header.Invalid as error:
        raise UsageProblem(f"`{file}` is not a safetensors file: {error}", _HINT) from None


def _bytes_of(file: Path, offset: int, count: int) -> bytes:
    if not 0 < count <= _LARGEST_TEXT:
        return b""
    try:
        with os.fdopen(regular_files.open_regular(file), "rb") as stream:
            stream.seek(offset)
            return stream.read(count)
    except OSError:
        return b""


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
