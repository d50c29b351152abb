"""A directory that is written under a hidden name beside its own, and gets that in one rename once it is whole."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from tunetool.checkpoint.os_errors import WRITING, naming_errors
from tunetool.checkpoint.steps import fsync_directory, put_new_step
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.node.common.file_lock import FileLock

_HINT = "look at the file system, then start again: nothing of this name was made"


def need_new(path: Path) -> None:
    """Raises ``UsageProblem`` unless nothing has that name and its directory is there."""
    if os.path.lexists(path):
        raise UsageProblem(f"`{path}` exists", "name a new directory, or remove that one first")
    if not path.parent.is_dir():
        raise UsageProblem(f"`{path.parent}` is not a directory", "make it first, or name another place")


@contextlib.contextmanager
def building(path: Path) -> Iterator[Path]:
    """The hidden directory to fill; what is in it is synced by the caller, the names by this.

    What an earlier, killed one left of it is removed first. Raises ``UsageProblem`` where something has the name
    ``path``, ``CannotJudge`` where another process builds it, or the storage refuses.
    """
    need_new(path)
    hidden = path.with_name(f".{path.name}.unfinished")
    with naming_errors(hidden, _HINT, WRITING):
        hidden.mkdir(exist_ok=True)
        if hidden.is_symlink():
            raise UsageProblem(f"`{hidden}` is a link", "remove it")
        lock = FileLock.on(hidden)
    with lock:
        if not lock.take(patience=0) or not lock.is_named():
            raise CannotJudge(f"another process writes `{path}`", "wait for it, or name another place")
        try:
            with naming_errors(hidden, _HINT, WRITING):
                for left in hidden.iterdir():
                    left.unlink()
            yield hidden
            with naming_errors(hidden, _HINT, WRITING):
                fsync_directory(hidden)
                try:
                    put_new_step(hidden, path)
                except FileExistsError:
                    raise CannotJudge(f"`{path}` was made by somebody else meanwhile", "name another place") from None
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise
