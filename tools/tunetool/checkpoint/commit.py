"""A save that replaces the checkpoint of a directory as one, or leaves it as it was.

The order that makes it so: data files under names never used before; all of them and the directory synced by every
rank; `.metadata` written beside, synced, renamed over the old one (one rename, so there is always exactly one), the
directory synced; only then the files that no metadata names are deleted.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tunetool.checkpoint import lock, metadata
from tunetool.errors import CannotJudge, TunetoolError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

_HEX = r"[0-9a-f]{16}"
_OURS = re.compile(rf"__\d+_\d+\.({_HEX})\.distcp|\.metadata\.({_HEX})\.tmp")
"""What a save of ours leaves when it is killed."""
_DATA = re.compile(rf"__\d+_\d+(\.{_HEX})?\.distcp")
"""Data files, ours and those of torch's FileSystemWriter."""


def data_name(rank: int, index: int, token: str) -> str:
    """The name of a rank's ``index``-th data file in the save ``token``."""
    return f"__{rank}_{index}.{token}.distcp"


def fsync_directory(path: Path) -> None:
    """Make the names in it durable. Raises ``OSError``."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Saving:
    """One save into one directory, opened by the coordinator. Ends by ``commit`` or ``abandon``."""

    def __init__(self, directory: Path, held: lock.Lock) -> None:
        self.directory = directory
        self._lock = held
        # The time only sorts them; it is the random half that was never used before.
        self.token = f"{int(time.time()) & 0xFFFFFFFF:08x}{secrets.token_hex(4)}"

    @classmethod
    def open(cls, directory: Path) -> Saving:
        """Make the directory, lock it, and remove what earlier saves that were killed left in it.

        Raises ``CannotJudge`` naming the process that saves there now, or why the directory cannot be written.
        """
        with _told(directory):
            _make(directory)
            held = lock.Lock.take(directory)
        try:
            with _told(directory):
                _sweep(directory, _OURS)
        except BaseException:
            held.release()
            raise
        return cls(directory, held)

    def data_name(self, rank: int, index: int) -> str:
        """``__{rank}_{index}.{token}.distcp``; other ranks know the token from the plan, see ``data_name``."""
        return data_name(rank, index, self.token)

    def commit(self, new: Metadata) -> None:
        """Make ``new`` the directory's checkpoint. Every file that it names, and the directory, is synced already.

        Raises ``UsageProblem`` for metadata that no reader here would accept, ``CannotJudge`` when the storage fails:
        the old checkpoint then stays, and ``abandon`` is still to be called.
        """
        path = self.directory / metadata.NAME
        content = metadata.dumps(new, path)
        temporary = self.directory / f"{metadata.NAME}.{self.token}.tmp"
        with _told(self.directory):
            with temporary.open("xb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(path)
            fsync_directory(self.directory)
        # The save is complete: what cannot be removed now is removed by the next one.
        with contextlib.suppress(OSError):
            _sweep(self.directory, _DATA, _OURS)
        self._lock.release()

    def abandon(self) -> None:
        """Remove this save's files, unless the directory's metadata names them, and give up the lock."""
        try:
            with contextlib.suppress(OSError):
                _sweep(self.directory, _OURS)
        finally:
            self._lock.release()


def _make(directory: Path) -> None:
    """The directory and those around it, each durable in the one that holds it."""
    missing = [place for place in (directory, *directory.parents) if not place.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for place in reversed(missing):
        fsync_directory(place.parent)


def _sweep(directory: Path, *patterns: re.Pattern[str]) -> None:
    """Delete files of these patterns that no metadata of the directory names; none while one cannot be read."""
    try:
        named = metadata.named_in(directory)
    except TunetoolError:
        return
    for path in directory.iterdir():
        if path.name not in named and any(pattern.fullmatch(path.name) for pattern in patterns):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()


@contextlib.contextmanager
def _told(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CannotJudge(
            f"`{error.filename or directory}` cannot be written: {error.strerror}",
            "the previous checkpoint is whole; see `df`, `quota` and `dmesg | tail`",
        ) from error
