"""LBA formats: the drive's table as in the specification, the format to choose, and the command to type."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunetool.node.machine.nvme_admin import (
    Formats,
    LbaFormat,
    Silent,
    best_format,
    mending,
    parse_formats,
    read_formats,
    try_formats,
)

SHIFTS = st.integers(min_value=0, max_value=255)
ROWS = st.lists(st.tuples(st.integers(0, 65535), SHIFTS, st.integers(0, 255)), min_size=1, max_size=64)


def identity(rows: list[tuple[int, int, int]], chosen: int, blocks: int = 8, hidden: int = 0) -> bytes:
    """An Identify Namespace data structure; ``rows`` are metadata bytes, log2 of data bytes, relative performance."""
    raw = bytearray(4096)
    struct.pack_into("<Q", raw, 0, blocks)
    raw[25], raw[43] = len(rows) - 1 - hidden, hidden
    raw[26] = chosen & 0xF | (chosen >> 4) << 5
    for index, row in enumerate(rows):
        struct.pack_into("<HBB", raw, 128 + 4 * index, *row)
    return bytes(raw)


def test_a_drive_s_table_is_read() -> None:
    # The table of QEMU's drive, with performance values of a real one.
    formats = parse_formats(identity([(0, 9, 2), (8, 9, 2), (0, 12, 0), (64, 12, 1)], 1, 2**30))
    assert formats.offered == (
        LbaFormat(0, 512, 0, 2),
        LbaFormat(1, 512, 8, 2),
        LbaFormat(2, 4096, 0),
        formats.offered[3],
    )
    assert formats.current == LbaFormat(1, 512, 8, 2)
    assert formats.size_bytes == 2**39


@given(ROWS, st.data())
def test_every_offered_format_is_a_row_with_the_current_one(
    rows: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    chosen = data.draw(st.integers(0, len(rows) - 1))
    hidden = data.draw(st.integers(0, len(rows) - 1))
    usable = {index for index, row in enumerate(rows) if 9 <= row[1] <= 16}
    raw = identity(rows, chosen, hidden=hidden)
    if chosen not in usable:
        with pytest.raises(ValueError, match=f"format in use, {chosen},"):
            parse_formats(raw)
        return
    formats = parse_formats(raw)
    assert {each.index for each in formats.offered} == usable
    assert formats.current.index == chosen
    for each in formats.offered:
        metadata, shift, performance = rows[each.index]
        assert (each.data_bytes, each.metadata_bytes, each.performance) == (2**shift, metadata, performance % 4)


@given(st.binary(max_size=512))
def test_no_answer_of_a_drive_breaks_the_reader(start: bytes) -> None:
    raw = start.ljust(4096, start[-1:] or b"\0")
    try:
        formats = parse_formats(raw)
    except ValueError:
        return
    assert formats.current in formats.offered


@pytest.mark.parametrize("size", [0, 512, 4095, 4097])
def test_another_length_is_no_identity(size: int) -> None:
    with pytest.raises(ValueError, match="4096"):
        parse_formats(bytes(size))


FORMATS = st.builds(
    LbaFormat, st.integers(0, 63), st.sampled_from([512, 4096]), st.sampled_from([0, 8, 64]), st.integers(0, 3)
)


@given(st.lists(FORMATS, max_size=12), st.sampled_from([512, 4096]))
def test_the_best_format_has_no_metadata_and_no_faster_rival(offered: list[LbaFormat], data_bytes: int) -> None:
    best = best_format(offered, data_bytes)
    rivals = [each for each in offered if each.data_bytes == data_bytes and each.metadata_bytes == 0]
    if best is None:
        assert rivals == []
        return
    assert best in rivals
    assert all(best.performance <= each.performance for each in rivals)
    text = mending("/dev/nvme3n1", Formats(tuple(offered), offered[0], 1), data_bytes)
    line = re.search(r"`nvme format /dev/nvme3n1 --lbaf=(\d+)`", text)
    assert line is not None
    assert int(line[1]) == best.index
    assert "erases" in text


def test_a_drive_without_such_a_format_is_told_from_a_silent_one() -> None:
    only = LbaFormat(0, 512, 0)
    assert "replace it" in mending("/dev/nvme3n1", Formats((only,), only, 1), 4096)
    text = mending("/dev/nvme3n1", None, 4096)
    assert "`nvme id-ns -H /dev/nvme3n1`" in text
    assert "4096 bytes" in text


def test_what_is_no_drive_gives_no_formats(tmp_path: Path) -> None:
    with pytest.raises(Silent):
        read_formats("nvme99n1")
    assert try_formats("nvme99n1") is None
    # A device that is there and no NVMe namespace refuses the ioctl.
    assert try_formats("null") is None
