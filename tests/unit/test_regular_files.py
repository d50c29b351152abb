"""Files that others wrote, read whole: what they may hold, and what memory that takes."""

from __future__ import annotations

import errno
import sys
from pathlib import Path

import pytest

from calls import call
from tunetool.regular_files import read_bytes

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("size", [0, 1, 4096, 3 << 20])
def test_a_file_is_read_up_to_the_limit_and_refused_beyond(tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * size)
    assert read_bytes(path, size) == b"x" * size
    assert read_bytes(path, 8 << 30) == b"x" * size
    if size:
        with pytest.raises(OSError, match="larger than") as caught:
            read_bytes(path, size - 1)
        assert caught.value.errno == errno.EFBIG


def test_a_file_whose_size_says_nothing_is_read_too() -> None:
    status = Path("/proc/self/status")
    assert status.stat().st_size == 0
    assert b"VmRSS" in read_bytes(status, 1 << 20)
    with pytest.raises(OSError, match="larger than 10 bytes"):
        read_bytes(status, 10)


def test_a_generous_limit_takes_no_memory(tmp_path: Path) -> None:
    """A node with little memory reads a small file, however large one may be."""
    path = tmp_path / "file"
    path.write_bytes(b"{}")
    program = """if True:
        import resource, sys
        from pathlib import Path
        from tunetool.regular_files import read_bytes
        resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
        assert read_bytes(Path(sys.argv[1]), 8 << 30) == b"{}"
    """
    done = call(sys.executable, "-c", program, str(path), env={"PYTHONPATH": str(ROOT / "tools")})
    assert done.returncode == 0, done.stderr
