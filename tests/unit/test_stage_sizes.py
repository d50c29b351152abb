"""Files that have fewer bytes on the medium than their size, or other bytes than they say; and Git LFS pointers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from staged import Quiet, failed, stage, verify
from tunetool.errors import ExitCode

MIB = 1 << 20


def sparse(path: Path, size: int, data: dict[int, bytes]) -> None:
    """A file of that size that holds ``data`` at these offsets, and holes elsewhere."""
    with path.open("wb") as file:
        for offset, content in data.items():
            file.seek(offset)
            file.write(content)
        file.truncate(size)


@pytest.mark.parametrize("checksum", ["xxh3_64", "sha256"])
def test_holes_stay_holes(checksum: str, tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    source.mkdir()
    sparse(source / "huge", 300 * MIB, {5: b"begin", 130 * MIB + 65536: b"x" * 4096, 300 * MIB - 3: b"end"})
    sparse(source / "middling", 3 * MIB // 2, {MIB: b"m" * 5000})
    sparse(source / "small", 900_000, {0: b"s"})
    sparse(source / "empty of data", 70 * MIB, {})
    (source / "full").write_bytes(bytes(range(256)) * 8192)
    progress = Quiet()
    result = stage(source, copy, tmp_path / "runs", progress, checksum=checksum)
    assert result.code == ExitCode.OK
    for file in source.iterdir():
        assert subprocess.run(["cmp", "--silent", file, copy / file.name], check=False).returncode == 0, file.name
    assert (copy / "full").stat().st_blocks * 512 >= 256 * 8192
    held = {name: (copy / name).stat().st_blocks * 512 for name in ("huge", "middling", "small", "empty of data")}
    assert held["huge"] <= 4 * 65536
    assert held["middling"] <= 2 * 65536
    assert held["small"] <= 65536
    assert held["empty of data"] == 0
    assert result.record is not None
    (figure,) = result.record.measurements
    size = sum(file.stat().st_size for file in source.iterdir())
    assert figure.parameters["bytes"] == size
    holes = figure.parameters["hole_bytes"]
    assert isinstance(holes, int)
    assert size - holes < 4 * MIB
    assert figure.value == pytest.approx((size - holes) / float(figure.parameters["seconds"]), rel=0.01)
    assert any("MB are holes or stored compressed" in line for line in progress.lines), progress.lines
    assert verify(copy, tmp_path / "runs").code == ExitCode.OK


def test_zeros_that_are_written_are_no_holes(tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    source.mkdir()
    (source / "zeros").write_bytes(bytes(4 * MIB))
    progress = Quiet()
    result = stage(source, copy, tmp_path / "runs", progress)
    assert (copy / "zeros").stat().st_blocks * 512 >= 4 * MIB
    assert result.record is not None
    assert result.record.measurements[0].parameters["hole_bytes"] == 0
    assert not any("hole" in line for line in progress.lines)


@pytest.mark.parametrize("outside", ["/proc/version", "/proc/self/maps", "/sys/kernel/mm/transparent_hugepage/enabled"])
def test_a_file_that_tells_another_size_than_it_has_is_named(outside: str, tmp_path: Path) -> None:
    if not os.access(outside, os.R_OK):
        outside = "/proc/version"
    source, copy = tmp_path / "source", tmp_path / "copy"
    source.mkdir()
    (source / "a").write_bytes(b"a")
    (source / "linked").symlink_to(outside)
    reason = failed(stage(source, copy, tmp_path / "runs"))
    real = os.path.realpath(outside)
    assert f"`{real}` says that it has {Path(outside).stat().st_size} bytes, and " in reason
    assert not copy.exists()


def test_git_lfs_pointers_in_the_source_are_said(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 4976698672\n"
    for name in ("model-1.safetensors", "model-2.safetensors"):
        (source / name).write_text(pointer)
    (source / "notes.txt").write_text("version 3")
    progress = Quiet()
    assert stage(source, tmp_path / "copy", tmp_path / "runs", progress).code == ExitCode.OK
    (said,) = [line for line in progress.lines if "Git LFS" in line]
    assert (
        f"2 files are Git LFS pointers, not the files themselves, the first is `{source}/model-1.safetensors`" in said
    )
    assert "`git lfs pull`" in said
