"""A flipped bit in `.metadata`, in an object or around a tensor is an error or changes nothing: no other value loads."""

from __future__ import annotations

import io
import itertools
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import seeded
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import CheckpointException

from tunetool.checkpoint import metadata
from tunetool.checkpoint.load_targets import fills
from tunetool.checkpoint.planner import DirectSavePlanner
from tunetool.checkpoint.reader import DirectReader
from tunetool.checkpoint.writer import DirectWriter
from tunetool.errors import UsageProblem

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:.*quantiz.*deprecated"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]
SUM_BYTES = 34
"""The line at the end of `.metadata`."""


def state() -> dict[str, Any]:
    return {"w": torch.arange(1.0, 7.0), "v": torch.arange(7.0, 13.0), "step": 5, "lr": 0.25}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that no test changes."""
    path = tmp_path_factory.mktemp("saved") / "step"
    dcp.save(state(), storage_writer=DirectWriter(path, checksums=True), planner=DirectSavePlanner())
    return path


def loads_otherwise(path: Path, expected: dict[str, Any]) -> str | None:
    """The first value that is loaded without an error and is another than ``expected``."""
    target = seeded.blank(expected)
    try:
        dcp.load(target, storage_reader=DirectReader(path, threads=1))
    except CheckpointException as refused:
        (failure,) = refused.failures.values()
        assert "\n" not in str(failure[0])
        return None
    return seeded.difference(expected, target)


def flips(content: bytes) -> Iterator[tuple[int, bytes]]:
    """The content with one flipped bit, for every bit."""
    for bit in range(8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        yield bit, bytes(changed)


def is_read(content: bytes, path: Path) -> bool:
    try:
        metadata.loads(content, path)
    except UsageProblem:
        return False
    return True


def test_no_flipped_bit_of_metadata_changes_a_value(saved: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(saved, tmp_path / "copy"))
    content = (path / ".metadata").read_bytes()
    read = [bit for bit, changed in flips(content) if is_read(changed, path)]
    assert read == []
    (path / ".metadata").write_bytes(content[:100] + bytes([content[100] ^ 4]) + content[101:])
    with pytest.raises(CheckpointException, match="checksum"):
        dcp.load(state(), storage_reader=DirectReader(path))


def test_no_flipped_bit_without_a_sum_leaves_a_tensor_as_it_was(tmp_path: Path) -> None:
    """As earlier versions, and torch, write it: a checkpoint of tensors, which have checksums. Every thirteenth bit."""
    path, expected = tmp_path / "step", {"w": torch.arange(1.0, 7.0), "v": torch.arange(7.0, 13.0)}
    dcp.save(expected, storage_writer=DirectWriter(path, checksums=True), planner=DirectSavePlanner(split_above=12))
    content = (path / ".metadata").read_bytes()[:-SUM_BYTES]
    read = 0
    for bit, changed in itertools.islice(flips(content), 0, None, 13):
        if is_read(changed, path):
            read += 1
            (path / ".metadata").write_bytes(changed)
            assert loads_otherwise(path, expected) is None, f"bit {bit}"
    assert read


def test_metadata_that_is_cut_short_is_refused(saved: Path) -> None:
    content = (saved / ".metadata").read_bytes()
    whole = len(content) - SUM_BYTES
    assert [length for length in range(len(content)) if is_read(content[:length], saved)] == [whole]


def test_torch_and_python_read_metadata_with_its_sum(saved: Path) -> None:
    content = (saved / ".metadata").read_bytes()
    assert pickle.loads(content) == metadata.loads(content, saved)
    target = seeded.blank(state())
    dcp.load(target, storage_reader=dcp.FileSystemReader(saved))
    assert seeded.difference(state(), target) is None


def test_chunks_that_leave_a_part_out_are_refused_by_name(tmp_path: Path) -> None:
    dcp.save({"good": torch.ones(3), "cut": torch.ones(8)}, storage_writer=dcp.FileSystemWriter(tmp_path))
    described = dcp.FileSystemReader(tmp_path).read_metadata()
    (chunk,) = described.state_dict_metadata["cut"].chunks
    for offsets, sizes in (((0,), (7,)), ((1,), (7,)), ((9,), (8,)), ((2**40,), (8,))):
        moved = type(chunk)(torch.Size(offsets), torch.Size(sizes))
        described.state_dict_metadata["cut"].chunks[:] = [moved]
        (tmp_path / ".metadata").write_bytes(pickle.dumps(described))
        with pytest.raises(CheckpointException, match="`cut` would not be filled"):
            dcp.load({"good": torch.zeros(3), "cut": torch.zeros(8)}, storage_reader=DirectReader(tmp_path))
        good = {"good": torch.zeros(3)}
        dcp.load(good, storage_reader=DirectReader(tmp_path))
        assert torch.equal(good["good"], torch.ones(3))


def test_no_flipped_bit_of_a_data_file_changes_a_value(saved: Path, tmp_path: Path) -> None:
    """Objects, the headers of tensors, their data, and what is between them."""
    path = Path(shutil.copytree(saved, tmp_path / "copy"))
    (file,) = path.glob("*.distcp")
    content = file.read_bytes()
    stop = max(each.offset + each.length for each in metadata.read(path).storage_data.values())
    numbers = np.random.default_rng(29)
    for bit in sorted(numbers.choice(8 * stop, 150, replace=False).tolist()):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        assert loads_otherwise(path, state()) is None, f"bit {bit}"


@pytest.mark.parametrize("name", ["step", "lr"])
def test_a_flipped_bit_of_an_object_is_found_and_named(name: str, saved: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(saved, tmp_path / "copy"))
    (file,) = path.glob("*.distcp")
    content = file.read_bytes()
    (at,) = (stored for index, stored in metadata.read(path).storage_data.items() if index.fqn == name)
    for bit in range(8 * at.offset, 8 * (at.offset + at.length), 251):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        with pytest.raises(CheckpointException, match=f"`{name}` is damaged: .* checksum"):
            dcp.load(seeded.blank(state()), storage_reader=DirectReader(path, threads=1))


@pytest.mark.parametrize("planner", [dcp.DefaultSavePlanner, DirectSavePlanner])
def test_what_torch_saves_has_a_sum_too(planner: Any, tmp_path: Path) -> None:
    quantized = torch.quantize_per_tensor(torch.arange(4.0), 0.5, 1, torch.qint8)
    dcp.save({"q": quantized}, storage_writer=DirectWriter(tmp_path, checksums=True), planner=planner())
    (file,) = tmp_path.glob("*.distcp")
    (at,) = metadata.read(tmp_path).storage_data.values()
    content = bytearray(file.read_bytes())
    stream = io.BytesIO()
    torch.save(quantized, stream)
    assert bytes(content[at.offset : at.offset + at.length]) == stream.getvalue()
    content[at.offset + content[at.offset :].index(quantized.int_repr().numpy().tobytes())] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointException, match="`q` is damaged"):
        dcp.load({"q": quantized.clone()}, storage_reader=DirectReader(tmp_path))
    dcp.load({"q": quantized.clone()}, storage_reader=DirectReader(tmp_path, verify=False))


@st.composite
def boxes_in_a_tensor(draw: Any) -> tuple[list[int], list[Any]]:
    """The cells of a grid, of which some are joined, moved, lost or doubled."""
    size = draw(st.lists(st.integers(0, 5), min_size=0, max_size=3))
    cuts = [sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=2))}) for length in size]
    spans = [list(itertools.pairwise(ends)) or [(0, 0)] for ends in cuts]
    boxes = [
        (tuple(low for low, _ in cell), tuple(high - low for low, high in cell)) for cell in itertools.product(*spans)
    ]
    for _ in range(draw(st.integers(0, 2))):
        pick = draw(st.integers(0, len(boxes) - 1))
        offsets, sizes = boxes[pick]
        by = [draw(st.integers(-1, 1)) for _ in size]
        change = draw(st.sampled_from(["lose", "double", "move", "grow", "split"]))
        if change == "double":
            boxes.append(boxes[pick])
        elif change == "move":
            boxes[pick] = tuple(at + step for at, step in zip(offsets, by, strict=True)), sizes
        elif change == "grow":
            boxes[pick] = offsets, tuple(max(0, long + step) for long, step in zip(sizes, by, strict=True))
        elif change == "split" and size and sizes[0] > 1:
            boxes[pick] = offsets, (1, *sizes[1:])
            boxes.append(((offsets[0] + 1, *offsets[1:]), (sizes[0] - 1, *sizes[1:])))
        elif change == "lose" and len(boxes) > 1:
            del boxes[pick]
    return size, boxes


@given(case=boxes_in_a_tensor())
def test_filled_is_every_element_once(case: tuple[list[int], list[Any]]) -> None:
    size, boxes = case
    counts, outside = np.zeros(size, np.int64), False
    for offsets, sizes in boxes:
        ends = [at + long for at, long in zip(offsets, sizes, strict=True)]
        if 0 not in sizes:
            outside |= any(at < 0 or end > whole for at, end, whole in zip(offsets, ends, size, strict=True))
            counts[tuple(slice(max(0, at), end) for at, end in zip(offsets, ends, strict=True))] += 1
    expected = not outside and bool((counts == 1).all())
    if 0 not in size:
        assert fills(torch.Size(size), boxes) is expected


class Counted(tuple[int, ...]):
    """Counts how often it is compared."""

    __slots__ = ()
    __hash__ = tuple.__hash__
    compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return tuple.__eq__(self, other)


def test_boxes_whose_offsets_have_one_hash_are_not_compared() -> None:
    modulus = (1 << 61) - 1
    boxes = [(Counted(at), (modulus,) * 5) for at in itertools.product(range(0, 4 * modulus, modulus), repeat=5)]
    assert fills(torch.Size([4 * modulus] * 5), boxes)
    assert Counted.compared < len(boxes)
