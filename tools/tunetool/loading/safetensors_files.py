"""Lists the tensors in the .safetensors files of a directory, and checks that the files have the expected size."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tunetool import regular_files, safetensors_header
from tunetool.errors import UsageProblem

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "BF16": "bfloat16",
    "F16": "float16",
    "I16": "int16",
    "F32": "float32",
    "I32": "int32",
    "F64": "float64",
    "I64": "int64",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "C64": "complex64",
}
"""torch's dtype names, by the names in safetensors files."""
_AGAIN = "copy or download the model again; `tunetool stage verify` finds what a copy lost"


@dataclass(frozen=True)
class Stored:
    """One tensor: ``length`` raw bytes at ``start`` of the file ``file``; ``dtype`` as torch names it."""

    name: str
    file: str
    start: int
    length: int
    dtype: str
    shape: tuple[int, ...]


def files_of(directory: Path) -> tuple[str, ...]:
    """The names of the weight files, from the index. Raises ``UsageProblem`` if there are none."""
    index = directory / INDEX
    if not index.exists():
        if (directory / SINGLE).exists():
            return (SINGLE,)
        raise UsageProblem(
            f"`{directory}` holds no weights: neither `{INDEX}` nor `{SINGLE}`",
            "give a directory with .safetensors files, or generate weights with `7b`, `3b` or `tiny`",
        )
    try:
        names = set(regular_files.read_json(index)["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UsageProblem(f"`{index}` is not an index of .safetensors files", _AGAIN) from None
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise UsageProblem(f"`{index}` names no files of this directory", _AGAIN)
    return tuple(sorted(names))


def stored(directory: Path) -> list[Stored]:
    """Every tensor, ordered by file and offset.

    Raises ``UsageProblem`` naming a file that is missing, truncated or no safetensors file.
    """
    names = files_of(directory)
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise UsageProblem(
            f"`{directory / missing[0]}` is missing: the index lists {len(names)} files, {len(missing)} are not there",
            _AGAIN,
        )
    return [tensor for name in names for tensor in _in_file(directory / name)]


def _in_file(path: Path) -> Iterator[Stored]:
    try:
        with os.fdopen(regular_files.open_regular(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = safetensors_header.length(file.read(safetensors_header.START))
            header = file.read(length)
        first = safetensors_header.START + length
        if len(header) < length:
            raise UsageProblem(f"`{path}` is cut short: {size} bytes, its list of tensors alone takes {first}", _AGAIN)
        entries = safetensors_header.entries(header)
    except OSError as error:
        raise UsageProblem(f"`{path}` cannot be read: {error.strerror}", _AGAIN) from None
    except safetensors_header.Invalid as error:
        raise UsageProblem(f"`{path}` is not a safetensors file: {error}", _AGAIN) from None
    whole = first + (entries[-1].end if entries else 0)
    if size != whole:
        how = "is cut short" if size < whole else "is too long"
        raise UsageProblem(f"`{path}` {how}: {size} bytes, and its header lists {whole}", _AGAIN)
    for entry in entries:
        if entry.dtype not in DTYPES:
            raise UsageProblem(
                f"`{path}`: `{entry.name}` has dtype {entry.dtype}, which is not supported",
                f"supported: {', '.join(DTYPES)}",
            )
        yield Stored(
            entry.name,
            path.name,
            first + entry.begin,
            entry.end - entry.begin,
            DTYPES[entry.dtype],
            entry.shape,
        )
