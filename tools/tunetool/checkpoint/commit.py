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
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tunetool.checkpoint import metadata, saver_lock
from tunetool.checkpoint.created import Created
from tunetool.checkpoint.steps import fsync_directory
from tunetool.errors import CannotJudge, TunetoolError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

_DATA = re.compile(r"__\d+_\d+(\.(?P<token>[0-9a-f]{16}))?\.distcp")
"""Data files, ours and those of torch's FileSystemWriter."""
_METADATA = re.compile(r"\.metadata\.(?P<token>[0-9a-f]{16})\.tmp")
"""What ours writes before it is renamed."""
_TOKEN = re.compile(r"[0-9a-f]{16}")
UNFINISHED = ".tunetool-save.unfinished"
"""Tokens, one a line, of the saves by several ranks that began since the last commit. When one fails, no process knows
whether all its ranks have ended, so that files of it may appear after the coordinator has removed what it found."""
_REMEMBERED = 1000
_TAIL = 4096
"""Bytes at the end of `.metadata` that hold the save's token, where ours wrote it."""


def data_name(rank: int, index: int, token: str) -> str:
    """The name of a rank's ``index``-th data file in the save ``token``."""
    return f"__{rank}_{index}.{token}.distcp"


class Saving:
    """One save into one directory, opened by the coordinator. Ends by ``commit`` or ``abandon``."""

    def __init__(self, directory: Path, held: saver_lock.Lock, unfinished: Sequence[str] = ()) -> None:
        self.directory = directory
        self._lock = held
        self._pid = os.getpid()
        self.token = held.tokens[-1]
        self._tokens = tuple(dict.fromkeys((*unfinished, *held.tokens)))
        self.failed: tuple[str, ...] = ()
        """Tokens of earlier saves here that did not end by a commit. Their files are removed here; other nodes, where
        the directory is their own, may have more of them."""

    @classmethod
    def open(cls, directory: Path, *, alone: bool = True) -> Saving:
        """Make the directory, lock it, and remove what earlier saves left in it that did not end by a commit.

        No more than that: where every node has storage of its own, other files here may be named by the metadata in
        the same directory of another node, whose rank was the coordinator of the save before.

        ``alone``: no other process writes files of this save.

        Raises ``CannotJudge`` naming the process that saves there now, or why the directory cannot be written.
        """
        with _told(directory):
            make_directory(directory)
            # The time only sorts them; it is the random half that was never used before.
            token = f"{int(time.time()) & 0xFFFFFFFF:08x}{secrets.token_hex(4)}"
            held = saver_lock.Lock.take(directory, token)
        try:
            with _told(directory):
                saving = cls(directory, held, _unfinished(directory))
                earlier = [known_token for known_token in saving._tokens if known_token != token]
                _sweep(directory, earlier)
                saving.failed = _failed(directory, earlier)
                if not alone:
                    _remember(directory, [*earlier, token])
        except BaseException:
            held.release()
            raise
        return saving

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
            for name in (UNFINISHED, f"{UNFINISHED}.tmp"):
                (self.directory / name).unlink(missing_ok=True)
        self._lock.release()

    def abandon(self) -> None:
        """Remove this save's files, unless the directory's metadata names them, and give up the lock.

        Does nothing in a child of the process that opened it.
        """
        if os.getpid() != self._pid:
            return
        try:
            with contextlib.suppress(OSError):
                _sweep(self.directory, self._tokens)
        finally:
            self._lock.release()


def make_directory(directory: Path) -> None:
    """The directory and those around it, each durable in the one that holds it."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        fsync_directory(path.parent)


def sweep_failed(directory: Path, failed: Collection[str]) -> None:
    """On a rank, before it asks for space: remove files of saves that the coordinator says failed.

    The coordinator has done so in its own directory; this is for the nodes that have another one.
    """
    with _told(directory):
        _sweep(directory, failed)


def remove_uncommitted(directory: Path, token: str, files: Sequence[Created]) -> None:
    """Remove a rank's own files of the save ``token``, unless it was committed or goes on.

    Only for a directory in which the coordinator keeps its lock and `.metadata`. Raises ``CannotJudge`` while another
    process saves there; that one removes them.
    """
    if not _names(directory / metadata.NAME, token) and any(file.path.exists() for file in files):
        # As the next save there would do it: the directory knows the save as one that did not end by a commit, and
        # once the lock is had, its metadata says for certain what counts.
        Saving.open(directory).abandon()


def _names(path: Path, token: str) -> bool:
    """Whether the metadata names files of this save. Its bytes tell; parsing it takes far longer."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - _TAIL))
            if token.encode() in stream.read():
                return True
            stream.seek(0)
            return token.encode() in stream.read()
    except FileNotFoundError:
        return False


def _unfinished(directory: Path) -> list[str]:
    try:
        lines = (directory / UNFINISHED).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    return [line for line in lines if _TOKEN.fullmatch(line)]


def _remember(directory: Path, tokens: Sequence[str]) -> None:
    """The list anew, durable before any rank writes; the lock is held."""
    temporary = directory / f"{UNFINISHED}.tmp"
    with temporary.open("w", encoding="utf-8") as stream:
        stream.writelines(f"{token}\n" for token in tokens[-_REMEMBERED:])
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(directory / UNFINISHED)
    fsync_directory(directory)


def _sweep(directory: Path, tokens: Collection[str] | None = None) -> None:
    """Delete files of checkpoints, or of these saves alone, that no metadata of the directory names.

    None while one of its metadata cannot be read.
    """
    if tokens is not None and not tokens:
        return
    candidates = [
        path
        for path in directory.iterdir()
        if (match := _DATA.fullmatch(path.name) or _METADATA.fullmatch(path.name))
        and (tokens is None or match["token"] in tokens)
    ]
    if not candidates:
        # Metadata of a large checkpoint takes long to read.
        return
    try:
        named = metadata.named_in(directory)
    except TunetoolError:
        return
    for path in candidates:
        if path.name not in named:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()


def _failed(directory: Path, tokens: Collection[str]) -> tuple[str, ...]:
    """Those of ``tokens``, saves that another rank's node may have files of, that the directory's metadata does not
    name. None while it cannot be read."""
    if not tokens:
        return ()
    try:
        named = metadata.named_in(directory)
    except TunetoolError:
        return ()
    kept = {match["token"] for name in named if (match := _DATA.fullmatch(name))}
    return tuple(token for token in tokens if token not in kept)


@contextlib.contextmanager
def _told(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CannotJudge(
            f"`{error.filename or directory}` cannot be written: {error.strerror}",
            "the previous checkpoint is whole; see `df`, `quota` and `dmesg | tail`",
        ) from error
