"""DirectWriter through dcp.save and dcp.async_save, read back by torch's own reader."""

from __future__ import annotations

import errno
import os
import resource
import struct
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from huge_pages import huge_bytes, whole_huge_pages
from tunetool.checkpoint import (
    DirectReader,
    DirectSavePlanner,
    DirectWriter,
    checksums,
    direct,
    filling,
    gpu_sums,
    layout,
    rank_layout,
    release_buffers,
    space,
)
from tunetool.checkpoint.checksums import BLOCK_BYTES
from tunetool.checkpoint.raw_bytes import memory_at
from tunetool.errors import CannotJudge, UsageProblem
from waiting import PATIENCE

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]
MIB = 1 << 20
pytest_plugins = ["huge_tmpfs"]


def loaded(directory: Path) -> dict[str, Any]:
    """The whole checkpoint by torch's reader, nested as it was saved."""
    state: dict[str, Any] = {}
    _load_state_dict(
        state, storage_reader=dcp.FileSystemReader(directory), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    return state


def metadata(directory: Path) -> Metadata:
    content: Metadata = dcp.FileSystemReader(directory).read_metadata()
    return content


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(expected: Any, actual: Any, where: str = "") -> None:
    if isinstance(expected, dict):
        assert expected.keys() == actual.keys(), where
        for key, value in expected.items():
            same(value, actual[key], f"{where}.{key}")
    elif isinstance(expected, torch.Tensor):
        expected = expected.detach().resolve_conj().resolve_neg().contiguous()
        assert (expected.dtype, expected.shape) == (actual.dtype, actual.shape), where
        assert raw_bytes(expected) == raw_bytes(actual), where


def everything() -> dict[str, Any]:
    """A state of 30 MB with each kind of tensor that a state can hold, and with other objects."""
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(1500, 1000, generator=generator)
    tied = torch.randn(1000, 300, generator=generator)
    return {
        "large": weight,
        "bf16": torch.randn(1200, 1001, generator=generator).bfloat16(),
        "fp8": torch.randn(129, 65, generator=generator).to(torch.float8_e4m3fn),
        "nested": {"int": torch.arange(1000), "bool": torch.rand(999, generator=generator) > 0.5, "step": 12},
        "complex": torch.randn(500, 300, dtype=torch.complex64, generator=generator),
        "conj": torch.randn(500, 300, dtype=torch.complex64, generator=generator).conj(),
        "neg": torch.randn(50, dtype=torch.complex64, generator=generator).conj().imag,
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "transposed": torch.randn(1400, 1300, generator=generator).t(),
        "permuted": torch.randn(4, 5, 60, 700, generator=generator).permute(3, 0, 2, 1),
        "strided": torch.randn(3000, 40, generator=generator)[::3, 1::2],
        "expanded": torch.randn(1, 700, generator=generator).expand(600, 700),
        "slice": weight[3:1000],
        "tied": tied,
        "also tied": tied,
        "parameter": torch.nn.Parameter(torch.randn(77, generator=generator)),
        "text": "no tensor",
    }


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    return everything()


@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize("planner", [None, 1 * MIB], ids=["torch's planner", "split"])
@pytest.mark.parametrize("files", [1, 5])
def test_torchs_reader_finds_what_was_saved(
    tmp_path: Path,
    state: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    files: int,
    planner: int | None,
    checksums: bool,
) -> None:
    monkeypatch.setattr("tunetool.checkpoint.rank_layout.FILE_BYTES", MIB)
    writer = DirectWriter(tmp_path / "new/step", threads=4, files_per_rank=files, buffer_bytes=MIB, checksums=checksums)
    dcp.save(state, storage_writer=writer, planner=DirectSavePlanner(split_above=planner) if planner else None)
    same(state, loaded(tmp_path / "new/step"))
    assert writer.last is not None
    assert writer.last.files == files
    data = names(tmp_path / "new/step") - {".metadata"}
    assert len(data) == files
    assert sum((tmp_path / "new/step" / name).stat().st_size for name in data) == writer.last.bytes
    chunks = metadata(tmp_path / "new/step").state_dict_metadata["large"].chunks  # type: ignore[union-attr]
    assert len(chunks) == (6 if planner else 1)
    assert sum(chunk.sizes[0] for chunk in chunks) == 1500


def items_in_files(directory: Path) -> Iterator[tuple[str, bytes, int]]:
    """Each item's name, its bytes, and where in its file it begins."""
    for index, info in metadata(directory).storage_data.items():
        content = (directory / info.relative_path).read_bytes()
        yield index.fqn, content[info.offset : info.offset + info.length], info.offset


def test_raw_bytes_begin_at_whole_blocks_and_have_a_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several threads write the blocks of one tensor, and the first blocks take longest to fill."""
    xxhash = pytest.importorskip("xxhash")
    state = {"a": torch.randn(3_000_001), "b": torch.randn(2000, 1000).t(), "c": torch.randn(7)}
    fill = filling.Filling.fill

    def late(self: filling.Filling, block: layout.Block, *rest: Any) -> Any:
        time.sleep(0.02 if block.number % 4 == 0 else 0)
        return fill(self, block, *rest)

    monkeypatch.setattr(filling.Filling, "fill", late)
    monkeypatch.setattr(direct.Target, "_probe_once", lambda self, directory: (False, 4096))
    dcp.save(
        state, storage_writer=DirectWriter(tmp_path, threads=4, files_per_rank=1, buffer_bytes=MIB, checksums=True)
    )
    (file,) = tmp_path.glob("*.distcp")
    # The table is at the end: rows, sums and a footer.
    content = file.read_bytes()
    start, rows, blocks = struct.unpack_from("<3Q", content, len(content) - 56)
    described = {row[0]: row[1] for row in struct.iter_unpack("<3Q", content[start : start + 24 * rows])}
    sums = content[start + 24 * rows : start + 24 * rows + 8 * blocks]
    assert len(described) == 3
    for name, item, offset in items_in_files(tmp_path):
        raw = raw_bytes(state[name])
        at = item.index(raw)
        assert at > 0
        assert (offset + at) % (4096 if len(raw) >= 65536 else 64) == 0
        assert described[offset + at] == len(raw)
        ends = [*range(BLOCK_BYTES, len(raw) - BLOCK_BYTES + 1, BLOCK_BYTES), len(raw)]
        parts = [raw[start:stop] for start, stop in zip([0, *ends[:-1]], ends, strict=True)]
        assert b"".join(xxhash.xxh3_64_intdigest(part).to_bytes(8, "little") for part in parts) in sums, name
    same(state, loaded(tmp_path))


def watch_data(monkeypatch: pytest.MonkeyPatch, act: Callable[[int, memoryview, int], int]) -> None:
    """Call ``act`` instead of ``os.pwrite`` for data files, but not for the lock."""
    write = os.pwrite
    monkeypatch.setattr(
        os, "pwrite", lambda handle, view, at: act(handle, view, at) if len(view) >= 4096 else write(handle, view, at)
    )


@pytest.mark.parametrize("alignment", [1, 64, 4096])
def test_memory_that_the_drive_takes_is_written_without_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alignment: int
) -> None:
    """``alignment`` is the file system's requirement on memory; torch aligns to 64 bytes."""
    target = direct.Target(tmp_path)
    if alignment < target.memory_alignment:
        monkeypatch.setattr(direct.Target, "_probe_once", lambda self, directory: (False, 1))
    else:
        monkeypatch.setattr(direct.Target, "_probe_once", lambda self, directory: (target.direct, alignment))
    tensor = torch.randn(1 << 20)
    while tensor.data_ptr() % 4096 == 0:
        tensor = torch.randn(1 << 20)
    seen = []
    write = os.pwrite
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes

    def watching(handle: int, view: memoryview, offset: int) -> int:
        address = torch.frombuffer(view, dtype=torch.uint8).data_ptr()
        seen.append(begin <= address < end)
        return write(handle, view, offset)

    watch_data(monkeypatch, watching)
    dcp.save({"x": tensor}, storage_writer=DirectWriter(tmp_path / "step", threads=2, buffer_bytes=MIB))
    assert any(seen) == (alignment <= 64)
    same({"x": tensor}, loaded(tmp_path / "step"))


def test_thousands_of_small_tensors_take_few_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"p{number}": torch.full((number % 50,), number) for number in range(2000)}
    written = []
    write = os.pwrite

    def counting(handle: int, view: memoryview, offset: int) -> int:
        written.append(len(view))
        return write(handle, view, offset)

    watch_data(monkeypatch, counting)
    dcp.save(state, storage_writer=DirectWriter(tmp_path, threads=4))
    same(state, loaded(tmp_path))
    assert len(written) < 40


def test_many_small_tensors_take_no_more_room_than_torchs(tmp_path: Path) -> None:
    state = {f"p{number}": torch.full((8,), float(number)) for number in range(1000)}
    dcp.save(state, storage_writer=DirectWriter(tmp_path / "ours"))
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "torch"))
    ours, theirs = (
        sum(path.stat().st_size for path in (tmp_path / name).glob("*.distcp")) for name in ("ours", "torch")
    )
    assert ours <= theirs
    same(state, loaded(tmp_path / "ours"))


def test_host_memory_of_a_synchronous_save_is_bounded(tmp_path: Path) -> None:
    """Without aligned memory everything goes through the buffers, a transposed tensor piece by piece."""
    release_buffers()
    state = {"t": torch.randn(3000, 8001).t(), "u": torch.randn(4_000_001)[1:]}
    writer = DirectWriter(tmp_path, threads=2, buffer_bytes=MIB)
    peak_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    dcp.save(state, storage_writer=writer)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_before) * 1024
    assert writer.last is not None
    assert writer.last.bytes > 100 * MIB
    assert writer.last.host_bytes == 4 * MIB
    assert grown < 48 * MIB  # threads' stacks and arenas among it
    same(state, loaded(tmp_path))


def test_a_checkpoint_is_replaced_and_its_files_are_gone(tmp_path: Path) -> None:
    writer = DirectWriter(tmp_path)
    dcp.save({"x": torch.ones(1000)}, storage_writer=writer)
    first = names(tmp_path)
    dcp.save({"x": torch.zeros(1000)}, storage_writer=writer)
    assert names(tmp_path) & first == {".metadata"}
    same({"x": torch.zeros(1000)}, loaded(tmp_path))
    with pytest.raises(UsageProblem, match="already holds a checkpoint"):
        save_failing({"x": torch.ones(1)}, DirectWriter(tmp_path, overwrite=False))
    same({"x": torch.zeros(1000)}, loaded(tmp_path))


def save_failing(state: dict[str, Any], writer: DirectWriter) -> None:
    """Raise the writer's own exception, without torch's wrapper."""
    try:
        dcp.save(state, storage_writer=writer)
    except dcp.api.CheckpointException as error:
        raise error.failures[0][0] from None


@pytest.fixture
def small_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("small_files")
def test_a_failed_save_names_file_and_cause_and_keeps_the_old(tmp_path: Path) -> None:
    old = {"x": torch.ones(100)}
    writer = DirectWriter(tmp_path)
    dcp.save(old, storage_writer=writer)
    before = names(tmp_path)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * MIB, hard))
    with pytest.raises(CannotJudge, match=r"`.*/__0_0\.[0-9a-f]{16}\.distcp`: .* failed: File too large") as failed:
        save_failing({"x": torch.ones(8 * MIB)}, writer)
    assert "the previous" in str(failed.value.hint)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert names(tmp_path) == before
    same(old, loaded(tmp_path))
    # The same process continues with another writer.
    dcp.save({"x": torch.zeros(5)}, storage_writer=DirectWriter(tmp_path))
    same({"x": torch.zeros(5)}, loaded(tmp_path))


@pytest.mark.parametrize(("kept", "message"), [(4096, None), (100, "short write: 100 of"), (0, "short write: 0 of")])
def test_a_short_write_goes_on_at_a_whole_block_or_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int, message: str | None
) -> None:
    state = {"x": torch.arange(300_000)}
    write, shortened = os.pwrite, threading.Event()
    direct.Target(tmp_path)

    def short(handle: int, view: memoryview, offset: int) -> int:
        if shortened.is_set():
            return write(handle, view, offset)
        shortened.set()
        return (
            write(handle, bytearray(view[:kept]), offset)
            if kept % 4096
            else kept and write(handle, view[:kept], offset)
        )

    watch_data(monkeypatch, short)
    monkeypatch.setattr(direct.Target, "_probe_once", lambda self, directory: (False, 1))
    if message is None:
        dcp.save(state, storage_writer=DirectWriter(tmp_path))
        same(state, loaded(tmp_path))
    else:
        with pytest.raises(CannotJudge, match=message):
            save_failing(state, DirectWriter(tmp_path))
        assert names(tmp_path) == set()


def test_an_error_of_the_medium_stops_all_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(handle: int, view: memoryview, offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    state = {f"x{number}": torch.randn(MIB) for number in range(8)}
    direct.Target(tmp_path)
    watch_data(monkeypatch, broken)
    with pytest.raises(CannotJudge, match="Input/output error"):
        save_failing(state, DirectWriter(tmp_path, threads=4, buffer_bytes=MIB, checksums=True))
    assert names(tmp_path) == set()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tunetool-write")]


def test_a_file_system_without_direct_io_is_written_buffered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: dict[str, Any]
) -> None:
    monkeypatch.setattr(direct.Target, "_probe_once", lambda self, directory: (False, 1))
    monkeypatch.setattr(direct, "_fallocate", lambda handle, size: False)
    writer = DirectWriter(tmp_path)
    dcp.save(state, storage_writer=writer)
    assert writer.last is not None
    assert not writer.last.direct
    same(state, loaded(tmp_path))


@pytest.mark.parametrize("memory", [None, 0], ids=["memory for all", "no memory left"])
def test_the_loop_goes_on_once_its_tensors_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: dict[str, Any], memory: int | None
) -> None:
    """The first file is synced only after the loop has changed every tensor: the writer must have copied them."""
    release_buffers()
    mine = {"a": torch.randn(3 * MIB), "b": {"c": torch.randn(2000, 1000).t()}, "n": 1}
    expected = {"a": mine["a"].clone(), "b": {"c": mine["b"]["c"].clone()}, "n": 1}  # type: ignore[index]
    changed = threading.Event()
    sync = direct.DataFile.sync
    on_time = []

    def late(self: direct.DataFile) -> None:
        on_time.append(changed.wait(PATIENCE))
        sync(self)

    monkeypatch.setattr(direct.DataFile, "sync", late)
    if memory is not None:
        monkeypatch.setattr(space, "host_memory_left", lambda: memory)
    writer = DirectWriter(tmp_path, threads=2, files_per_rank=1, buffer_bytes=MIB)
    saving = dcp.async_save(mine, storage_writer=writer, async_stager=writer.stager())
    mine["a"].zero_()
    mine["b"]["c"].zero_()  # type: ignore[index]
    changed.set()
    saving.result()
    same(expected, loaded(tmp_path))
    assert writer.last is not None
    assert writer.last.held_for_memory == (memory == 0)
    assert (writer.last.host_bytes == 4 * MIB) == (memory == 0)
    assert on_time == [True]
    assert writer.last.stall_seconds <= writer.last.write_seconds


def test_a_failing_async_save_tells_by_its_future(tmp_path: Path) -> None:
    class Broken(dcp.DefaultSavePlanner):
        def create_local_plan(self) -> Any:
            raise RuntimeError("no plan")

    writer = DirectWriter(tmp_path)
    saving = dcp.async_save({"x": torch.ones(3)}, storage_writer=writer, planner=Broken(), async_stager=writer.stager())
    with pytest.raises(dcp.api.CheckpointException, match="no plan"):
        saving.result()
    dcp.async_save({"x": torch.ones(3)}, storage_writer=writer, async_stager=writer.stager()).result()
    same({"x": torch.ones(3)}, loaded(tmp_path))


@pytest.mark.parametrize("cause", ["a warning that is an error", "an identifier that is no path"])
def test_an_async_save_that_cannot_begin_says_why_at_once(tmp_path: Path, cause: str) -> None:
    """torch raises in its thread before it calls the writer: only the future has the error."""
    writer, state = DirectWriter(tmp_path / "step"), {"x": torch.ones(3)}
    given: Any = {"checkpoint_id": 5} if cause == "an identifier that is no path" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if given else "error")
        saving = dcp.async_save(state, storage_writer=writer, async_stager=writer.stager(), **given)
        with pytest.raises(TypeError if given else UserWarning, match="int" if given else "torch.distributed is"):
            saving.result()
    later = time.monotonic()
    dcp.save(state, storage_writer=writer)
    assert writer.last is not None
    assert writer.last.write_seconds <= time.monotonic() - later, "the figures are of this save alone"
    assert writer.last.stall_seconds == writer.last.write_seconds
    dcp.async_save(state, storage_writer=writer, async_stager=writer.stager()).result()
    same(state, loaded(tmp_path / "step"))


@pytest.mark.parametrize(
    "setting", [{"threads": 0}, {"files_per_rank": 0}, {"buffer_bytes": 4096}, {"buffer_bytes": MIB + 1}], ids=str
)
def test_impossible_settings_are_refused(setting: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageProblem):
        DirectWriter(tmp_path, **setting)


def test_a_save_to_memory_lies_on_huge_pages(huge_tmpfs: Path) -> None:
    """Blocks of half a huge page: the kernel goes by the file's size, which is set before."""
    writer = DirectWriter(huge_tmpfs / "step", threads=2, files_per_rank=2, buffer_bytes=MIB)
    dcp.save({"a": torch.randn(3 * MIB), "b": torch.randn(2 * MIB + 5)}, storage_writer=writer, no_dist=True)
    files = sorted((huge_tmpfs / "step").glob("*.distcp"))
    assert {path.name: huge_bytes(path) for path in files} == {path.name: whole_huge_pages(path) for path in files}
    assert sum(whole_huge_pages(path) for path in files) >= 16 * MIB


class SumsOfHostMemory:
    """``GpuSums`` that a CPU makes of its own memory."""

    ranges = 0

    def __init__(self, _: Any, addresses: Any, lengths: Any) -> None:
        self.stream = self
        self._sums = []
        for address, length in zip(addresses.tolist(), lengths.tolist(), strict=True):
            made = checksums.FileSums([length], checksums.Turns())
            made.feed(0, 0, memory_at(address, length))
            self._sums.append(made.result())
        type(self).ranges += len(self._sums)

    def sums(self, first: int, last: int) -> bytes:
        return b"".join(self._sums[first:last])

    def synchronize(self) -> None:
        """As a stream of CUDA."""


def test_sums_that_gpus_make_are_those_of_their_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices hold large and tiny tensors in turn; some are in another order, which the CPU sums."""
    made = torch.Generator().manual_seed(4)
    state = {f"{number}": torch.randn(number % 50 * 900 + 1, generator=made) for number in range(300)}
    state |= {f"t{number}": torch.randn(300, 200, generator=made).t() for number in range(9)}
    by_address = rank_layout._by_address

    def on_gpus(tensor: torch.Tensor, gpus: dict[Any, int]) -> Any:
        row = by_address(tensor, gpus)
        gpus.update({torch.device("cpu"): 1, torch.device("cpu", 0): 2})
        return row and (*row[:2], 1 + len(tensor) // 900 % 3 // 2, *row[3:])

    with monkeypatch.context() as patched:
        patched.setattr(rank_layout, "_by_address", on_gpus)
        patched.setattr(gpu_sums, "GpuSums", SumsOfHostMemory)
        dcp.save(state, storage_writer=DirectWriter(tmp_path, threads=3, buffer_bytes=MIB), planner=DirectSavePlanner())
    assert SumsOfHostMemory.ranges == sum(each.nbytes > 240 and each.dim() == 1 for each in state.values())
    found = {name: torch.zeros_like(each) for name, each in state.items()}
    dcp.load(found, storage_reader=DirectReader(tmp_path))
    same(state, found)
