"""Archives, files and blocks of a checkpoint as plain bytes and numbers; torch itself reads them in tests/checkpoint."""

from __future__ import annotations

import io
import math
import subprocess
import sys
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunetool.checkpoint.items import ALIGNMENT, LARGE, SMALL, Archive, place
from tunetool.checkpoint.layout import Block, Part, cut, share_out
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


def parts_of(contents: list[Archive | int]) -> list[Part]:
    placed, _ = place(contents)
    parts = []
    for content, at in zip(contents, placed, strict=True):
        if isinstance(content, int):
            parts.append(Part(at.offset, content, "bytes"))
            continue
        parts.append(Part(at.offset, len(content.head), "head"))
        parts.append(Part(at.data, content.data_bytes, "data"))
        parts.append(Part(at.data + content.data_bytes, content.tail_bytes, "tail"))
    return parts


@given(CONTENTS, st.sampled_from([LARGE, 3 * BLOCK, 2 * LARGE]), st.booleans())
def test_blocks_hold_every_byte_once_in_order_and_never_overlap(
    contents: list[Archive | int], limit: int, zero_copy: bool
) -> None:
    parts = parts_of(contents)
    blocks = list(cut(0, parts, limit, lambda part: zero_copy and part.content == "data"))
    seen: dict[int, int] = {}
    end = 0
    for block in blocks:
        assert block.offset % BLOCK == 0
        assert block.offset >= end
        assert 0 < block.length <= limit
        end = block.offset + block.length
        assert_in_order(block, limit)
        for piece in block.pieces:
            number = next(number for number, part in enumerate(parts) if part is piece.part)
            assert piece.start == seen.get(number, 0)
            assert block.offset + piece.at == piece.part.offset + piece.start
            seen[number] = piece.start + piece.count
    assert seen == {number: part.length for number, part in enumerate(parts) if part.length}
    large = [part for part in parts if part.content == "data" and part.length >= LARGE]
    written_straight = sum(block.length for block in blocks if block.zero_copy)
    assert written_straight == (sum(part.length // BLOCK * BLOCK for part in large) if zero_copy else 0)


def assert_in_order(block: Block, limit: int) -> None:
    at = 0
    for piece in block.pieces:
        assert piece.at >= at
        at = piece.at + piece.count
    assert at <= limit
    if block.zero_copy:
        assert len(block.pieces) == 1
        assert block.pieces[0].at == 0
        assert block.pieces[0].count == block.length


def test_many_small_items_share_blocks() -> None:
    contents: list[Archive | int] = [archive((16,))] * 5000
    blocks = list(cut(0, parts_of(contents), 8 << 20, lambda part: False))
    assert len(blocks) <= 4


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
