"""Durable files: on the medium, under their name, when the call returns."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable
from pathlib import Path

from tunetool.checkpoint.steps import fsync, fsync_directory


def fsync_names(directory: Path) -> None:
    """Sync the names in the directory, and its own name in its parent."""
    fsync_directory(directory)
    fsync_directory(directory.parent)


def fsync_below(root: Path) -> None:
    """Sync every file and directory of a tree whose writer syncs none, and ``root`` itself."""
    for folder, _, files in os.walk(root):
        for name in files:
            fsync(Path(folder, name))
        fsync_directory(Path(folder))


def write_durably(path: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` make a new file, then rename it: after a crash, the old or the new file is there, complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    try:
        write(new)
        fsync(new)
        new.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise
    fsync_names(path.parent)


def allow_open_files() -> None:
    """Raise this process's limit of open files as far as it may: torch keeps one open for every shared tensor."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
