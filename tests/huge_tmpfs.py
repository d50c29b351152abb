"""A tmpfs with ``huge=within_size`` (`pytest_plugins = ["huge_tmpfs"]`)."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from skips import no_huge_tmpfs


@pytest.fixture
def huge_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """An empty tmpfs of 256 MiB that gives huge pages to what lies inside a file's size when it is written."""
    if no_huge_tmpfs():
        pytest.skip("this kernel has no huge pages for a tmpfs")
    point = tmp_path / "huge"
    point.mkdir()
    options = ["-t", "tmpfs", "-o", "huge=within_size,size=256m", "none", str(point)]
    if subprocess.run(["mount", *options], capture_output=True, check=False).returncode:
        pytest.skip("needs root and mount(2)")
    try:
        yield point
    finally:
        subprocess.run(["umount", str(point)], check=True)
