"""How much of a file in memory lies on huge pages."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

HUGE = 2 * 2**20


def huge_bytes(path: Path) -> int:
    """Bytes of the file that a mapping reaches by huge pages; 0 for an empty file."""
    if not path.stat().st_size:
        return 0
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ) as memory:
        for at in range(0, len(memory), mmap.PAGESIZE):
            _ = memory[at]
        mappings = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    of_file = [text for text in mappings if text.partition("\n")[0].endswith(f" {path}")]
    return sum(int(count) * 1024 for text in of_file for count in re.findall(r"^ShmemPmdMapped:\s+(\d+)", text, re.M))


def whole_huge_pages(path: Path) -> int:
    """Bytes of the file that huge pages can hold."""
    return path.stat().st_size // HUGE * HUGE
