"""The writer's path for GPUDirect Storage. Only cuFile is replaced: GPU memory is host memory
here, and a stand-in for its library writes with the kernel's call."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tunetool.checkpoint import DirectReader, DirectSavePlanner, DirectWriter, gds, rank_layout
from tunetool.errors import CannotJudge, TunetoolError, UsageProblem

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
MIB = 1 << 20


class Cufile:
    """The functions of ``cuda.bindings.cufile`` that the writer calls."""

    BoolConfigParameter = SimpleNamespace(PROPERTIES_ALLOW_COMPAT_MODE=1)
    FileHandleType = SimpleNamespace(OPAQUE_FD=1)

    def __init__(self) -> None:
        self.settings: dict[int, bool] = {}
        self.opened = False
        self.described: dict[int, Any] = {}
        self.registered: set[int] = set()
        self.writes: list[tuple[int, int]] = []
        self.refuses = self.short = False

    def Descr(self) -> Any:  # noqa: N802  (its name there)
        made = SimpleNamespace(type=0, handle=SimpleNamespace(fd=-1), fs_ops=77)
        made.ptr = id(made)
        self.described[made.ptr] = made
        return made

    def set_parameter_bool(self, name: int, value: bool) -> None:
        assert not self.opened, "cuFile takes settings before its driver is open"
        self.settings[name] = value

    def driver_open(self) -> None:
        assert self.settings == {1: False}
        self.opened = True

    def handle_register(self, address: int) -> int:
        description = self.described[address]
        assert (description.type, description.fs_ops) == (1, 0)
        if self.refuses:
            raise RuntimeError("IO_NOT_SUPPORTED (5027)")
        self.registered.add(description.handle.fd)
        return int(description.handle.fd)

    def handle_deregister(self, handle: int) -> None:
        os.fstat(handle)
        self.registered.remove(handle)

    def write(self, handle: int, address: int, count: int, offset: int, shift: int) -> int:
        assert handle in self.registered
        assert shift == 0
        self.writes.append((offset, count))
        if self.short:
            return -28
        memory = (ctypes.c_char * count).from_address(address)
        # The stand-in must not depend on the alignment that O_DIRECT asks of host memory.
        copy = memoryview(memory).tobytes()
        with Path(f"/proc/self/fd/{handle}").open("r+b", buffering=0) as stream:
            return os.pwrite(stream.fileno(), copy, offset)


@pytest.fixture
def cufile(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cufile]:
    made = Cufile()
    monkeypatch.setattr(gds, "bindings", lambda: made)
    by_address = rank_layout._by_address

    def on_gpu(tensor: torch.Tensor, gpus: dict[torch.device, int]) -> Any:
        """Host memory, as if it were a GPU's."""
        row = by_address(tensor, gpus)
        return row and (*row[:2], gpus.setdefault(tensor.device, 1), *row[3:])

    monkeypatch.setattr(rank_layout, "_by_address", on_gpu)
    gds.library.cache_clear()
    yield made
    gds.library.cache_clear()
    assert made.registered == set()


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    return {
        "large": torch.randn(3 * MIB // 4 * 5 + 3, generator=generator),
        "bf16": torch.randn(2 * MIB + 1, generator=generator).bfloat16(),
        "small": torch.arange(10),
        "turned": torch.randn(1024, 1024, generator=generator).t(),
        "object": {"step": 7},
    }


def save(path: Path, writer: DirectWriter) -> None:
    del path
    dcp.save(state(), storage_writer=writer, planner=DirectSavePlanner(), no_dist=True)


@pytest.mark.parametrize("reader", [dcp.FileSystemReader, DirectReader])
def test_large_tensors_go_by_cufile_and_come_back_as_they_were(tmp_path: Path, cufile: Cufile, reader: Any) -> None:
    writer = DirectWriter(tmp_path / "c", gds=True, threads=3, buffer_bytes=MIB)
    save(tmp_path, writer)
    like = {
        key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else {"step": 0}
        for key, value in state().items()
    }
    dcp.load(like, storage_reader=reader(tmp_path / "c"), no_dist=True)
    for key, value in state().items():
        assert torch.equal(like[key], value) if isinstance(value, torch.Tensor) else like[key] == value
    assert writer.last is not None
    moved = sum(count for _, count in cufile.writes)
    # The whole blocks of the two large contiguous tensors; their ends and all other tensors go through the host.
    whole = sum(state()[key].nbytes // 4096 * 4096 for key in ("large", "bf16"))
    assert moved == writer.last.gds_bytes == whole
    assert all(offset % 4096 == 0 and count % 4096 == 0 for offset, count in cufile.writes)


@pytest.mark.parametrize(("fault", "said"), [("refuses", "5027"), ("short", "No space left")])
def test_a_file_that_cufile_refuses_leaves_the_old_checkpoint(
    tmp_path: Path, cufile: Cufile, fault: str, said: str
) -> None:
    save(tmp_path, DirectWriter(tmp_path / "c"))
    before = sorted(path.name for path in (tmp_path / "c").iterdir())
    setattr(cufile, fault, True)
    with pytest.raises(CheckpointException, match=said) as caught:
        save(tmp_path, DirectWriter(tmp_path / "c", gds=True))
    assert "c/__0_" in str(caught.value)
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == before


def test_checksums_need_the_host(tmp_path: Path, cufile: Cufile) -> None:
    with pytest.raises(UsageProblem, match="exclude each other"):
        DirectWriter(tmp_path, gds=True, checksums=True)


def test_without_a_gpu_the_library_says_what_is_wrong_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # libcufile writes its log to the current directory
    if Path("/dev/nvidiactl").exists():
        pytest.skip("there is a GPU here")
    with pytest.raises(TunetoolError, match="cuFile") as caught:
        DirectWriter(tmp_path / "c", gds=True)
    assert isinstance(caught.value, CannotJudge | UsageProblem)
    assert "gds=False" in str(caught.value.hint)
    assert not (tmp_path / "c").exists()
