"""The names that `.metadata` of a distributed checkpoint may use, and functions that make the objects from checked
values.

Based on torch/distributed/checkpoint/{metadata,filesystem}.py. The objects are torch's own, but the file can reach
neither the classes nor what they do when Python unpickles them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

from tunetool.checkpoint import metadata_opcodes, metadata_rows
from tunetool.checkpoint.pickled import Call, Kind, Refused, Vocabulary
from tunetool.checkpoint.plain import Malformed, as_complex, as_dict, as_frozenset, as_set, check_plain, ordered_dict

_DIMENSIONS = 64
"""torch supports no more dimensions."""
_PATH_CHARACTERS = 4096


def _size(*arguments: Any) -> torch.Size:
    (lengths,) = arguments
    if type(lengths) is not tuple or len(lengths) > _DIMENSIONS:
        raise Malformed("a shape is not made from a list of lengths")
    for length in lengths:
        if type(length) is not int or not 0 <= length < 1 << 63:
            raise Malformed(
                f"a shape holds `{length}`" if type(length) is int else "a shape holds something that is not a length"
            )
    return torch.Size(lengths)


def _path(kind: type[PurePath]) -> Call:
    def make(*parts: Any) -> PurePath:
        if not all(type(part) is str for part in parts) or sum(map(len, parts)) + len(parts) > _PATH_CHARACTERS:
            raise Malformed("a path is made from something that is not text, or from too much text")
        return kind(*parts)

    return Call(make)


def _one_of(kind: str, known: dict[Any, Any]) -> Call:
    def choose(*arguments: Any) -> Any:
        if len(arguments) != 1 or type(arguments[0]) not in (int, str) or arguments[0] not in known:
            raise Malformed(f"it names a {kind} that torch does not have")
        return known[arguments[0]]

    return Call(choose)


def _set_fields(instance: Any, state: Any, known: dict[str, Callable[[Any], bool]]) -> bool:
    """Set the attributes that ``known`` accepts, and unknown plain data, but no name that the class itself has. Returns
    False if the state is refused. Slow: only for classes with few objects."""
    if type(state) is not dict:
        return False
    for name, value in state.items():
        if type(name) is not str:
            return False
        if name in known:
            if not known[name](value):
                raise Malformed(f"`{name}` of a `{type(instance).__name__}` is a `{type(value).__name__}`")
        elif not name.isidentifier() or name.startswith("_") or hasattr(type(instance), name):
            return False
        else:
            # A field that a newer torch added.
            check_plain(value, is_leaf)
        instance.__dict__[name] = value
    return True


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: type(value) in kinds


_NONE = type(None)
_METADATA_FIELDS: dict[str, Callable[[Any], bool]] = {
    # `metadata.loads` checks the tables once the pickle can no longer change them.
    "state_dict_metadata": lambda _: True,
    "planner_data": lambda _: True,
    "storage_data": lambda _: True,
    "storage_meta": _is(_NONE, dcp_metadata.StorageMeta),
    "version": _is(_NONE, str),
}
_META_FIELDS: dict[str, Callable[[Any], bool]] = {
    "checkpoint_id": lambda value: value is None or isinstance(value, (str, PurePath)),
    "save_id": _is(_NONE, str),
    "load_id": _is(_NONE, str),
    "modules": _is(list),
}


def _fill_metadata(instance: Any, state: Any) -> bool:
    return _set_fields(instance, state, _METADATA_FIELDS)


def _fill_storage_meta(instance: Any, state: Any) -> bool:
    accepted = _set_fields(instance, state, _META_FIELDS)
    # The only field whose default the class itself does not have. Set last: pickles keep the order of fields.
    instance.__dict__.setdefault("modules", [])
    return accepted


def _fill_storage_info(instance: Any, state: Any) -> bool:
    if type(state) is not dict:
        return False
    fields = instance.__dict__
    fields["relative_path"], fields["offset"], fields["length"] = (
        state["relative_path"],
        state["offset"],
        state["length"],
    )
    if len(state) > 3:
        through = state["transform_descriptors"]
        if len(state) > 4 or type(through) not in (list, tuple) or not all(type(name) is str for name in through):
            return False
        # A copy, since the pickle could still change the original list.
        fields["transform_descriptors"] = through[:]
    return True


def _fill_tensor(instance: Any, state: Any) -> bool:
    if type(state) is not dict or len(state) != 3:
        return False
    fields = instance.__dict__
    fields["properties"], fields["size"], fields["chunks"] = state["properties"], state["size"], state["chunks"]
    return (
        type(fields["properties"]) is dcp_metadata.TensorProperties
        and type(fields["size"]) is torch.Size
        and type(fields["chunks"]) is list
    )


def _fill_chunk(instance: Any, state: Any) -> bool:
    if type(state) is not dict or len(state) != 2:
        return False
    fields = instance.__dict__
    fields["offsets"], fields["sizes"] = offsets, sizes = state["offsets"], state["sizes"]
    return type(offsets) is torch.Size and type(sizes) is torch.Size and len(offsets) == len(sizes)


def _fill_properties(instance: Any, state: Any) -> bool:
    if type(state) is not tuple or len(state) != 5:
        return False
    fields = instance.__dict__
    fields["dtype"], fields["layout"], fields["requires_grad"], fields["memory_format"], fields["pin_memory"] = state
    return (
        type(state[0]) is torch.dtype
        and type(state[1]) is torch.layout
        and type(state[2]) is bool
        and type(state[3]) is torch.memory_format
        and type(state[4]) is bool
    )


def _fill_index(instance: Any, state: Any) -> bool:
    if type(state) is not dict or len(state) > 3:
        return False
    fields = instance.__dict__
    fields["fqn"] = state["fqn"]
    fields["index"] = index = state["index"]
    if len(state) == 3:
        fields["offset"] = offset = state["offset"]
        if offset is not None and type(offset) is not torch.Size:
            return False
    return type(fields["fqn"]) is str and (index is None or type(index) is int)


_TORCH_METADATA = "torch.distributed.checkpoint.metadata"


def _kind(of: type, fill: Callable[[Any, Any], bool] | None) -> Kind:
    return Kind(of, partial(object.__new__, of), fill)


_LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}
_MEMORY_FORMATS = {
    "TORCH_CONTIGUOUS_FORMAT": torch.contiguous_format,
    "TORCH_CHANNELS_LAST": torch.channels_last,
    "TORCH_PRESERVE_FORMAT": torch.preserve_format,
}
"""By name and, in this order, by value of `_MEM_FORMAT_ENCODING` of torch's metadata.py."""
_MEMORY_FORMAT = _one_of("memory format", dict(enumerate(_MEMORY_FORMATS.values())))


def _member(*arguments: Any) -> Any:
    """A member of that class, nothing else: Python 3.11.0 to 3.11.3 (Debian 12) pickles `getattr(CLASS, NAME)`."""
    if len(arguments) != 2 or arguments[0] is not _MEMORY_FORMAT:
        raise Refused("builtins.getattr")
    name = arguments[1]
    if type(name) is not str or name not in _MEMORY_FORMATS:
        raise Malformed("it names a memory format that torch does not have")
    return _MEMORY_FORMATS[name]


_NAMES: dict[tuple[str, str], Any] = {
    **{
        (_TORCH_METADATA, kind.of.__name__): kind
        for kind in (
            _kind(dcp_metadata.Metadata, _fill_metadata),
            _kind(dcp_metadata.TensorStorageMetadata, _fill_tensor),
            _kind(dcp_metadata.BytesStorageMetadata, None),
            _kind(dcp_metadata.ChunkStorageMetadata, _fill_chunk),
            _kind(dcp_metadata.TensorProperties, _fill_properties),
            _kind(dcp_metadata.MetadataIndex, _fill_index),
            _kind(dcp_metadata.StorageMeta, _fill_storage_meta),
        )
    },
    (_TORCH_METADATA, "_MEM_FORMAT_ENCODING"): _MEMORY_FORMAT,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _kind(_StorageInfo, _fill_storage_info),
    ("torch", "Size"): Call(_size),
    ("torch.serialization", "_get_layout"): _one_of("layout", _LAYOUTS),
    **{
        (module, name): Call(make)
        for module in ("builtins", "__builtin__")  # protocol 2 has Python 2's names
        for name, make in (
            ("complex", as_complex),
            # ``TensorTable`` in a file of torch's writer.
            ("dict", as_dict),
            ("frozenset", as_frozenset),
            ("getattr", _member),
            ("set", as_set),
        )
    },
    ("collections", "OrderedDict"): Call(ordered_dict),
    # `StorageMeta.checkpoint_id` is the path of the save. Only its text matters here, and Linux cannot make a
    # Windows path.
    **{
        (module, name): _path(pure)
        for module in ("pathlib", "pathlib._local")  # Python 3.13 moved them
        for name, pure in (
            ("PosixPath", Path),
            ("PurePosixPath", PurePosixPath),
            ("WindowsPath", PureWindowsPath),
            ("PureWindowsPath", PureWindowsPath),
        )
    },
}


def _of_torch(module: str, name: str) -> Any:
    # Exactly one name: a dotted one must not reach other objects.
    value = torch.__dict__.get(name) if module == "torch" else None
    if not isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        raise Refused(f"{module}.{name}")
    return value


VOCABULARY = Vocabulary(
    _NAMES,
    _of_torch,
    keys=frozenset({dcp_metadata.MetadataIndex, torch.Size}),
    tables=partial(metadata_rows.tables, [*map(_NAMES.__getitem__, metadata_opcodes.CLASSES), *metadata_opcodes.WORDS]),
)
_LEAVES = (
    torch.dtype,
    torch.layout,
    torch.memory_format,
    torch.Size,
    PurePath,
    dcp_metadata.MetadataIndex,
    dcp_metadata.ChunkStorageMetadata,
    dcp_metadata.BytesStorageMetadata,
    dcp_metadata.TensorProperties,
)


def is_leaf(value: Any) -> bool:
    """Whether plain data may contain ``value``: it is immutable, and its contents were checked."""
    return isinstance(value, _LEAVES)
