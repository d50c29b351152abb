"""The bytes that a part of a saved tensor needs, their position in an item, and the memory for buffers."""

from __future__ import annotations

import io
import math
import struct
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunetool.checkpoint import archive, regions, space
from tunetool.checkpoint.items import Archive
from tunetool.checkpoint.raw_bytes import BLOCK, Plain, strides
from tunetool.errors import CannotJudge

np = pytest.importorskip("numpy")


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], int, tuple[int, ...], tuple[int, ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=4)))
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    lengths = tuple(draw(st.integers(1, size - offset)) for size, offset in zip(shape, offsets, strict=True))
    return shape, draw(st.sampled_from([1, 2, 4, 8])), offsets, lengths


@given(boxes(), st.integers(1, 600), st.sampled_from([1, 16, 10**6]))
def test_blocks_are_the_box_and_no_larger_than_asked(
    box: tuple[tuple[int, ...], int, tuple[int, ...], tuple[int, ...]], limit: int, gap: int
) -> None:
    shape, item, offsets, lengths = box
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regions, "GAP", gap)
        read = list(regions.blocks(shape, item, offsets, lengths, limit))
    saved = np.arange(math.prod(shape), dtype=f"u{item}").reshape(shape)
    seen = np.zeros(shape, int)
    for block in read:
        assert block.stop - block.start <= max(limit, item)
        part = tuple(
            slice(offset, offset + length) for offset, length in zip(block.offsets, block.lengths, strict=True)
        )
        seen[part] += 1
        # These bytes, indexed with the saved strides, are the block.
        raw = np.frombuffer(saved.tobytes()[block.start : block.stop], saved.dtype)
        steps = strides(shape, item)
        assert np.array_equal(np.lib.stride_tricks.as_strided(raw, block.lengths, steps), saved[part])
    wanted = np.zeros(shape, int)
    wanted[tuple(slice(offset, offset + length) for offset, length in zip(offsets, lengths, strict=True))] = 1
    assert np.array_equal(seen, wanted)


def test_only_the_rows_that_are_wanted() -> None:
    (block,) = regions.blocks((1000, 1000), 4, (250, 0), (250, 1000), 2**30)
    assert (block.start, block.stop) == (1_000_000, 2_000_000)


def test_wide_gaps_are_left_out() -> None:
    # One column of four, each row 4 MB: three quarters would be read for nothing.
    read = list(regions.blocks((10, 2**20), 4, (0, 0), (10, 2**18), 2**30))
    assert sum(block.stop - block.start for block in read) == 10 * 2**20
    # Rows of 4 KB are read whole.
    assert len(list(regions.blocks((1000, 1024), 4, (0, 0), (1000, 256), 2**30))) == 1


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 3 * BLOCK)), min_size=1, max_size=40))
def test_requests_are_aligned_and_hold_everything_once(spans: list[tuple[int, int]]) -> None:
    limit = 16 * BLOCK
    reads = regions.merge([(start, start + length, number) for number, (start, length) in enumerate(spans)], limit)
    held = []
    for read in reads:
        assert read.start % BLOCK == read.stop % BLOCK == 0
        assert read.stop - read.start <= limit
        for start, stop, number in read.wanted:
            assert read.start <= start < stop <= read.stop
            held.append(number)
    assert sorted(held) == list(range(len(spans)))


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_pieces_fit_into_a_buffer(start: int, length: int) -> None:
    limit = 16 * BLOCK
    read = list(regions.pieces(start, start + length, limit))
    assert [low for low, _ in read] == [*([start] if length else []), *(high for _, high in read[:-1])]
    assert all(high + -high % BLOCK - (low - low % BLOCK) <= limit for low, high in read)
    assert sum(high - low for low, high in read) == length


def look(item: bytes) -> Plain | None:
    return archive.find(lambda offset, count: item[offset : offset + count], len(item))


def with_record(name: str, content: bytes, method: int = zipfile.ZIP_STORED) -> bytes:
    """The archive of a tensor of three bytes, with one record replaced."""
    whole = Archive("uint8", (3,), 3)
    records = zipfile.ZipFile(io.BytesIO(whole.head + b"abc" + whole.tail))
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as other:
        for info in records.infolist():
            # Its CRC-32 is left out by our writer, which the standard library minds.
            held = b"abc" if info.filename.endswith("data/0") else records.read(info)
            other.writestr(info.filename, content if info.filename == name else held)
    return stream.getvalue()


def test_our_archives() -> None:
    made = Archive("bfloat16", (3, 5), 30)
    archived = look(made.head + bytes(30) + made.tail)
    assert archived == Plain(len(made.head), 30, "bfloat16", (3, 5))


def test_archives_larger_than_32_bits_can_count() -> None:
    count = 5 * 2**30
    made = Archive("float8_e5m2", (count,), count)
    tail = made.tail

    def read(offset: int, size: int) -> bytes:
        if offset < len(made.head):
            return made.head[offset : offset + size]
        after = offset - len(made.head) - count
        return tail[after : after + size]

    archived = archive.find(read, made.length)
    assert archived == Plain(len(made.head), count, "float8_e5m2", (count,))


def test_the_standard_librarys_zip_is_read_too() -> None:
    archived = look(with_record("archive/version", b"3\n"))
    assert archived is not None
    assert (archived.dtype, archived.shape, archived.length) == ("uint8", (3,), 3)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("archive/byteorder", b"big"),
        ("archive/data/0", b"abcd"),
        ("archive/data.pkl", b"cos\nsystem\n(S'touch planted'\ntR."),
        ("archive/data.pkl", b"\x80\x02K\x01."),
        ("archive/data.pkl", b""),
    ],
    ids=["byte order", "too long", "a call", "a number", "nothing"],
)
def test_what_is_not_a_plain_tensor_is_left_to_torch(
    name: str, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert look(with_record(name, content)) is None
    assert not list(tmp_path.iterdir())


def test_compressed_and_damaged_archives_are_left_to_torch() -> None:
    assert look(with_record("archive/version", b"3\n", zipfile.ZIP_DEFLATED)) is None
    whole = with_record("archive/version", b"3\n")
    for length in range(0, len(whole), 7):
        assert look(whole[:length]) is None
    assert look(struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 0, 0, 0, 0, 0)) is None


MEMINFO = "MemTotal: 1000 kB\nMemAvailable: 800 kB\n"


def machine(root: Path, groups: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(MEMINFO)
    for name, text in groups.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_memory_left_without_limits(tmp_path: Path) -> None:
    assert space.host_memory_left(machine(tmp_path, {"proc/self/cgroup": "0::/\n"})) == 800 * 1024


def test_memory_left_in_the_tightest_group_around(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/slurm/job1/step0\n",
            "sys/fs/cgroup/slurm/job1/memory.max": "300000\n",
            "sys/fs/cgroup/slurm/job1/memory.current": "250000\n",
            # The page cache can be dropped; files in a tmpfs cannot.
            "sys/fs/cgroup/slurm/job1/memory.stat": "anon 1\nfile 90000\nshmem 20000\ninactive_file 30000\nactive_file 40000\n",
            "sys/fs/cgroup/slurm/job1/step0/memory.max": "max\n",
            "sys/fs/cgroup/slurm/job1/step0/memory.current": "250000\n",
        },
    )
    assert space.host_memory_left(root) == 300000 - 250000 + 70000


def test_memory_left_in_a_group_of_version_1(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/memory"
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/a\n4:memory:/docker/abc\n",
            # In a container the group's name does not exist, and the top directory is the container's group.
            f"{base}/memory.limit_in_bytes": "400000\n",
            f"{base}/memory.usage_in_bytes": "100000\n",
            f"{base}/memory.stat": "inactive_file 5\ntotal_inactive_file 1000\ntotal_active_file 2000\n",
        },
    )
    assert space.host_memory_left(root) == 303000


def test_room_is_asked_first(tmp_path: Path) -> None:
    space.need(tmp_path / "not" / "yet" / "there", 4096)
    with pytest.raises(CannotJudge, match=r"of space left; the save needs 1000 PB"):
        space.need(tmp_path, 10**18)
