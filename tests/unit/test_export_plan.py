"""The plan of an export: headers that the safetensors library takes, and windows that hold each byte once."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from tunetool import safetensors_header
from tunetool.checkpoint.export_plan import NAMES_OF, Tensor, boxes, files_of, index_of, parts
from tunetool.checkpoint.raw_bytes import ITEM_SIZES
from tunetool.checkpoint.renaming import Renaming, to_export, to_import

SHAPES = st.lists(st.integers(0, 9), max_size=4).map(tuple)
TENSORS = st.lists(
    st.builds(Tensor, st.just(""), st.text(max_size=5), st.sampled_from(sorted(NAMES_OF)), SHAPES),
    min_size=1,
    max_size=8,
    unique_by=lambda tensor: tensor.name,
)


@given(SHAPES, st.data())
def test_boxes_are_a_range_of_elements_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    count = math.prod(shape)
    first = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(first, count))
    numbers = []
    for offsets, lengths in boxes(shape, first, stop):
        for place in itertools.product(*(range(at, at + size) for at, size in zip(offsets, lengths, strict=True))):
            number = 0
            for size, at in zip(shape, place, strict=True):
                number = number * size + at
            numbers.append(number)
    assert numbers == [*range(first, stop)]


@given(TENSORS, st.integers(1, 40_000), st.sampled_from([4096, 8192, 1 << 20]))
def test_windows_hold_every_byte_once(tensors: list[Tensor], shard: int, window: int) -> None:
    files = files_of(tensors, shard)
    assert sorted(placed.tensor for file in files for placed in file.tensors) == sorted(tensors)
    assert index_of(files)["weight_map"].keys() == {tensor.name for tensor in tensors}
    for file in files:
        count = safetensors_header.length(file.header[:8])
        listed = safetensors_header.entries(file.header[8:])
        assert (count, len(file.header) % 4096) == (len(file.header) - 8, 0)
        assert {(entry.name, entry.shape, len(file.header) + entry.begin) for entry in listed} == {
            (tensor.name, tensor.shape, start) for tensor, start in file.tensors
        }
        at = len(file.header)
        for start in range(0, file.length, window):
            stop = min(start + window, file.length)
            for part in parts(file, start, stop):
                assert part.start == at
                assert not part.start % ITEM_SIZES[part.tensor.dtype]
                at += part.bytes
                assert start < at <= stop
        assert at == file.length


@given(TENSORS, st.integers(1, 40_000))
def test_a_file_exceeds_its_size_by_one_tensor_alone(tensors: list[Tensor], shard: int) -> None:
    for file in files_of(tensors, shard):
        assert len(file.tensors) == 1 or sum(placed.tensor.bytes for placed in file.tensors) <= shard


def test_a_prefix_comes_off_first_and_on_last() -> None:
    assert to_export(["model.a.w", "other"], Renaming("model.", {"*.w": "w.*"})).names == {"model.a.w": "w.a"}
    assert to_import(["w.a"], Renaming("model.", {"w.*": "*.w"})).names == {"w.a": "model.a.w"}
