"""A directory that is held open: it stays the same one, whatever is renamed meanwhile."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

from tunetool.errors import CannotJudge


class HeldDirectory:
    """``path`` as it is now, until ``close``.

    Where a save makes its data the checkpoint, and where it deletes, a directory that somebody has put at the same path
    meanwhile must not be meant.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.close = weakref.finalize(self, os.close, self.handle)

    @property
    def at(self) -> Path:
        """A path that leads to it, wherever it was moved."""
        return Path(f"/proc/self/fd/{self.handle}")

    def is_in_place(self) -> bool:
        """Whether ``path`` still leads to it. Raises ``OSError`` where the storage fails."""
        try:
            return os.path.samestat(self.path.stat(), os.fstat(self.handle))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def require_in_place(self) -> None:
        """Raises ``CannotJudge`` unless ``path`` still leads to it."""
        if not self.is_in_place():
            raise CannotJudge(
                f"`{self.path}` was renamed, replaced or removed during the save",
                "nothing was changed in what is there now, and the previous checkpoint is where it was moved to; move "
                "step directories only between saves",
            )

    def rename(self, old: str, new: str) -> None:
        """Rename a file in it. Raises ``OSError``."""
        os.replace(old, new, src_dir_fd=self.handle, dst_dir_fd=self.handle)

    def sync(self) -> None:
        """Sync its names. Raises ``OSError``."""
        os.fsync(self.handle)
