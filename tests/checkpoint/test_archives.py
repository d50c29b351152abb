"""torch reads the archives that tunetool makes without torch."""

from __future__ import annotations

import io
import math
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tunetool.checkpoint.items import Archive

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

DTYPES = sorted(
    (
        value
        for value in vars(torch).values()
        if isinstance(value, torch.dtype)
        and not str(value).startswith(("torch.q", "torch.bits", "torch.uint1.", "torch.int1."))
    ),
    key=str,
)


def can_be_made(dtype: torch.dtype) -> bool:
    """The dtypes with tensors: in this version of torch some are only names (uint3 ...)."""
    try:
        torch.save(torch.zeros(2, dtype=torch.uint8).view(dtype), io.BytesIO())
    except (RuntimeError, NotImplementedError, TypeError, AttributeError, KeyError):
        return torch.zeros((), dtype=torch.uint8).element_size() < dtype.itemsize
    return True


DTYPES = [dtype for dtype in DTYPES if can_be_made(dtype)]


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@settings(max_examples=300)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.one_of(st.lists(st.integers(0, 5), max_size=6), st.tuples(st.integers(0, 70000))).map(tuple),
)
def test_torch_loads_the_same_and_would_write_the_same_pickle(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    count = math.prod(shape)
    # 0 and 1 are values of every dtype, bool too.
    tensor = torch.randint(0, 2, (count * dtype.itemsize,), dtype=torch.uint8).view(dtype).reshape(shape)
    raw = raw_bytes(tensor)
    archive = Archive(str(dtype).removeprefix("torch."), shape, len(raw))
    content = archive.head + raw + archive.tail

    # The archive is in the middle of a file, as torch's reader gets it.
    loaded = torch.load(io.BytesIO(content), weights_only=True)
    assert (loaded.dtype, tuple(loaded.shape), raw_bytes(loaded)) == (dtype, shape, raw)

    theirs = io.BytesIO()
    torch.save(tensor.clone(), theirs)
    with zipfile.ZipFile(theirs) as expected, zipfile.ZipFile(io.BytesIO(content)) as made:
        assert made.read("archive/data.pkl") == expected.read("archive/data.pkl")


def test_the_dtypes_that_training_uses_are_among_them() -> None:
    assert {torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.bool, torch.complex64} <= {
        *DTYPES
    }


def test_torch_loads_an_archive_of_more_than_4_gib(tmp_path: Path) -> None:
    size = (4 << 30) + 4096
    archive = Archive("uint8", (size,), size)
    path = tmp_path / "sparse"
    with path.open("wb") as stream:
        stream.write(archive.head)
        stream.seek(len(archive.head) + size - 1)
        stream.write(b"\x07" + archive.tail)
    loaded = torch.load(path, weights_only=True, mmap=True)
    assert loaded.shape == (size,)
    assert (int(loaded[0]), int(loaded[-1])) == (0, 7)
