"""Reads `.metadata` of a distributed checkpoint without running code that the file names, and writes it.

The file is a pickle of ``torch.distributed.checkpoint.metadata.Metadata``
(torch/distributed/checkpoint/{metadata,filesystem}.py); Python's own unpickler would call whatever the file names.
Its checksum is a line after the pickle, where Python's unpickler and torch do not look.
"""

from __future__ import annotations

import errno
import pickle
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.metadata import Metadata as _Metadata

from tunetool import regular_files
from tunetool.checkpoint import metadata_opcodes, metadata_pickle, pickled
from tunetool.checkpoint.checksums import Sums, hasher
from tunetool.checkpoint.collections_off import without_collections
from tunetool.checkpoint.holders import HOLDERS, TOGETHER, is_text
from tunetool.checkpoint.metadata_opcodes import Unusual
from tunetool.checkpoint.metadata_pickle import SUMS, Content, Described
from tunetool.checkpoint.packed import Results
from tunetool.checkpoint.plain import Malformed, check_plain
from tunetool.checkpoint.vocabulary import VOCABULARY, is_leaf
from tunetool.errors import UsageProblem

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

NAME = ".metadata"
LARGEST = 1 << 30
"""Largest accepted size in bytes. The metadata of 1,024 ranks with 1,344 tensors each is a third of that."""
_METADATA_NAME = re.compile(r"(?:__\d+)?\.metadata")
"""The name is ``__{rank}.metadata`` if every rank saved its own metadata."""


def loads(content: bytes, path: Path) -> Metadata:
    """The metadata in ``content``, which comes from ``path`` (used in messages only).

    Raises ``UsageProblem`` for a class that is not part of torch's metadata (the message names it), for a truncated
    file, and for a pickle of anything else.
    """
    try:
        with without_collections():
            loaded = pickled.load(checked(content), VOCABULARY)
    except pickled.Refused as refused:
        raise UsageProblem(
            f"`{path}` names `{_in_one_line(str(refused))}`, which metadata of torch.distributed.checkpoint never "
            "contains; nothing was run",
            "load it only if you know who wrote it; save without objects of your own in the planner's data",
        ) from None
    except Exception as error:  # a pickle that is cut or made up can raise anything
        explained = isinstance(error, (Malformed, Damaged))
        reason = str(error) if explained else f"{type(error).__name__}: {error}"
        raise UsageProblem(
            f"`{path}` cannot be read as a checkpoint's metadata: {_in_one_line(reason)}",
            "the file is damaged; load another checkpoint",
        ) from None
    problem = _problem_in(loaded)
    if problem:
        raise UsageProblem(
            f"`{path}` is not the metadata of a checkpoint: {_in_one_line(problem)}",
            "the file is damaged; load another checkpoint",
        )
    return loaded


def _in_one_line(text: str) -> str:
    """Escape and shorten ``text`` for a message: names from the file may contain anything, at any length."""
    shown = text if text.isprintable() else text.encode("unicode_escape", "surrogatepass").decode("ascii")
    return shown if len(shown) <= 1000 else f"{shown[:1000]}..."


def _problem_in(loaded: Any) -> str | None:
    """What is wrong with the loaded object, None if nothing. Readers rely on these checks."""
    if type(loaded) is not _Metadata:
        return f"it holds a `{type(loaded).__name__}`"
    if type(getattr(loaded, "state_dict_metadata", None)) is not dict:
        return "it has no table of tensors"
    # torch describes an empty state by an empty table.
    if type(loaded.storage_data) is not dict and (loaded.state_dict_metadata or loaded.storage_data is not None):
        return "it has no table of files"
    for problems in (
        map(_entry_problem, loaded.state_dict_metadata.items()),
        map(_location_problem, (loaded.storage_data or {}).items()),
        [_extras_problem(loaded)],
    ):
        problem = next(filter(None, problems), None)
        if problem:
            return problem
    return None


def _entry_problem(entry: tuple[Any, Any]) -> str | None:
    name, described = entry
    if type(name) is not str:
        return "a tensor's name is not text"
    if type(described) is TensorStorageMetadata:
        dimensions = len(described.size)
        for chunk in described.chunks:
            if type(chunk) is not ChunkStorageMetadata or len(chunk.sizes) != dimensions:
                return f"`{name}` has a part that is none of it"
    elif type(described) is not BytesStorageMetadata:
        return f"`{name}` is described by a `{type(described).__name__}`"
    return None


def _extras_problem(loaded: Any) -> str | None:
    if not all(type(name) is str for name in getattr(loaded.storage_meta, "modules", ())):
        return "its table of modules holds something else"
    try:
        check_plain(loaded.planner_data, is_leaf)
    except Malformed as error:
        return f"in the planner's data {error}"
    sums = getattr(loaded, SUMS, {})
    if type(sums) is not dict or not all(type(each) is str for each in sums.values()):
        return "its table of checksums holds something else"
    held = getattr(loaded, HOLDERS, {})
    if type(held) is not dict or not all(type(name) is str and is_text(ranks) for name, ranks in held.items()):
        return "its table of ranks holds something else"
    together = getattr(loaded, TOGETHER, [])
    if type(together) is not list or not all(type(name) is str for name in together):
        return "its list of what ranks hold together holds something else"
    return None


def _location_problem(entry: tuple[Any, Any]) -> str | None:
    index, stored = entry
    if type(index) is not MetadataIndex or type(stored) is not _StorageInfo:
        return f"`{index}` is stored in no way that torch's FileSystemWriter uses"
    name, offset, length = stored.relative_path, stored.offset, stored.length
    if type(name) is not str or not is_inside(name):
        return f"`{index.fqn}` lies outside the checkpoint, in `{name}`"
    if type(offset) is not int or type(length) is not int or offset < 0 or length < 0 or offset + length >= 1 << 63:
        return f"`{index.fqn}` lies at {offset}, {length} bytes long"
    return None


@lru_cache(4096)
def is_inside(name: str) -> bool:
    """Whether a relative path stays within the directory that it is relative to."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name


def read(directory: Path, rank: int | None = None) -> Metadata:
    """The metadata of the checkpoint in ``directory``, or of one ``rank`` if every rank saved its own metadata.

    Raises ``UsageProblem`` if there is none, or as ``loads`` does.
    """
    path = directory / (NAME if rank is None else f"__{rank}{NAME}")
    try:
        content = regular_files.read_bytes(path, LARGEST)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and next(directory.glob("*.safetensors"), None):
            raise UsageProblem(
                f"`{directory}` has no `{path.name}`: it holds .safetensors files, as torch's HuggingFaceStorageWriter "
                "writes them",
                "`tunetool.loading.load` takes whole files with their index, torch's HuggingFaceStorageReader also the "
                "shards of ranks",
            ) from None
        raise _unreadable(path, error) from None
    return loads(content, path)


def _unreadable(path: Path, error: OSError) -> UsageProblem:
    return UsageProblem(f"`{path}` cannot be read: {error.strerror}", "name the directory of a complete checkpoint")


def dumps(metadata: Metadata, path: Path) -> bytes:
    """The bytes of `.metadata` with their checksum, checked with ``loads``. Raises ``UsageProblem`` as ``loads``
    does."""
    content = b"".join(with_sum([pickle.dumps(metadata)]))
    loads(content, path)
    return content


def content_of(
    metadata: Metadata, results: Sequence[Results], path: Path, kept: list[Described] | None = None
) -> Content:
    """The bytes of `.metadata` in parts, with the locations and checksums that the ranks' ``results`` name, and with a
    checksum of their own.

    ``kept``: the tables as bytes, if an earlier call has put them there. The caller keeps a list for each pair of a
    table of tensors and the planner's data.

    Raises ``UsageProblem`` as ``loads`` does.
    """
    tables, sums, held = metadata.state_dict_metadata, sums_of(results), holders_of(results)
    try:
        if not metadata_opcodes.FIELDS_KNOWN:
            raise Unusual
        if not all(is_inside(name) for rank in results for name in rank.names):
            raise Unusual
        with without_collections():
            described = kept[0] if kept else Described(tables, metadata.planner_data)
            content = metadata_pickle.write(described, results, metadata.storage_meta, metadata.version, sums, held)
        if kept is not None:
            kept[:] = [described]
        return with_sum(content)
    except Unusual:
        stored = {index: info for rank in results for index, info in rank.infos()}
        described_by_torch = replace(metadata, storage_data=stored)
        if sums is not None:
            setattr(described_by_torch, SUMS, sums)
        if held is not None:
            setattr(described_by_torch, HOLDERS, held)
        return [dumps(described_by_torch, path)]


def sums_of(results: Sequence[Results]) -> Sums | None:
    """The checksums of all ranks' objects; None unless every rank has made them."""
    together: dict[Any, str] = {}
    for rank in results:
        if rank.sums is None:
            return None
        together |= rank.sums
    return together


def holders_of(results: Sequence[Results]) -> dict[str, str] | None:
    """Who else holds the items of each file, where others do; None for one rank, and unless every rank knows it."""
    together: dict[str, str] = {}
    for rank in results:
        if rank.holders is None or len(results) == 1:
            return None
        together |= {name: ranks for name, ranks in zip(rank.names, rank.holders, strict=True) if ranks}
    return together


def files_of(metadata: Metadata) -> set[str]:
    """The data files that the metadata names, relative to its directory."""
    return {stored.relative_path for stored in (metadata.storage_data or {}).values()}


def named_in(directory: Path, but: str | None = None) -> set[str]:
    """The data files that any metadata file of ``directory`` names, ``but`` this one. Raises ``UsageProblem`` if one
    cannot be read."""
    named: set[str] = set()
    for path in directory.iterdir():
        if path.name != but and _METADATA_NAME.fullmatch(path.name):
            try:
                content = regular_files.read_bytes(path, LARGEST)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EFBIG):
                    raise
                raise _unreadable(path, error) from None
            named |= files_of(loads(content, path))
    return named


_LINE = re.compile(rb"tunetool xxh3_64 ([0-9a-f]{16})\n")
_BEGIN = b".tunetool xxh3_64 "
"""The end of a pickle, and the begin of the line."""
_BYTES = len(b"tunetool xxh3_64 \n") + 16


class Damaged(ValueError):
    """The content is not what was written; the message says why."""


def with_sum(content: Sequence[bytes | memoryview]) -> Content:
    """The content in parts, and its checksum as the last part; without one where xxhash is not installed."""
    try:
        hashed = hasher()
    except UsageProblem:
        return [*content]
    for part in content:
        hashed.update(part)
    return [*content, b"tunetool xxh3_64 %b\n" % hashed.hexdigest().encode()]


def without_sum(content: bytes) -> bytes:
    """The content without the line of its checksum, which is not checked here."""
    return content[:-_BYTES] if _LINE.fullmatch(content, max(0, len(content) - _BYTES)) else content


def checked(content: bytes) -> bytes:
    """The content without its checksum. Raises ``Damaged`` if the two differ.

    Files of torch's writer, and of earlier versions, have none. Neither is it checked where xxhash is not installed.
    """
    pickled = without_sum(content)
    if len(pickled) == len(content):
        if content.find(_BEGIN, max(0, len(content) - _BYTES - 1)) != -1:
            raise Damaged("the checksum at its end is cut or damaged")
        return content
    try:
        hashed = hasher()
    except UsageProblem:
        return pickled
    hashed.update(pickled)
    now, saved = hashed.hexdigest(), content[-17:-1].decode()
    if now != saved:
        raise Damaged(f"its {len(pickled)} bytes have checksum {now}, and were saved with {saved}")
    return pickled
