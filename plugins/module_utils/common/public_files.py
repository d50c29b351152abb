"""What every user of the node must be able to read, whatever umask root had when it was made."""

from __future__ import annotations

import os
import stat
from typing import Sequence

UMASK = 0o022


def closed(paths: Sequence[str]) -> list[str]:
    """Those of ``paths`` that users cannot read or enter although their owner can. A link is not followed."""
    return [path for path in paths if _opened(path) is not None]


def open_to_users(path: str) -> None:
    """Let users read what their owner can read, and enter or run what their owner can: all that is below ``path``."""
    open_directory(path)
    for directory, directories, files in os.walk(path):
        for name in directories + files:
            open_directory(os.path.join(directory, name))


def open_directory(path: str) -> None:
    """The same for ``path`` alone, and nothing below it."""
    mode = _opened(path)
    if mode is not None:
        os.chmod(path, mode)


def _opened(path: str) -> int | None:
    """The mode that it should have; None where it has it, where it is a link, or where there is nothing."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return None
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        return None
    granted = mode & 0o500
    wanted = stat.S_IMODE(mode) | granted >> 3 | granted >> 6
    return None if wanted == stat.S_IMODE(mode) else wanted
