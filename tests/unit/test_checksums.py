"""Checksums of tensors by blocks: whatever the pieces and threads, the same sums, and no damage that they overlook."""

from __future__ import annotations

import hashlib
import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("numpy")  # in which the table of checksums is made

import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tunetool.checkpoint import sums_table
from tunetool.checkpoint.checksums import (
    BLOCK_BYTES,
    FileSums,
    Saved,
    Stopped,
    Turns,
    Verified,
    block_bytes,
    block_range,
    number_of_blocks,
    whole_blocks,
)
from tunetool.checkpoint.source import Files
from tunetool.errors import CannotJudge

CODE = Path(__file__).parents[2] / "tools/tunetool/checkpoint/gpu_sums.ptx"
LENGTHS = st.one_of(
    st.integers(0, 3 * BLOCK_BYTES), st.integers(-2, 2).map(lambda more: 2 * BLOCK_BYTES + more), st.integers(1, 2**50)
)


@given(length=LENGTHS)
def test_blocks_are_all_bytes_once(length: int) -> None:
    count, size = number_of_blocks(length), block_bytes(length)
    assert count <= 1 << 16
    for number in {0, count // 2, count - 1}:
        start, stop = block_range(number, length)
        assert start == number * size
        assert stop == (block_range(number + 1, length)[0] if number < count - 1 else length)
        assert stop - start < 2 * size
        if stop > start:
            assert whole_blocks(start, stop, length) == whole_blocks(stop - 1, stop, length) == (start, stop)


def sums_of(content: bytes) -> bytes:
    blocks = (block_range(number, len(content)) for number in range(number_of_blocks(len(content))))
    return b"".join(xxhash.xxh3_64_intdigest(content[slice(*each)]).to_bytes(8, "little") for each in blocks)


def fed(contents: list[bytes], cuts: list[int], threads: int) -> bytes:
    sums = FileSums([len(content) for content in contents], Turns())
    # Handed out in order, as the pipeline does it; who is late is up to the scheduler.
    with ThreadPoolExecutor(threads) as pool:
        for number, content in enumerate(contents):
            ends = [*sorted({cut % len(content) for cut in cuts} - {0}), len(content)] if content else []
            for start, stop in itertools.pairwise([0, *ends]):
                pool.submit(sums.feed, number, start, memoryview(content)[start:stop])
    return sums.result()


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.one_of(st.integers(0, 600), st.integers(0, 5 * BLOCK_BYTES)), max_size=4),
    cuts=st.lists(st.integers(0, 2**31), max_size=20),
    threads=st.integers(1, 4),
)
def test_the_sums_do_not_depend_on_pieces_or_threads(lengths: list[int], cuts: list[int], threads: int) -> None:
    contents = [random.Random(length).randbytes(length) for length in lengths]
    assert fed(contents, cuts, threads) == b"".join(map(sums_of, contents))


def damaged(content: bytes, draw: random.Random) -> bytes:
    """Other bytes of the same length: a flip, a swap or a shift of blocks of 4 KiB, zeros, a torn write."""
    changed, page = bytearray(content), 4096
    pages = len(content) // page
    first, second = sorted(draw.sample(range(pages), 2))
    one, other = (slice(page * number, page * (number + 1)) for number in (first, second))
    match draw.randrange(5):
        case 0:
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        case 1:
            changed[one], changed[other] = changed[other], changed[one]
        case 2:
            changed[page * (first + 1) : page * (second + 1)] = content[page * first : page * second]
        case 3:
            changed[one] = bytes(page)
        case 4:
            changed[page * first :] = bytes(len(content) - page * first)
    return bytes(changed)


def test_no_damage_is_overlooked() -> None:
    draw = random.Random(7)
    content = draw.randbytes(4 * BLOCK_BYTES + 999)
    before = sums_of(content)
    for _ in range(300):
        changed = damaged(content, draw)
        assert changed != content
        assert sums_of(changed) != before
        with pytest.raises(
            CannotJudge, match=r"`w` is damaged: bytes \d+ to \d+ from 4096 on in `step/file` have checksum"
        ):
            Verified(Saved(before, len(content), "w", Path("step"), "file", 4096), Turns()).feed(0, memoryview(changed))
    Verified(Saved(before, len(content), "w", Path("step"), "file", 4096), Turns()).feed(0, memoryview(content))


def test_a_wait_ends_when_another_thread_failed() -> None:
    turns = Turns()
    sums = FileSums([3 * BLOCK_BYTES], turns)
    with ThreadPoolExecutor(2) as pool:
        waits = pool.submit(sums.feed, 0, 7, memoryview(bytes(9))), pool.submit(sums.result)
        turns.stop()
        for wait in waits:
            with pytest.raises(Stopped):
                wait.result()


TENSORS = st.lists(
    st.tuples(st.text(max_size=9), st.lists(st.integers(0, 99), max_size=3), st.integers(0, 2 * BLOCK_BYTES + 9)),
    min_size=1,
    max_size=20,
    unique_by=lambda each: (each[0], tuple(each[1])),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tensors=TENSORS, room=st.integers(0, 9000), draw=st.randoms())
def test_a_table_gives_back_its_rows_and_notices_each_change(
    tensors: list[tuple[str, list[int], int]], room: int, draw: random.Random, tmp_path: Path
) -> None:
    lengths = [length for _, _, length in tensors]
    places = [4096 + 10**6 * number for number in range(len(tensors))]
    keys = [sums_table.key_of(name, offset) for name, offset, _ in tensors]
    sums = draw.randbytes(8 * sum(map(number_of_blocks, lengths)))
    where = (8192, 8192 + sums_table.bytes_of(len(lengths), len(sums) // 8) + room)
    content = bytes(8192) + sums_table.table(sums_table.rows(places, lengths, keys), sums, "a" * 16, where)
    assert len(content) == where[1]

    def read(changed: bytes, save: str | None = "a" * 16) -> sums_table.Table:
        (tmp_path / "file").write_bytes(changed)
        files = Files(tmp_path)
        try:
            return sums_table.read(files, "file", "w", save)
        finally:
            files.close()

    table, kept = read(content), b""
    for place, length, key in zip(places, lengths, keys, strict=True):
        row = table.row(place)
        assert row is not None
        assert (row.length, row.key) == (length, key)
        kept += row.sums
    assert kept == sums
    assert table.row(4095) is None
    with pytest.raises(CannotJudge, match="of another save, where `w` must be"):
        read(content, "b" * 16)
    for changed in (content[:-1], content[:8200], b"", content + b"\0", bytes(len(content))):
        with pytest.raises(CannotJudge, match="damaged"):
            read(changed)
    used = [
        *range(8192, where[1] - room - sums_table.FOOTER_BYTES),
        *range(where[1] - sums_table.FOOTER_BYTES, where[1]),
    ]
    flipped = bytearray(content)
    flipped[draw.choice(used)] ^= 1 << draw.randrange(8)
    with pytest.raises(CannotJudge):
        read(bytes(flipped))


def test_the_code_for_gpus_is_made_of_its_source() -> None:
    source = hashlib.sha256(CODE.with_suffix(".cu").read_bytes()).hexdigest()
    head = CODE.read_text().partition("\n")[0]
    assert head == f"// Made from gpu_sums.cu, sha256 {source}, by tools/dev/gpu_sums.py."
