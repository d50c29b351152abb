"""Fixtures of tests that do real I/O: a disk, memory, and DeepSpeed with its op built (`pytest_plugins = ["disks"]`)."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tunetool.measure.aio import Missing, Probe, need, probe
from tunetool.measure.evidence import obstacles
from tunetool.node.machine.block_stack import read_stack


@pytest.fixture(scope="session")
def ready() -> Probe:
    """DeepSpeed with its op built; the test is skipped where torch would bring CUDA, as `make setup` reported."""
    try:
        probed = probe(Path(sys.executable), os.environ)
        need(probed, "async_io")
    except Missing as error:
        pytest.skip(f"{error.message}; {error.hint}")
    return probed


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """An empty directory on a real disk, whose counters can prove bytes."""
    path = tmp_path / "target"
    path.mkdir()
    if obstacles(read_stack(str(path))):
        pytest.skip("the temporary directory lies on no disk: set TMPDIR to one")
    return path


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory in memory that no other run uses. It must be empty after the test."""
    path = Path(tempfile.mkdtemp(prefix="tunetool-test-", dir="/dev/shm"))
    yield path
    left = [each.name for each in path.iterdir()]
    shutil.rmtree(path)
    assert left == []
