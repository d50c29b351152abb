"""Files that this process created, so that it removes those and no others."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Created:
    """A file that was opened with O_EXCL, which fails where one exists: its path, and which file that is."""

    path: Path
    device: int
    inode: int

    @classmethod
    def at(cls, path: Path, handle: int) -> Created:
        """``handle``: the file, still open."""
        status = os.fstat(handle)
        return cls(path, status.st_dev, status.st_ino)

    def remove(self) -> None:
        """Unlink it, unless another file has its path by now. Errors of the storage are ignored."""
        with contextlib.suppress(OSError):
            status = self.path.lstat()
            if (status.st_dev, status.st_ino) == (self.device, self.inode):
                self.path.unlink()
