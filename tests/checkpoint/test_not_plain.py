"""Tensors whose memory is not their whole content: each is saved as torch saves it, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner

from tunetool.checkpoint.planner import DirectSavePlanner
from tunetool.checkpoint.reader import DirectReader
from tunetool.checkpoint.writer import DirectWriter

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage"),
    pytest.mark.filterwarnings("ignore:.*quantiz.*deprecated"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),
]


class Wrapper(torch.Tensor):
    """A tensor of 64 x 64 elements without memory."""

    @staticmethod
    def __new__(cls) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, (64, 64), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.is_pinned.default:
            return False
        if function is torch.ops.aten.detach.default:
            return cls()
        raise NotImplementedError(f"{function} is not for a wrapper")


class Eighths(torch.Tensor):
    """A quantized tensor: eight-bit integers and a scale. Its memory holds only the integers."""

    scale: float

    @staticmethod
    def __new__(cls, integers: torch.Tensor, scale: float) -> Any:
        made = torch.Tensor._make_subclass(cls, integers)
        made.scale = scale
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.is_pinned.default:
            return False
        (self,) = args[:1]
        with torch._C._DisableTorchDispatch():
            return cls(torch.Tensor._make_subclass(torch.Tensor, self), self.scale)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C._DisableTorchDispatch():
            return Eighths, (torch.Tensor._make_subclass(torch.Tensor, self), self.scale)


class Renamed(torch.Tensor):
    """A subclass that only has another name."""


def freed(left: int) -> torch.Tensor:
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(left)
    return tensor


REFUSED: dict[str, Callable[[], torch.Tensor]] = {
    "zero": lambda: torch._efficientzerotensor((64, 64)),
    "FakeTensor": lambda: FakeTensorMode().from_tensor(torch.ones(64, 64)),
    "functional": lambda: torch._to_functional_tensor(torch.ones(64, 64)),
    "meta": lambda: torch.ones(64, 64, device="meta"),
    "freed": lambda: freed(0),
    "cut": lambda: freed(1000),
}


@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED)
def test_what_has_no_memory_is_refused_by_name(make: Callable[[], torch.Tensor], tmp_path: Path) -> None:
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"good": torch.ones(3), "odd": make()}, storage_writer=DirectWriter(tmp_path))
    (failure,) = caught.value.failures.values()
    assert str(failure[0]).startswith("`odd`, a `")
    assert "\n" not in str(failure[0])
    assert not list(tmp_path.glob("*.distcp"))
    assert not (tmp_path / ".metadata").exists()


UNREADABLE: dict[str, Callable[[], torch.Tensor]] = {
    "torch.sparse_coo": lambda: torch.eye(4).to_sparse(),
    "torch.sparse_csr": lambda: torch.eye(4).to_sparse_csr(),
    "torch.sparse_csc": lambda: torch.eye(4).to_sparse_csc(),
    "torch.sparse_bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "torch.sparse_bsc": lambda: torch.eye(4).to_sparse_bsc((2, 2)),
    "torch._mkldnn": lambda: torch.eye(4).to_mkldnn(),
    "torch.jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "Wrapper": Wrapper,
    "Eighths": lambda: Eighths(torch.arange(8, dtype=torch.int8), 0.125),
    "torch.uint4": lambda: torch.empty(4, dtype=torch.uint8).view(torch.uint4),
}


OF_TORCH = ("torch._mkldnn", "torch.jagged", "nested", "torch.uint4")
"""Those that torch's own planner refuses, without their names."""


@pytest.mark.parametrize(
    ("planner", "named", "make"),
    [
        (planner, named, make)
        for named, make in UNREADABLE.items()
        for planner in (DirectSavePlanner, *([] if named in OF_TORCH else [DefaultSavePlanner]))
    ],
)
def test_what_no_reader_fills_is_refused_by_name(
    planner: Any, named: str, make: Callable[[], torch.Tensor], tmp_path: Path
) -> None:
    dcp.save({"good": torch.ones(3)}, storage_writer=DirectWriter(tmp_path))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"good": torch.ones(3), "odd": make()}, storage_writer=DirectWriter(tmp_path), planner=planner())
    (failure,) = caught.value.failures.values()
    assert str(failure[0]).startswith("`odd`, a `")
    assert named in str(failure[0])
    assert "\n" not in str(failure[0])
    # The previous checkpoint, and nothing beside it.
    assert sorted(tmp_path.iterdir()) == before


def test_a_large_sparse_tensor_is_refused_before_it_is_cut(tmp_path: Path) -> None:
    odd = torch.sparse_coo_tensor(torch.zeros(2, 1, dtype=torch.int64), torch.ones(1), (1000, 1000))
    planner = DirectSavePlanner(split_above=1 << 20)
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"odd": odd}, storage_writer=DirectWriter(tmp_path), planner=planner)
    (failure,) = caught.value.failures.values()
    assert "`odd`, a `" in str(failure[0])
    assert "torch.sparse_coo" in str(failure[0])


QUANTIZED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "one scale": lambda values: torch.quantize_per_tensor(values, 0.5, 1, torch.qint8),
    "a scale a row": lambda values: torch.quantize_per_channel(
        values, torch.tensor([0.5, 0.25]), torch.tensor([0, 1]), 0, torch.quint8
    ),
}


@pytest.mark.parametrize("reader", [DirectReader, dcp.FileSystemReader])
@pytest.mark.parametrize("quantize", QUANTIZED.values(), ids=QUANTIZED)
def test_a_quantized_tensor_comes_back_with_its_scales(
    quantize: Callable[[torch.Tensor], torch.Tensor], reader: Any, tmp_path: Path
) -> None:
    tensor = quantize(torch.arange(8.0).reshape(2, 4))
    dcp.save({"odd": tensor}, storage_writer=DirectWriter(tmp_path, checksums=True))
    loaded = quantize(torch.zeros(2, 4))
    dcp.load({"odd": loaded}, storage_reader=reader(tmp_path))
    assert torch.equal(loaded.int_repr(), tensor.int_repr())
    assert str(loaded) == str(tensor)


DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_in_both_readers_or_is_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    if str(dtype).startswith(("torch.qu", "torch.qi")):
        tensor = torch._empty_affine_quantized([4], scale=0.5, zero_point=1, dtype=dtype)
    else:
        tensor = torch.tensor([1, 0, 1, 1] * dtype.itemsize, dtype=torch.uint8).view(dtype)
    try:
        dcp.save({"odd": tensor}, storage_writer=DirectWriter(tmp_path), planner=DirectSavePlanner())
    except CheckpointException as refused:
        (failure,) = refused.failures.values()
        assert str(failure[0]).startswith("`odd`, a `Tensor`, cannot be saved: ")
        assert not list(tmp_path.iterdir())
        return
    for reader in (DirectReader, dcp.FileSystemReader):
        loaded = torch.empty_like(tensor)
        loaded.untyped_storage().fill_(0)
        dcp.load({"odd": loaded}, storage_reader=reader(tmp_path))
        assert bytes(loaded.untyped_storage()) == bytes(tensor.untyped_storage())


@pytest.mark.parametrize("convert", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_a_sparse_target_is_refused_by_name(convert: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path) -> None:
    dcp.save({"odd": torch.eye(4)}, storage_writer=DirectWriter(tmp_path))
    of = convert(torch.eye(4))
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"odd": of}, storage_reader=DirectReader(tmp_path))
    (failure,) = caught.value.failures.values()
    assert "`odd`" in str(failure[0])
    assert str(of.layout) in str(failure[0])
    assert "\n" not in str(failure[0])


def test_all_that_is_memory_comes_back_in_torchs_reader(tmp_path: Path) -> None:
    waves = torch.complex(torch.arange(6.0), torch.arange(6.0) + 1)
    state = {
        "conjugate": waves.conj(),
        "negative": waves.conj().imag,
        "parameter": torch.nn.Parameter(torch.randn(3, 4)),
        "buffer": torch.nn.Buffer(torch.randn(3)),
        "renamed": torch.randn(5).as_subclass(Renamed),
        "expanded": torch.randn(3, 1).expand(3, 7),
        "overlapping": torch.arange(20.0).as_strided((6, 5), (2, 1)),
        "empty": torch.empty(0, 4),
        "empty, freed": torch.empty(4, 0),
        "one": torch.tensor(3),
        "part": torch.arange(100.0)[10:20:3],
        "last": torch.arange(100.0)[99:],
    }
    expected = {name: value.detach().clone().resolve_conj().resolve_neg() for name, value in state.items()}
    dcp.save(state, storage_writer=DirectWriter(tmp_path, checksums=True))
    loaded = {name: torch.zeros_like(value).as_subclass(torch.Tensor) for name, value in expected.items()}
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(tmp_path))
    for name, value in expected.items():
        assert torch.equal(loaded[name], value.as_subclass(torch.Tensor)), name
