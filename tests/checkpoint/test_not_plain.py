"""Tensors whose memory is not their whole content: each is saved as torch saves it, or refused by name."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint import CheckpointException

from tunetool.checkpoint import metadata
from tunetool.checkpoint.writer import DirectWriter

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage"),
    pytest.mark.filterwarnings("ignore:.*quantiz.*deprecated"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
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


def item(path: Path, name: str) -> bytes:
    stored = metadata.read(path).storage_data
    (stored_at,) = (stored_at for index, stored_at in stored.items() if index.fqn == name)
    content = (path / stored_at.relative_path).read_bytes()
    return bytes(content[stored_at.offset : stored_at.offset + stored_at.length])


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


AS_TORCH: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: torch.eye(4).to_sparse(),
    "rows": lambda: torch.eye(4).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.arange(4.0), 0.5, 1, torch.qint8),
}


@pytest.mark.parametrize("make", AS_TORCH.values(), ids=AS_TORCH)
def test_what_torch_alone_understands_is_saved_as_torch_does(make: Callable[[], torch.Tensor], tmp_path: Path) -> None:
    tensor = make()
    dcp.save({"odd": tensor}, storage_writer=DirectWriter(tmp_path))
    stream = io.BytesIO()
    torch.save(tensor, stream)
    loaded = torch.load(io.BytesIO(item(tmp_path, "odd")), weights_only=True)
    expected = torch.load(io.BytesIO(stream.getvalue()), weights_only=True)
    assert type(loaded) is type(expected)
    assert (loaded.layout, loaded.dtype, str(loaded)) == (expected.layout, expected.dtype, str(expected))


def test_a_wrapper_without_memory_is_saved_as_torch_does(tmp_path: Path) -> None:
    dcp.save({"odd": Wrapper()}, storage_writer=DirectWriter(tmp_path))
    loaded = torch.load(io.BytesIO(item(tmp_path, "odd")), weights_only=False)
    assert type(loaded) is Wrapper
    assert loaded.shape == (64, 64)


def test_a_quantized_subclass_keeps_its_scale(tmp_path: Path) -> None:
    dcp.save({"odd": Eighths(torch.arange(8, dtype=torch.int8), 0.125)}, storage_writer=DirectWriter(tmp_path))
    loaded = torch.load(io.BytesIO(item(tmp_path, "odd")), weights_only=False)
    assert type(loaded) is Eighths
    assert loaded.scale == 0.125


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
