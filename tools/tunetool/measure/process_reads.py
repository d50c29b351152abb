"""What this process has read, by the kernel's own counters."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Read(NamedTuple):
    """Bytes that a process read."""

    storage: int = 0
    """Fetched from a block device: the page cache did not have them."""
    logical: int = 0
    """Returned by read calls, wherever they came from."""

    def since(self, before: Read) -> Read:
        """The bytes that were read after ``before``."""
        return Read(self.storage - before.storage, self.logical - before.logical)

    def plus(self, other: Read) -> Read:
        """The sum of both."""
        return Read(self.storage + other.storage, self.logical + other.logical)


def counted_reads(proc: str = "/proc/self/io") -> Read | None:
    """The bytes that this process with its threads has read so far (proc(5)); None where the kernel does not count."""
    try:
        lines = dict(line.split(": ") for line in Path(proc).read_text().splitlines())
        return Read(int(lines["read_bytes"]), int(lines["rchar"]))
    except (OSError, ValueError, KeyError):
        return None


def reads(proc: str = "/proc/self/io") -> Read:
    """As ``counted_reads``, and zero where the kernel does not count."""
    return counted_reads(proc) or Read()
