"""`.metadata` of a distributed checkpoint: read without running what a stranger put into it, and written.

The file is a pickle of ``torch.distributed.checkpoint.metadata.Metadata``
(torch/distributed/checkpoint/{metadata,filesystem}.py); unpickling it freely would call whatever it names.
"""

from __future__ import annotations

import collections
import io
import pickle
import re
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint.filesystem as torch_filesystem
import torch.distributed.checkpoint.metadata as torch_metadata

from tunetool.errors import UsageProblem

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

NAME = ".metadata"
_OF_A_DIRECTORY = re.compile(r"(?:__\d+)?\.metadata")
"""torch names it ``__{rank}.metadata`` when every rank saved for itself."""

_TORCH_METADATA = "torch.distributed.checkpoint.metadata"
_ADMITTED: dict[tuple[str, str], Any] = {
    **{
        (_TORCH_METADATA, name): getattr(torch_metadata, name)
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "MetadataIndex",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
        if hasattr(torch_metadata, name)
    },
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): torch_filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    **{
        ("builtins", kind.__name__): kind
        # Not bytes and its like, which take a size and make a stranger's file fill the memory.
        for kind in (complex, dict, frozenset, list, set, tuple)
    },
    ("collections", "OrderedDict"): collections.OrderedDict,
    # `StorageMeta.checkpoint_id` is the path that was saved to. Only its words matter here, and a saver's Windows
    # path cannot be made on Linux.
    **{
        (module, name): pure
        for module in ("pathlib", "pathlib._local")  # Python 3.13 moved them
        for name, pure in (
            ("PosixPath", Path),
            ("PurePosixPath", PurePosixPath),
            ("WindowsPath", PureWindowsPath),
            ("PureWindowsPath", PureWindowsPath),
        )
    },
}


class Refused(pickle.UnpicklingError):
    """A class that no metadata of torch's has."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = _ADMITTED.get((module, name))
        if found is None and module == "torch":
            # Exactly one name, so a dotted one cannot walk from here to anything else.
            found = torch.__dict__.get(name)
            if not isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
                found = None
        if found is None:
            raise Refused(f"{module}.{name}")
        return found


def loads(content: bytes, path: Path) -> Metadata:
    """The metadata in ``content``; ``path`` is what the error names.

    Raises ``UsageProblem`` for a class that is none of torch's metadata nor their plain parts (named), for a file that
    is cut short, and for a pickle of something else.
    """
    try:
        found = _Unpickler(io.BytesIO(content)).load()
    except Refused as refused:
        raise UsageProblem(
            f"`{path}` names `{refused}`, which no metadata of torch.distributed.checkpoint holds; nothing was run",
            "load it only if you know who wrote it; save without objects of your own in the planner's data",
        ) from None
    except Exception as error:  # a pickle that is cut or made up can raise anything
        raise UsageProblem(
            f"`{path}` cannot be read as a checkpoint's metadata: {type(error).__name__}: {error}",
            "the file is damaged; load another checkpoint",
        ) from None
    _check(found, path)
    return found


def _check(found: Any, path: Path) -> None:
    """What readers rely on, so that they need not ask again."""
    wrong = None
    if not isinstance(found, torch_metadata.Metadata):
        wrong = f"it holds a `{type(found).__name__}`"
    elif not isinstance(found.state_dict_metadata, dict):
        wrong = "it has no table of tensors"
    elif found.storage_data is not None:
        if not isinstance(found.storage_data, dict):
            wrong = "it has no table of files"
        else:
            wrong = next(filter(None, map(_wrong_place, found.storage_data.items())), None)
    if wrong:
        raise UsageProblem(
            f"`{path}` is no metadata of a checkpoint: {wrong}", "the file is damaged; load another checkpoint"
        )


def _wrong_place(entry: tuple[Any, Any]) -> str | None:
    index, place = entry
    if not isinstance(index, torch_metadata.MetadataIndex) or not isinstance(place, torch_filesystem._StorageInfo):
        return f"`{index}` is stored in no way that torch's FileSystemWriter uses"
    name, offset, length = (getattr(place, field, None) for field in ("relative_path", "offset", "length"))
    if not isinstance(name, str) or not is_inside(name):
        return f"`{index.fqn}` lies outside the checkpoint, in `{name}`"
    if not isinstance(offset, int) or not isinstance(length, int) or offset < 0 or length < 0:
        return f"`{index.fqn}` lies at {offset}, {length} bytes long"
    return None


def is_inside(name: str) -> bool:
    """Whether a relative path stays within the directory that it is relative to."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name


def read(directory: Path, rank: int | None = None) -> Metadata:
    """The metadata of the checkpoint in ``directory``; of one rank, where every rank saved for itself.

    Raises ``UsageProblem`` when there is none, and as ``loads`` does.
    """
    path = directory / (NAME if rank is None else f"__{rank}{NAME}")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageProblem(
            f"`{path}` cannot be read: {error.strerror}", "name the directory of a complete checkpoint"
        ) from None
    return loads(content, path)


def dumps(metadata: Metadata, path: Path) -> bytes:
    """The bytes of `.metadata`, which ``loads`` is known to accept. Raises ``UsageProblem`` as it does."""
    content = pickle.dumps(metadata)
    loads(content, path)
    return content


def files_of(metadata: Metadata) -> set[str]:
    """The data files that the metadata names, relative to its directory."""
    return {place.relative_path for place in (metadata.storage_data or {}).values()}


def named_in(directory: Path) -> set[str]:
    """The data files that any metadata of this directory names. Raises ``UsageProblem`` when one cannot be read."""
    named: set[str] = set()
    for path in directory.iterdir():
        if _OF_A_DIRECTORY.fullmatch(path.name):
            named |= files_of(loads(path.read_bytes(), path))
    return named
