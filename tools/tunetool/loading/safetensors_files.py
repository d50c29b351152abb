"""Lists the tensors in .safetensors files, and checks the files' headers, their sizes and their index."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tunetool import regular_files, safetensors_header
from tunetool.checkpoint.identity import Identity, look_at
from tunetool.errors import CannotJudge, UsageProblem

INDEX = "model.safetensors.index.json"
_INDEX_ENDING = ".index.json"
SINGLE = "model.safetensors"
_LONGEST_NAME = 255
"""Bytes, on Linux."""
AGAIN = "copy or download the model again; `tunetool stage verify` finds what a copy lost"


_MOST_ELEMENTS = 1 << 63


class Stored(NamedTuple):
    """One tensor: ``length`` raw bytes at ``start`` of the file ``file``; ``dtype`` as torch names it."""

    name: str
    file: str
    start: int
    length: int
    dtype: str
    shape: tuple[int, ...]


class Listing(NamedTuple):
    """The tensors of ``files`` in ``directory``, by name, ordered by file and offset. ``path``: what was asked for."""

    path: Path
    directory: Path
    files: Mapping[str, Identity]
    tensors: Mapping[str, Stored]

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.length for tensor in self.tensors.values())

    def check_unchanged(self) -> None:
        """Raises ``CannotJudge`` if a file was written to, replaced or removed since it was listed."""
        now = look_at(self.directory, self.files)
        for name, then in self.files.items():
            if name not in now or now[name].inode != then.inode or not now[name].as_written(then):
                how = "changed" if name in now else "was removed"
                raise CannotJudge(
                    f"`{self.directory / name}` {how} while it was loaded", "load again when nobody writes to it"
                )


def shown(name: str) -> str:
    """A tensor's name in backticks, on one line whatever it holds."""
    return f"`{ascii(name[:200])[1:-1]}`"


def list_tensors(path: Path) -> Listing:
    """The tensors of ``path``: a .safetensors file, an index, or a directory with either under its usual name.

    Raises ``UsageProblem`` naming the file, the tensor or the index that is missing, truncated, malformed or not as the
    others say.
    """
    directory, names, index = _files_and_index(path)
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        _check_kind(directory / missing[0])
        raise UsageProblem(
            f"`{directory / missing[0]}` is missing: the index lists {len(names)} files, {len(missing)} are not there",
            AGAIN,
        )
    identities = look_at(directory, names)
    tensors: dict[str, Stored] = {}
    for name in names:
        for tensor in _in_file(directory / name):
            if tensor.name in tensors:
                raise UsageProblem(
                    f"{shown(tensor.name)} is in `{tensors[tensor.name].file}` and in `{name}` of `{directory}`", AGAIN
                )
            tensors[tensor.name] = tensor
    if index is not None:
        _check_index(path if path.is_file() else directory / INDEX, index, tensors)
    return Listing(path, directory, identities, tensors)


def files_of(directory: Path) -> tuple[str, ...]:
    """The names of the weight files, from the index. Raises ``UsageProblem`` if there are none."""
    return _files_and_index(directory)[1]


def _files_and_index(path: Path) -> tuple[Path, tuple[str, ...], Mapping[str, str] | None]:
    """The directory, the names of the files in it, and the index: the file of each tensor."""
    if os.path.lexists(path) and not path.is_dir():
        _check_kind(path)
    index = path / INDEX
    if path.name.endswith(_INDEX_ENDING) and path.is_file():
        index = path
    elif path.is_file():
        return path.parent, (path.name,), None
    if not os.path.lexists(index):
        if os.path.lexists(path / SINGLE):
            _check_kind(path / SINGLE)
            return path, (SINGLE,), None
        raise UsageProblem(
            f"`{path}` holds no weights: neither `{INDEX}` nor `{SINGLE}`",
            "give a directory with .safetensors files, or generate weights with `7b`, `3b` or `tiny`",
        )
    _check_kind(index)
    try:
        entries = regular_files.read_json(index)["weight_map"]
        names = set(entries.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UsageProblem(f"`{index}` is not an index of .safetensors files", AGAIN) from None
    if not names or not all(map(_is_name, names)):
        raise UsageProblem(f"`{index}` names no files of this directory", AGAIN)
    return index.parent, tuple(sorted(names)), entries


def _is_name(name: Any) -> bool:
    """Whether a file of a directory can have this name."""
    if not isinstance(name, str) or Path(name).name != name or "\0" in name:
        return False
    return len(name.encode("utf-8", "replace")) <= _LONGEST_NAME


def _check_kind(path: Path) -> None:
    """Raises ``UsageProblem`` for something else than a file, and for a link that leads nowhere."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if path.is_symlink():
            raise UsageProblem(f"`{path}` leads to `{path.readlink()}`, which is not there", AGAIN) from None
        return
    except OSError as error:
        raise UsageProblem(f"`{path}` cannot be read: {error.strerror}", AGAIN) from None
    if not stat.S_ISREG(mode):
        raise UsageProblem(f"`{path}` is no file but a {regular_files.kind_of(mode)}", AGAIN)


def _check_index(index: Path, entries: Mapping[str, str], tensors: Mapping[str, Stored]) -> None:
    for name, file in entries.items():
        if name not in tensors or tensors[name].file != file:
            where = f"`{tensors[name].file}` holds it" if name in tensors else "no file holds it"
            raise UsageProblem(f"`{index}` lists {shown(name)} in `{file}`, and {where}", AGAIN)
    for name, tensor in tensors.items():
        if name not in entries:
            raise UsageProblem(f"`{tensor.file}` holds {shown(name)}, which `{index}` does not list", AGAIN)


def _in_file(path: Path) -> Iterator[Stored]:
    try:
        header = safetensors_header.read(path)
    except OSError as error:
        raise UsageProblem(f"`{path}` cannot be read: {error.strerror}", AGAIN) from None
    except safetensors_header.CutShort as error:
        raise UsageProblem(f"`{path}` is {error}", AGAIN) from None
    except safetensors_header.Invalid as error:
        raise UsageProblem(f"`{path}` is not a safetensors file: {error}", AGAIN) from None
    if header.size < header.end:
        raise UsageProblem(f"`{path}` is cut short: {header.size} bytes, and its header lists {header.end}", AGAIN)
    if header.size > header.end:
        raise UsageProblem(f"`{path}` is too long: {header.size} bytes, and its header lists {header.end}", AGAIN)
    file = path.name  # once: a model has thousands of tensors
    for entry in header.entries:
        if entry.dtype not in safetensors_header.DTYPES:
            raise UsageProblem(
                f"`{path}`: {shown(entry.name)} has dtype {entry.dtype}, which is not supported",
                f"supported: {', '.join(safetensors_header.DTYPES)}",
            )
        # Without elements it has no bytes that would bound the other dimensions.
        if math.prod(max(size, 1) for size in entry.shape) >= _MOST_ELEMENTS:
            raise UsageProblem(
                f"`{path}`: {shown(entry.name)} has the shape {list(entry.shape)[:8]}, which no tensor of torch has",
                AGAIN,
            )
        yield Stored(
            entry.name,
            file,
            header.begin + entry.begin,
            entry.end - entry.begin,
            safetensors_header.DTYPES[entry.dtype],
            entry.shape,
        )
