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
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tunetool.checkpoint import metadata, saver_lock
from tunetool.checkpoint.steps import fsync_directory
from tunetool.errors import CannotJudge, TunetoolError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

_DATA = re.compile(r"__\d+_\d+(\.(?P<token>[0-9a-f]{16}))?\.distcp")
"""Data files, ours and those of torch's FileSystemWriter."""
_METADATA = re.compile(r"\.metadata\.(?P<token>[0-9a-f]{16})\.tmp")
"""What ours writes before it is renamed."""


def data_name(rank: int, index: int, token: str) -> str:
    """The name of a rank's ``index``-th data file in the save ``token``."""
    return f"__{rank}_{index}.{token}.distcp"


class Saving:
    """One save into one directory, opened by the coordinator. Ends by ``commit`` or ``abandon``."""

    def __init__(self, directory: Path, held: saver_lock.Lock) -> None:
        self.directory = directory
        self._lock = held
        self.token = held.tokens[-1]

    @classmethod
    def open(cls, directory: Path) -> Saving:
        """Make the directory, lock it, and remove what the saves left in it that held the lock until they were killed.

        No more than that: where every node has storage of its own, other files here may be named by the metadata in
        the same directory of another node, whose rank was the coordinator of the save before.

        Raises ``CannotJudge`` naming the process that saves there now, or why the directory cannot be written.
        """
        with _told(directory):
            make_directory(directory)
            # The time only sorts them; it is the random half that was never used before.
            token = f"{int(time.time()) & 0xFFFFFFFF:08x}{secrets.token_hex(4)}"
            held = saver_lock.Lock.take(directory, token)
        try:
            with _told(directory):
                _sweep(directory, held.tokens)
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
            _sweep(self.directory)
        self._lock.release()

    def abandon(self) -> None:
        """Remove this save's files, unless the directory's metadata names them, and give up the lock."""
        try:
            with contextlib.suppress(OSError):
                _sweep(self.directory, self._lock.tokens)
        finally:
            self._lock.release()


def make_directory(directory: Path) -> None:
    """The directory and those around it, each durable in the one that holds it."""
    missing = [place for place in (directory, *directory.parents) if not place.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for place in reversed(missing):
        fsync_directory(place.parent)


def _sweep(directory: Path, tokens: Collection[str] | None = None) -> None:
    """Delete files of checkpoints, or of these saves alone, that no metadata of the directory names.

    None while one of its metadata cannot be read.
    """
    try:
        named = metadata.named_in(directory)
    except TunetoolError:
        return
    for path in directory.iterdir():
        found = _DATA.fullmatch(path.name) or _METADATA.fullmatch(path.name)
        if found and path.name not in named and (tokens is None or found["token"] in tokens):
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
