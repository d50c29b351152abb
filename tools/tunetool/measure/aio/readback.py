"""SHA-256 of a file as it is stored: read past the page cache by a process that did not write it.

Self-contained; ``readback.py FILE`` prints one JSON line. It drops the file from the page cache, and
uses direct I/O if the file system supports it.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import sys

_STEP = 4 * 2**20


def drop_file(path: str | os.PathLike[str]) -> None:
    """Drop a file, or what a link leads to, from the page cache."""
    handle = os.open(path, os.O_RDONLY)
    try:
        # Only clean pages are dropped.
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def digest(path: str) -> dict[str, object]:
    """SHA-256 and number of bytes of the file at ``path``."""
    drop_file(path)
    try:
        handle, direct = os.open(path, os.O_RDONLY | os.O_DIRECT), True
    except OSError:
        handle, direct = os.open(path, os.O_RDONLY), False
    sha256, total = hashlib.sha256(), 0
    # Page-aligned, as direct I/O asks.
    buffer = mmap.mmap(-1, _STEP)
    try:
        while True:
            count = os.preadv(handle, [buffer], total)
            if count == 0:
                return {"sha256": sha256.hexdigest(), "bytes": total, "direct": direct}
            with memoryview(buffer) as view:
                sha256.update(view[:count])
            total += count
    finally:
        os.close(handle)
        buffer.close()


if __name__ == "__main__":
    print(json.dumps(digest(sys.argv[1])))  # noqa: T201
