"""Malicious `.metadata` and tensors: reading them changes nothing in this process, and it ends."""

from __future__ import annotations

import collections
import enum
import inspect
import io
import os
import pathlib
import pickle
import pickletools
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.filesystem as torch_filesystem
import torch.distributed.checkpoint.metadata as torch_metadata
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tunetool.checkpoint import archive, metadata, pickled, plain, vocabulary
from tunetool.checkpoint.planner import DirectSavePlanner
from tunetool.checkpoint.writer import DirectWriter
from tunetool.errors import UsageProblem

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

PLACE = Path("step-1/.metadata")
WATCHED = (
    *(value for module in (torch_metadata, torch_filesystem) for value in vars(module).values()
      if isinstance(value, type) and value.__module__ == module.__name__),
    *torch_metadata._MEM_FORMAT_ENCODING,
    *(value for value in vars(pathlib).values() if isinstance(value, type)),
    *(value for module in (archive, metadata, pickled, plain, vocabulary) for value in vars(module).values()
      if inspect.isfunction(value) or (isinstance(value, type) and value.__module__ == module.__name__)),
    *vocabulary._NAMES.values(),
    torch.serialization._get_layout, torch.Size, collections.OrderedDict, dict, list, set, frozenset, complex, tuple,
)  # fmt: skip
"""Objects that a file could name or reach, and those that read it."""


def state_of_the_process() -> list[Any]:
    """Every attribute of the watched objects, with the defaults of functions."""
    parts = []
    for watched in WATCHED:
        parts.append(dict(vars(watched)) if hasattr(watched, "__dict__") else None)
        if inspect.isfunction(watched):
            parts.append((watched.__defaults__, watched.__kwdefaults__, watched.__code__))
        if isinstance(watched, pickled.Kind):
            parts.append((watched.of, watched.new, watched.fill))
        if isinstance(watched, pickled.Call):
            parts.append(watched.make)
    # Python and torch change these two themselves.
    for each in parts:
        if isinstance(each, dict):
            for cached in ("__abstractmethods__", "_abc_impl", "__hash_cache__", "cache"):
                each.pop(cached, None)
    return parts


def describing() -> torch_metadata.Metadata:
    """Metadata with one of everything."""
    size, zeros = torch.Size([4, 3]), torch.Size([0, 0])
    half = torch.Size([2, 3])
    kinds: dict[str, Any] = {
        "whole": torch_metadata.TensorStorageMetadata(
            torch_metadata.TensorProperties(torch.bfloat16), size, [torch_metadata.ChunkStorageMetadata(zeros, size)]
        ),
        "cut": torch_metadata.TensorStorageMetadata(
            torch_metadata.TensorProperties(memory_format=torch.channels_last, requires_grad=True),
            size,
            [
                torch_metadata.ChunkStorageMetadata(zeros, half),
                torch_metadata.ChunkStorageMetadata(torch.Size([2, 0]), half),
            ],
        ),
        "scalar": torch_metadata.TensorStorageMetadata(
            torch_metadata.TensorProperties(torch.float64),
            torch.Size([]),
            [torch_metadata.ChunkStorageMetadata(torch.Size([]), torch.Size([]))],
        ),
        "step": torch_metadata.BytesStorageMetadata(),
    }
    stored = {
        torch_metadata.MetadataIndex("whole", zeros, 0): _StorageInfo("__0_0.distcp", 0, 24),
        torch_metadata.MetadataIndex("cut", zeros, 0): _StorageInfo("__0_0.distcp", 24, 300),
        torch_metadata.MetadataIndex("cut", torch.Size([2, 0]), 1): _StorageInfo("a/__1_0.distcp", 2**40, 70000),
        torch_metadata.MetadataIndex("scalar", torch.Size([])): _StorageInfo("__1_0.distcp", 0, 8, ["zstd"]),
        torch_metadata.MetadataIndex("step"): _StorageInfo("__1_0.distcp", 8, 1),
    }
    planned = {
        "whole": ("model", "whole"),
        "list.0": ("list", 0),
        "more": [1.5, {"x": {1, 2}}, frozenset(["ab"]), None],
    }
    meta = torch_metadata.StorageMeta(Path("/scratch/step-1"), "save", modules=["model"])
    return torch_metadata.Metadata(kinds, planned, stored, meta, "1.0.0")


REAL = [pickle.dumps(describing(), protocol) for protocol in range(2, 6)]


@pytest.mark.parametrize("content", REAL, ids=[f"protocol {number}" for number in range(2, 6)])
def test_every_protocol_gives_what_python_gives(content: bytes) -> None:
    loaded = metadata.loads(content, PLACE)
    free = pickle.loads(content)
    assert loaded == free
    # Identical, not only equal: comparison leaves out some fields, and the classes.
    assert pickle.dumps(loaded) == pickle.dumps(free)


def short(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def named(module: str, name: str) -> bytes:
    return short(module) + short(name) + b"\x93"


class AsPython3112(pickle.Pickler):
    """Pickles members of enumerations as Python 3.11.0 to 3.11.3 does, which is Debian 12's."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


def as_python_3_11_2(value: Any, protocol: int) -> bytes:
    written = io.BytesIO()
    AsPython3112(written, protocol).dump(value)
    return written.getvalue()


@pytest.mark.parametrize("protocol", range(2, 6))
def test_metadata_that_debian_12_wrote_is_read(protocol: int) -> None:
    content = as_python_3_11_2(describing(), protocol)
    assert b"getattr" in content
    loaded = metadata.loads(content, PLACE)
    assert loaded == pickle.loads(content)
    assert pickle.dumps(loaded) == pickle.dumps(describing())


@pytest.mark.parametrize(
    "reached",
    [
        named("torch", "float32") + short("__class__"),
        named("torch.distributed.checkpoint.metadata", "Metadata") + short("__init__"),
        named("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING") + short("__class__"),
        named("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING") + b"K\x00",
        named("builtins", "getattr") + short("__self__"),
    ],
)
def test_getattr_reaches_nothing_but_a_memory_format(reached: bytes) -> None:
    before = state_of_the_process()
    with pytest.raises(UsageProblem, match=r"builtins\.getattr|memory format"):
        metadata.loads(b"\x80\x04" + named("builtins", "getattr") + reached + b"\x86R.", PLACE)
    assert state_of_the_process() == before


def built_on_a_class(module: str, name: str, attribute: str) -> bytes:
    """``class.attribute = class``, by BUILD with a state of slots, in front of the metadata."""
    state = b"N}" + short(attribute) + named("builtins", "dict") + b"s\x86"
    return b"\x80\x04" + named(module, name) + state + b"b0" + REAL[2][2:]


@pytest.mark.parametrize(
    ("module", "name", "attribute"),
    [
        ("pathlib", "PurePosixPath", "is_absolute"),
        ("torch.distributed.checkpoint.metadata", "MetadataIndex", "__hash__"),
        ("torch.distributed.checkpoint.metadata", "Metadata", "planner_data"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo", "relative_path"),
        ("torch.serialization", "_get_layout", "cache"),
    ],
)
def test_no_attribute_of_a_class_is_set(module: str, name: str, attribute: str) -> None:
    content = built_on_a_class(module, name, attribute).replace(named("builtins", "dict"), named("torch", "float32"))
    target = getattr(__import__(module, fromlist=[name]), name)
    before = vars(target).get(attribute)
    # A file of before this was refused would have left the attribute set, and every later test with it.
    try:
        with pytest.raises(UsageProblem, match="cannot be read as a checkpoint's metadata"):
            metadata.loads(content, PLACE)
        assert vars(target).get(attribute) is before
    finally:
        if vars(target).get(attribute) is not before:
            setattr(target, attribute, before) if before is not None else delattr(target, attribute)


def test_no_member_of_an_enumeration_is_changed() -> None:
    content = (
        b"\x80\x04" + named("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING") + b"K\x00\x85R}"
        + short("_value_") + b"K\x05sb."
    )  # fmt: skip
    with pytest.raises(UsageProblem):
        metadata.loads(content, PLACE)
    assert torch_metadata._MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT.value == 0


def test_what_was_checked_is_not_changed_afterwards() -> None:
    """Set the file's path again, by a second BUILD of the same object."""
    inside = pickle.dumps(_StorageInfo("a", 0, 1), 4)
    again = (
        b"}("
        + short("relative_path")
        + short("/etc/passwd")
        + short("offset")
        + b"K\x00"
        + short("length")
        + b"K\x01ub"
    )
    with pytest.raises(UsageProblem, match="sets attributes of a `_StorageInfo`"):
        metadata.loads(inside[:-1] + again + b".", PLACE)


@pytest.mark.parametrize(
    "content",
    [
        # t = (); t = (t, t), 60 times, as a key: its hash takes 2**60 steps.
        b"\x80\x04})" + b"".join(b"q" + bytes([n]) + b"h" + bytes([n]) + b"\x86" for n in range(60)) + b"K\x01s.",
        b"\x80\x04})" + b"\x85" * 200_000 + b"K\x01s.",
        b"\x80\x04(})" + b"\x85" * 200_000 + b"K\x01u.",
        b"\x80\x04\x8f()" + b"\x85" * 200_000 + b"\x90.",
        b"\x80\x04()" + b"\x85" * 200_000 + b"\x91.",
        b"\x80\x04" + named("builtins", "set") + b"](" + b")" + b"\x85" * 200_000 + b"e\x85R.",
        b"\x80\x04" + b"(" * 2_000_000 + b".",
        b"\x80\x04" + b"]" * 2_000_000 + b".",
        b"\x80\x04\x8b" + struct.pack("<i", 2**31 - 1) + b"\x01.",
        b"\x80\x04\x8a\xff" + b"\x7f" * 255 + b".",
        b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b"x.",
        b"\x80\x04Nr\xff\xff\xff\xff.",
        b"\x80\x04" + named("torch", "Size") + b"(" + b"K\x01" * 100_000 + b"t\x85R.",
        b"I" + b"9" * 100_000 + b"\n.",
    ],
    ids=[
        "exponential", "deep", "deep, many", "deep in a set", "deep, frozen", "deep in a made set", "marks", "lists",
        "long", "integer", "length", "memo", "shape", "text",
    ],
)  # fmt: skip
def test_reading_ends(content: bytes) -> None:
    with pytest.raises(UsageProblem, match="cannot be read as a checkpoint's metadata"):
        metadata.loads(content, PLACE)


def nested(levels: int, opening: str) -> Any:
    made: Any = 1
    for _ in range(levels):
        made = [made] if opening == "[" else {"a": made}
    return made


@pytest.mark.parametrize("opening", ["[", "{"])
def test_planner_data_is_nested_within_reason(opening: str) -> None:
    content = pickle.dumps(torch_metadata.Metadata({}, nested(40, opening), {}))
    assert metadata.loads(content, PLACE).planner_data == nested(40, opening)
    # Python's own pickler would not nest deeper than the interpreter's stack.
    inner = b"]" * 5000 + b"a" * 4999
    with pytest.raises(UsageProblem, match="nested too deeply"):
        metadata.loads(
            pickle.dumps(torch_metadata.Metadata({}, "x", {}), 4).replace(short("x") + b"\x94", inner), PLACE
        )


def test_a_field_that_the_class_has_no_value_for_is_there() -> None:
    """A newer torch may have renamed it."""
    loaded = metadata.loads(pickle.dumps(describing(), 4).replace(short("modules"), short("m0dules")), PLACE)
    assert loaded.storage_meta is not None
    assert loaded.storage_meta.modules == []
    assert "m0dules" in vars(loaded.storage_meta)
    valid(loaded)


def test_a_class_is_no_data() -> None:
    """The object that replaces a class while reading must not be returned."""
    content = pickle.dumps(torch_metadata.Metadata({}, "x", {}), 4)
    for name in (named("builtins", "set"), named("pathlib", "PosixPath"), named("torch", "Size")):
        with pytest.raises(UsageProblem, match="planner's data"):
            metadata.loads(content.replace(short("x") + b"\x94", name), PLACE)


def test_a_fifo_in_place_of_metadata_does_not_hold_the_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".metadata")
    with pytest.raises(UsageProblem, match=r"`.*\.metadata` cannot be read: it is not a regular file"):
        metadata.read(tmp_path)
    with pytest.raises(UsageProblem, match="it is not a regular file"):
        metadata.named_in(tmp_path)


def judge(content: bytes) -> torch_metadata.Metadata | None:
    """The result; None if the content is refused in the right way."""
    before = state_of_the_process()
    refusal: UsageProblem | None = None
    loaded = None
    try:
        loaded = metadata.loads(content, PLACE)
    except UsageProblem as error:
        refusal = error
    assert state_of_the_process() == before
    if refusal is not None:
        assert refusal.message.startswith(f"`{PLACE}` ")
        assert refusal.message.isprintable()
    return loaded


def valid(loaded: torch_metadata.Metadata) -> None:
    """Assert what the readers rely on."""
    for name, entry in loaded.state_dict_metadata.items():
        assert type(name) is str
        assert type(entry) in (torch_metadata.TensorStorageMetadata, torch_metadata.BytesStorageMetadata)
        if type(entry) is torch_metadata.TensorStorageMetadata:
            assert all(len(chunk.offsets) == len(chunk.sizes) == len(entry.size) for chunk in entry.chunks)
            assert type(entry.properties.dtype) is torch.dtype
    for index, stored in (loaded.storage_data or {}).items():
        assert type(index.fqn) is str
        assert metadata.is_inside(stored.relative_path)
        assert stored.offset >= 0
        assert stored.length >= 0
    assert type(hash(repr(loaded))) is int


PARTS = [
    *(bytes([opcode]) for opcode in range(256)),
    *(opcode.code.encode("latin-1") for opcode in pickletools.opcodes),
    *(named(module, name) for module, name in vocabulary._NAMES),
    *(b"c" + module.encode() + b"\n" + name.encode() + b"\n" for module, name in vocabulary._NAMES),
    named("torch", "float32"), named("os", "system"), named("builtins", "getattr"), b")\x81\x94", b"}\x94(", b"ub",
    b"b", b"N}" + short("__class__") + b"h\x00s\x86b", short("fqn"), short("relative_path"), short("/etc/passwd"),
    b"K\x00", b"\x85R", b"\x86R", b")R", b"h\x00", b"h\x01", b"j\x02\x00\x00\x00", b".",
]  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """Real metadata with cuts, changed bytes, and parts that were inserted or moved."""
    content = bytearray(draw(st.sampled_from(REAL)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(content)))
        how = draw(st.integers(0, 4))
        if how == 0 and at < len(content):
            content[at] = draw(st.integers(0, 255))
        elif how == 1:
            content[at:at] = draw(st.sampled_from(PARTS))
        elif how == 2:
            del content[at : at + draw(st.integers(1, 12))]
        elif how == 3:
            start = draw(st.integers(0, len(content)))
            content[at:at] = content[start : start + draw(st.integers(1, 40))]
        else:
            del content[at:]
    return bytes(content)


STREAMS = st.one_of(
    mutated(),
    st.lists(st.sampled_from(PARTS), max_size=60).map(lambda parts: b"\x80\x04" + b"".join(parts) + b"."),
    st.binary(max_size=200),
)


@settings(max_examples=600, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(STREAMS)
def test_made_up_metadata_is_refused_or_valid(content: bytes) -> None:
    loaded = judge(content)
    if loaded is not None:
        valid(loaded)


@pytest.mark.slow
@settings(max_examples=60_000, suppress_health_check=[HealthCheck.too_slow])
@given(STREAMS)
def test_much_made_up_metadata_is_refused_or_valid(content: bytes) -> None:
    loaded = judge(content)
    if loaded is not None:
        valid(loaded)


def saved_pickle() -> bytes:
    return archive_recipe(torch.zeros(3, 4))


def archive_recipe(tensor: torch.Tensor) -> bytes:
    stream = io.BytesIO()
    torch.save(tensor, stream)
    content = stream.getvalue()
    start = content.index(b"\x80\x02")
    return content[start : content.index(b".", start + 150) + 1]


def test_a_saved_tensors_pickle_sets_no_attribute_of_its_reader() -> None:
    """BUILD on the function that stands for torch's: ``f.__defaults__ = (1,)``."""
    recipe = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nN}X\x0c\x00\x00\x00__defaults__K\x01\x85s\x86b."
    before = state_of_the_process()
    with pytest.raises(plain.Malformed):
        archive._tensor(recipe)
    assert state_of_the_process() == before


@settings(max_examples=300, derandomize=True)
@given(st.data())
def test_made_up_tensors_are_left_to_torch_or_plain(data: st.DataObject) -> None:
    recipe = bytearray(saved_pickle())
    assert archive._tensor(bytes(recipe)) == ("float32", (3, 4))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(recipe) - 1))
        if data.draw(st.booleans()):
            recipe[at] = data.draw(st.integers(0, 255))
        else:
            recipe[at:at] = data.draw(st.sampled_from(PARTS))
    before = state_of_the_process()
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as made:
        for name, content in {"data.pkl": bytes(recipe), "byteorder": b"little", "data/0": bytes(48)}.items():
            made.writestr(f"archive/{name}", content)
    item = stream.getvalue()
    located = archive.find(lambda offset, count: item[offset : offset + count], len(item))
    assert state_of_the_process() == before
    if located is not None:
        assert all(type(size) is int and size >= 0 for size in located.shape)
        assert located.length == 48


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("writer", ["torch", "ours"])
@pytest.mark.parametrize("planner", ["flat", "as it is", "plan cache", "direct"])
def test_what_every_planner_writes_is_read_as_it_was(writer: str, planner: str, one_rank: None, tmp_path: Path) -> None:
    """FSDP, DTensor, plain tensors, numbers, bytes and objects, by each planner."""
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("data",))
    model = fully_shard(Net(), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    parameters, moments = get_state_dict(model, optimizer)
    state = {
        "model": parameters,
        "optimizer": moments,
        "mesh": distribute_tensor(torch.randn(4, 6), mesh, [Shard(0)]),
        "copies": distribute_tensor(torch.randn(4), mesh, [Replicate()]),
        "list": [torch.ones(2), {"deep": torch.zeros(())}],
        "raw": b"bytes",
        "file": io.BytesIO(b"more"),
        "step": 7,
        "name": "text",
    }
    if planner == "as it is":
        state = {name: value for name, value in state.items() if name not in ("model", "optimizer", "list")}
    planners: dict[str, Any] = {
        "flat": dcp.DefaultSavePlanner(),
        "as it is": dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        "plan cache": dcp.DefaultSavePlanner(enable_plan_caching=True),
        "direct": DirectSavePlanner(split_above=100),
    }
    storage: Any = dcp.FileSystemWriter(tmp_path) if writer == "torch" else DirectWriter(tmp_path)
    dcp.save(state, storage_writer=storage, planner=planners[planner])
    content = (tmp_path / ".metadata").read_bytes()
    ours, free = metadata.read(tmp_path), pickle.loads(content)
    assert ours == free
    # Also what torch does not compare; equal sizes and properties may be one object here.
    assert repr(ours) == repr(free)
    assert len(ours.storage_data) >= 6
