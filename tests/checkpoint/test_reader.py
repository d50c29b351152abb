"""DirectReader reads all and any parts of files by torch's writer and by ours, and refuses damaged ones."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import seeded
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageWriter
from torch.distributed.checkpoint.filesystem import SerializationFormat

from tunetool.checkpoint import archive, index, items, metadata
from tunetool.checkpoint.planner import DirectSavePlanner
from tunetool.checkpoint.raw_bytes import Plain
from tunetool.checkpoint.reader import DirectReader
from tunetool.checkpoint.source import Files
from tunetool.checkpoint.writer import DirectWriter
from tunetool.loading import load as load_weights

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
Ask = Callable[..., Any]
SMALL = {"threads": 3, "buffer_bytes": 65536}
"""Buffers smaller than the tensors, so that several threads work on each of them."""


def load(path: Path, expected: dict[str, Any], **settings: Any) -> str | None:
    target = seeded.blank(expected)
    dcp.load(target, storage_reader=DirectReader(path, **{**SMALL, **settings}))
    return seeded.difference(expected, target)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that no test changes: tests damage a copy."""
    path = tmp_path_factory.mktemp("ours") / "step-1"
    dcp.save(seeded.state(1, 2), storage_writer=DirectWriter(path, checksums=True))
    return path


@pytest.fixture
def copied(ours: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(ours, tmp_path / "copy"))


def refusal(path: Path, state: dict[str, Any], **settings: Any) -> str:
    with pytest.raises(CheckpointException) as caught:
        load(path, state, **settings)
    (failure,) = caught.value.failures.values()
    message = str(failure[0])
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    "settings",
    [{}, {"single_file_per_rank": False}, {"thread_count": 3}],
    ids=["one file", "a file per tensor", "three files"],
)
def test_it_reads_what_torch_wrote(settings: dict[str, Any], only_torch: Ask, tmp_path: Path) -> None:
    assert not only_torch(do="save", path=str(tmp_path), seed=3, megabytes=2, settings=settings)
    assert load(tmp_path, seeded.state(3, 2)) is None


MEMORY = pytest.param(
    "/dev/shm", 1, marks=pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no memory file system"), id="memory"
)


@pytest.fixture
def one_tensor(request: pytest.FixtureRequest) -> Iterator[tuple[Path, index.Item]]:
    """A checkpoint of one tensor of 12 numbers, without a checksum, and where it is."""
    with tempfile.TemporaryDirectory(dir=request.param) as folder:
        path = Path(folder) / "step"
        state = {"w": torch.arange(12.0).reshape(3, 4)}
        dcp.save(state, storage_writer=DirectWriter(path, checksums=False))
        ((where, stored),) = (metadata.read(path).storage_data or {}).items()
        yield path, index.Item(where.fqn, stored.relative_path, stored.offset, stored.length)


def found(path: Path, item: index.Item, *expected: items.Archive) -> Plain | None:
    files = Files(path)
    try:
        return index.find([item], files, 2, expected)[item]
    finally:
        files.close()


@pytest.mark.parametrize(("one_tensor", "step"), [pytest.param(None, 7, id="disk"), MEMORY], indirect=["one_tensor"])
def test_an_expected_header_must_be_there_with_every_byte(one_tensor: tuple[Path, index.Item], step: int) -> None:
    path, item = one_tensor
    expected = items.archive("float32", (3, 4), 48)
    transposed = items.archive("float32", (4, 3), 48)
    assert expected.length == transposed.length == item.length
    plain = Plain(len(expected.head), 48, "float32", (3, 4))
    assert found(path, item) == found(path, item, expected) == found(path, item, transposed) == plain
    begin, end = item.offset + len(expected.head), item.offset + item.length
    around = [*range(item.offset, begin), *range(begin + 48, end)]
    parsed = set()
    with (path / item.file).open("r+b", buffering=0) as stream:
        for at in around[::step]:
            (byte,) = os.pread(stream.fileno(), 1, at)
            os.pwrite(stream.fileno(), bytes([byte ^ 1]), at)
            parsed.add(found(path, item))
            assert found(path, item, expected) == found(path, item), at
            os.pwrite(stream.fileno(), bytes([byte]), at)
    assert None in parsed
    assert len(parsed) > 1


def test_headers_as_expected_are_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"{number}": torch.full((number, 3), float(number)) for number in range(40)}
    dcp.save(state, storage_writer=DirectWriter(tmp_path / "step"))
    monkeypatch.setattr(archive, "find", None)
    assert load(tmp_path / "step", state) is None


def test_torch_reads_what_we_wrote(only_torch: Ask, ours: Path) -> None:
    assert only_torch(do="load", path=str(ours), seed=1, megabytes=2) == {"difference": None}
    # The comparison can fail.
    assert "came back otherwise" in only_torch(do="load", path=str(ours), seed=2, megabytes=2)["difference"]


def test_it_reads_what_we_wrote(ours: Path) -> None:
    assert load(ours, seeded.state(1, 2)) is None
    assert load(ours, seeded.state(1, 2), threads=1) is None
    assert load(ours, seeded.state(1, 2), buffer_bytes=2**20, verify=False) is None


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no memory file system")
def test_it_reads_from_memory(ours: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        assert load(Path(shutil.copytree(ours, Path(folder) / "step-1")), seeded.state(1, 2)) is None


def test_another_dtype_and_other_strides(ours: Path) -> None:
    expected = seeded.state(1, 2)
    target = seeded.blank(expected)
    target["model"]["weight"] = torch.zeros(301, 257, dtype=torch.float64)
    target["model"]["large"] = torch.zeros(2 * 2**20 // 64, 128, dtype=torch.uint8)[:, ::2]
    dcp.load(target, storage_reader=DirectReader(ours, **SMALL))
    assert torch.equal(target["model"]["weight"], expected["model"]["weight"].double())
    assert torch.equal(target["model"]["large"], expected["model"]["large"])


@pytest.mark.parametrize(
    ("writer", "before", "after"), [("ours", 2, 1), ("ours", 1, 2), ("ours", 4, 2), ("torch", 4, 2)]
)
def test_other_numbers_of_ranks(writer: str, before: int, after: int, forks: Ask, tmp_path: Path) -> None:
    path = tmp_path / "step-1"
    saved = forks(
        do="save_shards",
        world=before,
        **{"with": {"path": str(path), "meet": str(tmp_path / "a"), "seed": 5, "writer": writer}},
    )
    assert [rank["status"] for rank in saved] == [0] * before, saved
    loaded = forks(
        do="load_shards", world=after, **{"with": {"path": str(path), "meet": str(tmp_path / "b"), "seed": 5}}
    )
    assert [rank["status"] for rank in loaded] == [0] * after, loaded
    assert [(rank["value"]["wrong"], rank["value"]["step"]) for rank in loaded] == [([], 5)] * after


def test_memory_beside_the_state_is_bounded(forks: Ask, ours: Path, tmp_path: Path) -> None:
    megabytes, settings = 48, {"threads": 3, "buffer_bytes": 2**20}
    dcp.save(seeded.state(1, megabytes), storage_writer=DirectWriter(tmp_path / "a"))
    peaks = {}
    for path, size in ((ours, 2), (tmp_path / "a", megabytes)):
        given = {"path": str(path), "seed": 1, "megabytes": size, "settings": settings}
        (answer,) = forks(do="memory_of_a_load", world=1, **{"with": given})
        peaks[size] = answer["value"]
    # A load of the small one shows the memory that Python and torch need themselves.
    assert peaks[megabytes] - peaks[2] < 3 * 2**20 + 2**20, peaks


def raw_place(path: Path, name: str) -> tuple[Path, int]:
    """A data file, and a byte in the middle of the item of a tensor there."""
    stored = metadata.read(path).storage_data
    index = next(index for index in stored if index.fqn == name)
    return path / stored[index].relative_path, stored[index].offset + stored[index].length // 2


def test_a_flipped_byte_is_found_and_named(copied: Path) -> None:
    file, offset = raw_place(copied, "model.large")
    content = bytearray(file.read_bytes())
    content[offset] ^= 0x10
    file.write_bytes(content)
    message = refusal(copied, seeded.state(1, 2))
    assert "`model.large` is damaged" in message
    assert file.name in message
    # The checksum detects it; nothing else is wrong with the file.
    assert (
        load(copied, seeded.state(1, 2), verify=False)
        == "state.model.large: torch.uint8 [32768, 64] came back otherwise"
    )


class Box(dcp.DefaultLoadPlanner):
    """A planner that asks for a box of its only tensor."""

    def __init__(self, offsets: tuple[int, int], lengths: tuple[int, int]) -> None:
        super().__init__()
        self.offsets, self.lengths = torch.Size(offsets), torch.Size(lengths)

    def create_local_plan(self) -> dcp.LoadPlan:
        plan = super().create_local_plan()
        (item,) = plan.items
        for name, value in (
            ("storage_offsets", self.offsets),
            ("dest_offsets", self.offsets),
            ("lengths", self.lengths),
        ):
            object.__setattr__(item, name, value)
        return plan


@contextmanager
def flipped(file: Path, at: int) -> Iterator[None]:
    """One bit of the file is another one meanwhile."""
    with file.open("r+b", buffering=0) as stream:
        (byte,) = os.pread(stream.fileno(), 1, at)
        os.pwrite(stream.fileno(), bytes([byte ^ 1]), at)
        try:
            yield
        finally:
            os.pwrite(stream.fileno(), bytes([byte]), at)


@pytest.mark.parametrize("rows", [(0, 16384), (1, 3), (5000, 9000), (4096, 4096), (28000, 4768)])
@pytest.mark.parametrize("buffer_bytes", [1 << 16, 1 << 20])
def test_a_part_is_verified_by_its_blocks_and_no_others(copied: Path, rows: tuple[int, int], buffer_bytes: int) -> None:
    """2 MiB in rows of 64 bytes, and in blocks of 256 KiB, which are 4,096 rows."""
    large = seeded.state(1, 2)["model"]["large"]
    first, count = rows
    file, _ = raw_place(copied, "model.large")
    offset = file.read_bytes().index(large.numpy().tobytes())

    def read() -> tuple[DirectReader, torch.Tensor]:
        target = {"model": {"large": torch.zeros(32768, 64, dtype=torch.uint8)}}
        reader = DirectReader(copied, threads=3, buffer_bytes=buffer_bytes)
        dcp.load(target, storage_reader=reader, planner=Box((first, 0), (count, 64)))
        return reader, target["model"]["large"]

    reader, came = read()
    assert torch.equal(came[first : first + count], large[first : first + count])
    assert not came[:first].any()
    assert not came[first + count :].any()
    assert reader.unverified == []
    blocks = range(first // 4096, (first + count - 1) // 4096 + 1)
    for block in range(8):
        with flipped(file, offset + block * 262144 + 262143):
            if block not in blocks:
                read()
                continue
            with pytest.raises(CheckpointException, match=r"`model\.large` is damaged") as caught:
                read()
            assert f"bytes {block * 262144} to {block * 262144 + 262143} from" in str(caught.value)


def test_columns_are_not_called_verified(ours: Path) -> None:
    target = {"model": {"large": torch.zeros(32768, 64, dtype=torch.uint8)}}
    reader = DirectReader(ours, **SMALL)
    dcp.load(target, storage_reader=reader, planner=Box((0, 8), (32768, 16)))
    large = seeded.state(1, 2)["model"]["large"]
    assert torch.equal(target["model"]["large"][:, 8:24], large[:, 8:24])
    assert reader.unverified == ["model.large"]


def test_a_missing_file(copied: Path) -> None:
    file, _ = raw_place(copied, "model.large")
    file.unlink()
    message = refusal(copied, seeded.state(1, 2))
    assert f"`{file}`" in message
    assert "No such file" in message


def test_a_truncated_file(copied: Path) -> None:
    file, offset = raw_place(copied, "model.large")
    with file.open("r+b") as stream:
        stream.truncate(offset)
    message = refusal(copied, seeded.state(1, 2))
    assert f"`{file}` is {offset} bytes long" in message
    assert "cut short" in message


def test_a_file_of_another_save(copied: Path, tmp_path: Path) -> None:
    """The same names and lengths with another shape."""
    other = seeded.state(1, 2)
    other["model"]["large"] = other["model"]["large"].reshape(-1, 128)
    dcp.save(other, storage_writer=DirectWriter(tmp_path / "other", checksums=True))
    ours_file, _ = raw_place(copied, "model.large")
    their_file, _ = raw_place(tmp_path / "other", "model.large")
    shutil.copy(their_file, ours_file)
    message = refusal(copied, seeded.state(1, 2))
    assert "`model.large` with shape [16384, 128], and the metadata says [32768, 64]" in message


def test_swapped_data_files_are_found(tmp_path: Path) -> None:
    """Each file is whole, and each tensor has its own checksum: only its name says that it lies elsewhere."""
    state = {"a": torch.zeros(64, 64), "b": torch.ones(64, 64)}
    first, second = tmp_path / "first", tmp_path / "second"
    for path in (first, second):
        dcp.save(state, storage_writer=DirectWriter(path, checksums=True))
    assert load(first, state) is None
    # A file of another save, under the name of this one.
    (mine,), (theirs,) = first.glob("*.distcp"), second.glob("*.distcp")
    shutil.copy(theirs, mine)
    assert "holds another tensor, or one of another save, where `" in refusal(first, state)
    # Another tensor of this save: the metadata's offsets are exchanged.
    described = metadata.read(second)
    at_a, at_b = described.storage_data
    stored = described.storage_data
    stored[at_a], stored[at_b] = stored[at_b], stored[at_a]
    (second / ".metadata").write_bytes(metadata.dumps(described, second / ".metadata"))
    assert "holds another tensor, or one of another save, where `" in refusal(second, state)


def test_a_fifo_in_place_of_a_data_file_is_not_waited_for(copied: Path) -> None:
    file, _ = raw_place(copied, "model.large")
    file.unlink()
    os.mkfifo(file)
    assert f"`{file}`" in refusal(copied, seeded.state(1, 2))


class Planted:
    """An attacker's object: unpickling it calls a function."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("planted"),)


def test_objects_are_not_unpickled_freely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dcp.save({"thing": Planted()}, storage_writer=dcp.FileSystemWriter("step-1"))
    message = refusal(Path("step-1"), {"thing": None})
    assert "`thing` cannot be unpickled safely: Unsupported global" in message
    assert not Path("planted").exists()
    dcp.load({"thing": None}, storage_reader=DirectReader("step-1", allow_objects=True))
    assert Path("planted").exists()


def test_the_form_of_safetensors_is_called_what_it_is(tmp_path: Path) -> None:
    state = {"w": torch.arange(6.0), "b": torch.ones(2)}
    dcp.save(
        state, storage_writer=dcp.FileSystemWriter(tmp_path / "a", serialization_format=SerializationFormat.SAFETENSORS)
    )
    message = refusal(tmp_path / "a", state)
    assert "/a/__0_0.distcp` is a .safetensors file, as torch's FileSystemWriter writes with" in message
    assert torch.equal(load_weights(tmp_path / "a/__0_0.distcp")["w"], state["w"])
    dcp.save(dict(state), storage_writer=HuggingFaceStorageWriter(str(tmp_path / "b")))
    message = refusal(tmp_path / "b", state)
    assert f"`{tmp_path / 'b'}` has no `.metadata`: it holds .safetensors files, as torch's HuggingFaceStor" in message
    assert torch.equal(load_weights(tmp_path / "b")["w"], state["w"])


@pytest.mark.parametrize("left", [0, 1000])
def test_a_target_whose_memory_was_freed_is_refused_by_name(tmp_path: Path, left: int) -> None:
    """A large one is read in place, which would write past its end."""
    dcp.save({"w": torch.ones(1024, 1024)}, storage_writer=DirectWriter(tmp_path))
    target = torch.zeros(1024, 1024)
    target.untyped_storage().resize_(left)
    refused = f"`w` cannot be filled: its elements take 4194304 bytes, and its memory holds {left}"
    with pytest.raises(CheckpointException, match=refused):
        dcp.load({"w": target}, storage_reader=DirectReader(tmp_path))


def test_an_expanded_target_is_refused_by_name(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3, 4)}, storage_writer=DirectWriter(tmp_path))
    with pytest.raises(CheckpointException, match="`w` cannot be filled: several elements of the target share"):
        dcp.load({"w": torch.zeros(1, 4).expand(3, 4)}, storage_reader=DirectReader(tmp_path))
    one = {"w": torch.zeros(12).as_strided((3, 4), (4, 1))}
    dcp.load(one, storage_reader=DirectReader(tmp_path))
    assert torch.equal(one["w"], torch.ones(3, 4))


def test_a_link_out_of_the_checkpoint_is_not_opened(ours: Path, copied: Path) -> None:
    files = sorted(copied.glob("*.distcp"))
    beside = files[0].rename(copied / "beside")
    files[0].symlink_to(beside.name)
    assert load(copied, seeded.state(1, 2)) is None
    files[0].unlink()
    files[0].symlink_to(ours / files[0].name)
    assert f"`{files[0]}` leads out of `{copied}`" in refusal(copied, seeded.state(1, 2))


class Counted(list[Any]):
    """Counts how often somebody goes through it."""

    passes = 0

    def __iter__(self) -> Any:
        type(self).passes += 1
        return super().__iter__()


class Counting(DirectReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        described = super().read_metadata(*args, **kwargs)
        for each in described.state_dict_metadata.values():
            each.chunks = Counted(each.chunks)
        return described


def test_chunks_are_looked_at_as_often_however_many_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []
    for rows in (20, 200):
        path, expected = tmp_path / str(rows), {"w": torch.arange(rows * 4.0).reshape(rows, 4)}
        dcp.save(expected, storage_writer=DirectWriter(path), planner=DirectSavePlanner(split_above=16))
        assert len(metadata.read(path).state_dict_metadata["w"].chunks) == rows
        monkeypatch.setattr(Counted, "passes", 0)
        target = seeded.blank(expected)
        dcp.load(target, storage_reader=Counting(path))
        assert seeded.difference(expected, target) is None
        passes.append(Counted.passes)
    assert passes[0] == passes[1] > 0


def test_no_checkpoint_here(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match=r"\.metadata` cannot be read: No such file"):
        load(tmp_path, {"a": torch.zeros(1)})


def test_large_tensors_cut_by_the_planner_come_back_whole(tmp_path: Path) -> None:
    state = seeded.state(2, 3)
    planner = DirectSavePlanner(split_above=2**20)
    dcp.save(state, storage_writer=DirectWriter(tmp_path / "a", checksums=True), planner=planner)
    chunks = metadata.read(tmp_path / "a").state_dict_metadata["model.large"].chunks
    assert len(chunks) == 3
    assert load(tmp_path / "a", state) is None
