"""Archives, files and blocks of a checkpoint as plain bytes and numbers; torch itself reads them in other tests."""

from __future__ import annotations

import io
import math
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunetool.checkpoint.columns import Numbers
from tunetool.checkpoint.items import ALIGNMENT, LARGE, SMALL, Archive, place
from tunetool.checkpoint.layout import ZEROS, Tiles, cut, share_out
from tunetool.checkpoint.raw_bytes import BLOCK
from tunetool.origin import install_hint
from waiting import PATIENCE

SHAPES = st.lists(st.integers(0, 300), max_size=4).map(tuple)
LIMIT = LARGE


def archive(shape: tuple[int, ...]) -> Archive:
    return Archive("float32", shape, 4 * math.prod(shape))


@given(shape=SHAPES.filter(lambda shape: math.prod(shape) < 10**6))
def test_an_archive_is_a_zip_whose_records_any_unzip_finds(shape: tuple[int, ...]) -> None:
    made = archive(shape)
    raw = bytes(made.data_bytes)
    content = made.head + raw + made.tail
    assert len(content) == made.length
    with zipfile.ZipFile(io.BytesIO(content)) as unzipped:
        assert unzipped.read("archive/version") == b"3\n"
        assert unzipped.read("archive/byteorder") == sys.byteorder.encode()
        # Its CRC-32 stays 0, which is right for no bytes.
        assert unzipped.getinfo("archive/data/0").file_size == len(raw)
        assert unzipped.testzip() == ("archive/data/0" if raw else None)


@pytest.mark.parametrize("size", [(1 << 32) - 1025, (1 << 32) - 1, 1 << 32, 5 << 30])
def test_an_archive_over_4_gib_has_the_wide_fields(size: int) -> None:
    made = Archive("uint8", (size,), size)

    class Sparse(io.RawIOBase):
        """head, zeros, tail, without the zeros in memory."""

        def __init__(self) -> None:
            self.at, self.end = 0, made.length
            self.tail = made.tail

        def seekable(self) -> bool:
            return True

        def tell(self) -> int:
            return self.at

        def seek(self, offset: int, whence: int = 0) -> int:
            self.at = offset + (0, self.at, self.end)[whence]
            return self.at

        def read(self, count: int = -1) -> bytes:
            stop = self.end if count < 0 else min(self.end, self.at + count)
            out = bytearray()
            for position, part in ((0, made.head), (self.end - len(self.tail), self.tail)):
                out += part[max(0, self.at - position) : max(0, stop - position)]
            self.at = stop
            return bytes(out)

    with zipfile.ZipFile(Sparse()) as unzipped:
        assert unzipped.getinfo("archive/data/0").file_size == size
        assert unzipped.read("archive/version") == b"3\n"


CONTENTS = st.lists(
    st.one_of(
        st.integers(1, 9000),
        st.sampled_from([(), (0,), (1,), (1000,), (1024,), (LARGE // 4,), (LARGE // 4 + 1,), (3, LARGE // 4)]).map(
            archive
        ),
    ),
    max_size=20,
)


@given(CONTENTS)
def test_items_lie_in_turn_with_raw_bytes_at_whole_blocks(contents: list[Archive | int]) -> None:
    placed, size = place(contents)
    end = 0
    for content, at in zip(contents, placed, strict=True):
        assert at.offset >= end
        end = at.offset + at.length
        if isinstance(content, int):
            assert (at.data, at.length) == (at.offset, content)
        else:
            assert at.data % (BLOCK if content.data_bytes >= SMALL else ALIGNMENT) == 0
            assert at.data - at.offset == len(content.head)
            assert at.length == content.length
            # Bytes that must be written together, from head to tail, share no block with a neighbour.
            if content.data_bytes >= LARGE:
                assert all(other is at or other.offset // BLOCK > (end - 1) // BLOCK or
                           (other.offset + other.length - 1) // BLOCK < at.offset // BLOCK
                           for other in placed)  # fmt: skip
    assert size % BLOCK == 0
    assert end <= size < end + BLOCK


def tiles_of(contents: list[Archive | int], first: int = 0) -> tuple[Numbers, int]:
    """The gap before each item, and its data between what is around them, by the item's number from ``first`` on."""
    placed, size = place(contents)
    tiles, end = [], 0
    for number, (content, at) in enumerate(zip(contents, placed, strict=True), first):
        count = content if isinstance(content, int) else content.data_bytes
        around = at.length - count - (at.data - at.offset)
        tiles += [(at.offset - end, ZEROS), (at.data - at.offset, -2), (count, number), (around, -3)]
        end = at.offset + at.length
    tiles.append((size - end, ZEROS))
    return np.array(tiles), size


@given(st.lists(CONTENTS, max_size=3), st.sampled_from([LARGE, 3 * BLOCK, 2 * LARGE]), st.booleans())
def test_blocks_hold_every_byte_once_in_order_and_never_overlap(
    files: list[list[Archive | int]], limit: int, zero_copy: bool
) -> None:
    each = [tiles_of(contents, 100 * file) for file, contents in enumerate(files)]
    tiles = Tiles(*np.concatenate([np.zeros((0, 2), np.int64), *(its for its, _ in each)]).T)
    sizes = [size for _, size in each]
    large = [
        (100 * file + number, content.data_bytes)
        for file, contents in enumerate(files)
        for number, content in enumerate(contents)
        if not isinstance(content, int) and content.data_bytes >= LARGE
    ]
    blocks, runs = cut(tiles, sizes, limit, [number for number, _ in large] if zero_copy else [])
    ends = dict.fromkeys(range(len(files)), 0)
    for block in blocks:
        assert (block.offset, block.offset % BLOCK, block.length % BLOCK) == (ends[block.file], 0, 0)
        assert 0 < block.length <= limit
        ends[block.file] += block.length
        inside = slice(*runs.firsts[block.number : block.number + 2])
        assert [0, *runs.stop[inside]] == [*runs.start[inside], block.length]
        assert not block.zero_copy or len(runs.start[inside]) == 1
    assert [*ends.values()] == sizes
    found: list[list[int]] = []
    for content, skip, count in zip(runs.content, runs.skip, runs.stop - runs.start, strict=True):
        if found and found[-1][0] == content and (skip or content == ZEROS):
            assert content == ZEROS or skip == found[-1][1]
            found[-1][1] += count
        else:
            assert skip == 0
            found.append([content, count])
    joined: list[list[int]] = []
    for length, content in zip(tiles.lengths, tiles.contents, strict=True):
        if length and joined and joined[-1][0] == content == ZEROS:
            joined[-1][1] += length
        elif length:
            joined.append([content, length])
    assert found == joined
    written_straight = sum(block.length for block in blocks if block.zero_copy)
    assert written_straight == (sum(length // BLOCK * BLOCK for _, length in large) if zero_copy else 0)


def test_many_small_items_share_blocks() -> None:
    tiles, size = tiles_of([archive((16,))] * 5000)
    assert len(cut(Tiles(*tiles.T), [size], 8 << 20)[0]) <= 4


@given(st.lists(st.integers(0, 10**9), max_size=60), st.integers(1, 16))
def test_files_differ_by_no_more_than_the_largest_item(sizes: list[int], files: int) -> None:
    shares = share_out(sizes, files)
    assert sorted(item for share in shares for item in share) == list(range(len(sizes)))
    assert all(share == sorted(share) and share for share in shares)
    assert len(shares) == min(files, len(sizes))
    loads = [sum(max(sizes[item], 1) for item in share) for share in shares]
    if len(shares) == files:
        assert max(loads) - min(loads) <= max([*sizes, 1])


@pytest.mark.parametrize(("room", "name"), [("checkpoint", "DirectWriter"), ("loading", "GpuDirectDataset")])
def test_without_torch_the_library_says_what_to_install(room: str, name: str) -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        f"import tunetool.{room} as c\n"
        f"try: c.{name}\n"
        "except Exception as e: print(e, '|', e.hint)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=PATIENCE)
    hint = install_hint("checkpoint")
    assert done.stdout == f"`{name}` needs `torch`, which this Python does not have | {hint}\n"
