"""Extents of a file on its device: flags that are refused, holes, and a real file if the file system supports it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tunetool.measure.ladder.file_extents import Extent, NoExtents, read_extents, whole

MIB = 2**20


def test_extents_are_clipped_at_the_end_of_the_file() -> None:
    extents = [(Extent(0, 8 * MIB, MIB), 0), (Extent(MIB, 64 * MIB, MIB), 0x1), (Extent(2 * MIB, 0, MIB), 0x800)]
    assert whole(extents, MIB + 5) == [Extent(0, 8 * MIB, MIB), Extent(MIB, 64 * MIB, 5)]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (0x2, "nowhere"),
        (0x4, "not on the device yet"),
        (0x8, "encoded"),
        (0x80, "encrypted"),
        (0x100, "not aligned"),
        (0x200, "inode"),
        (0x400, "shares its block"),
        (0x800, "never written"),
        (0x2000, "shared with another file"),
        (0x2001, "shared with another file"),
    ],
)
def test_an_extent_that_is_not_plain_data_is_refused(flags: int, said: str) -> None:
    with pytest.raises(NoExtents, match=said):
        whole([(Extent(0, MIB, MIB), flags)], MIB)


@pytest.mark.parametrize(
    "extents",
    [
        [],
        [Extent(4096, MIB, MIB)],
        [Extent(0, MIB, 4096), Extent(8192, 2 * MIB, MIB)],
        [Extent(0, MIB, MIB - 4096)],
    ],
)
def test_a_hole_is_refused(extents: list[Extent]) -> None:
    with pytest.raises(NoExtents, match="hole"):
        whole([(extent, 0) for extent in extents], MIB)


def test_a_real_file(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(os.urandom(3 * MIB))
    try:
        extents = read_extents(str(file))
    except NoExtents as error:
        pytest.skip(f"no answer here: {error}")
    assert sum(extent.length for extent in extents) == 3 * MIB
    assert extents[0].logical == 0
    sparse = tmp_path / "sparse"
    with sparse.open("wb") as stream:
        stream.truncate(3 * MIB)
    with pytest.raises(NoExtents, match="hole"):
        read_extents(str(sparse))
    os.posix_fallocate(os.open(tmp_path / "reserved", os.O_CREAT | os.O_RDWR), 0, MIB)
    with pytest.raises(NoExtents, match="never written"):
        read_extents(str(tmp_path / "reserved"))


def test_what_is_gone_or_has_no_extents(tmp_path: Path) -> None:
    with pytest.raises(NoExtents, match="No such file"):
        read_extents(str(tmp_path / "gone"))
    file = Path("/dev/shm") / f"tunetool-extents-{os.getpid()}"
    file.write_bytes(b"x" * 4096)
    try:
        with pytest.raises(NoExtents, match="does not say where a file lies"):
            read_extents(str(file))
    finally:
        file.unlink()
