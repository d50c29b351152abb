"""Files that this process created, so that it removes only these."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Created:
    """A file that this process created with O_EXCL (so it did not exist before): its path, device and inode."""

    path: Path
    device: int
    inode: int

    @classmethod
    def at(cls, path: Path, handle: int) -> Created:
        """Record the file at ``path``, which is open as ``handle``."""
        status = os.fstat(handle)
        return cls(path, status.st_dev, status.st_ino)

    def remove(self) -> None:
        """Unlink the file, unless another file has its path by now. Ignores storage errors."""
        with contextlib.suppress(OSError):
            status = self.path.lstat()
            if (status.st_dev, status.st_ino) == (self.device, self.inode):
                self.path.unlink()
