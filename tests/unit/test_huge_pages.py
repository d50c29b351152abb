"""Files of a tmpfs with `huge=within_size`: what is written there has its size first, and so lies on huge pages."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("numpy")
pytest.importorskip("xxhash")

from huge_pages import HUGE, huge_bytes, whole_huge_pages
from staged import stage
from tunetool.advise.shapes import Tensor
from tunetool.errors import ExitCode
from tunetool.loading import random_weights
from tunetool.stage.pieces import PIECE_BYTES

pytest_plugins = ["huge_tmpfs"]

SMALL = 200


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Files below, at and above one huge page, one of several pieces, and many that are tiny."""
    root = tmp_path / "source"
    root.mkdir()
    for size in (HUGE - 5000, HUGE, HUGE + 1, 7 * HUGE + 4097, PIECE_BYTES + HUGE + 5):
        (root / f"{size}.bin").write_bytes(bytes(size))
    for number in range(SMALL):
        (root / f"{number}.txt").write_bytes(b"x" * 100)
    return root


def test_a_staged_tree_lies_on_huge_pages(source: Path, huge_tmpfs: Path, tmp_path: Path) -> None:
    result = stage(source, huge_tmpfs / "copy", tmp_path / "runs")
    assert result.code == ExitCode.OK
    copies = sorted((huge_tmpfs / "copy").glob("*.bin"))
    assert {path.name: huge_bytes(path) for path in copies} == {path.name: whole_huge_pages(path) for path in copies}
    assert sum(whole_huge_pages(path) for path in copies) > PIECE_BYTES
    # What is left of each file takes pages of 4 KiB: far from 2 MiB for each of the small ones.
    space = os.statvfs(huge_tmpfs)
    used = (space.f_blocks - space.f_bfree) * space.f_frsize
    assert used < sum(path.stat().st_size for path in source.iterdir()) + (SMALL + 50) * 4096 + HUGE


def test_a_staged_file_has_its_size_before_its_first_byte(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Newer kernels also count what a write ends at; older ones (6.1) go by the size alone."""
    first: dict[str, int] = {}
    pwrite = os.pwrite

    def seen(handle: int, data: bytes, offset: int) -> int:
        first.setdefault(Path(f"/proc/self/fd/{handle}").readlink().name, os.fstat(handle).st_size)
        return pwrite(handle, data, offset)

    monkeypatch.setattr(os, "pwrite", seen)
    for checksum in ("xxh3_64", "sha256"):
        first.clear()
        result = stage(source, tmp_path / checksum, tmp_path / "runs", checksum=checksum)
        assert result.code == ExitCode.OK
        sizes = {path.name: path.stat().st_size for path in source.glob("*.bin")}
        assert {name: size for name, size in first.items() if name in sizes and sizes[name] >= HUGE} == {
            name: size for name, size in sizes.items() if size >= HUGE
        }


def test_made_weights_lie_on_huge_pages(huge_tmpfs: Path) -> None:
    tensors = [Tensor(f"layers.{number}.weight", (1024, 3000)) for number in range(6)]
    random_weights.write(huge_tmpfs, tensors, 0, 20 * 2**20, lambda _: None)
    files = sorted(huge_tmpfs.glob("*.safetensors"))
    assert len(files) > 1
    assert {path.name: huge_bytes(path) for path in files} == {path.name: whole_huge_pages(path) for path in files}
