"""The .safetensors files of a model, and the parameters in them: each once, and packed ones as what they unpack to."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tunetool import regular_files, safetensors_header
from tunetool.advise.packed_weights import Parameters, parameters
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
