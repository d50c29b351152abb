"""A save that replaces the checkpoint of a directory atomically, or leaves the old one unchanged.

The steps, in this order: every rank writes data files under names never used before and syncs them and the directory;
the coordinator writes the new `.metadata` to a temporary file, syncs it, renames it over the old one (there is always
exactly one) and syncs the directory; only then are the files deleted that no metadata names.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import time
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tunetool import regular_files
from tunetool.checkpoint import metadata, saver_lock
from tunetool.checkpoint.direct import Created
from tunetool.checkpoint.metadata import without_sum
from tunetool.checkpoint.os_errors import WRITING, SystemRefused, naming_errors
from tunetool.checkpoint.steps import fsync_directory
from tunetool.errors import TunetoolError


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
        """Raises ``SystemRefused`` unless ``path`` still leads to it."""
        if not self.is_in_place():
            raise SystemRefused.with_number(
                errno.ESTALE,
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


if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

PREVIOUS_IS_WHOLE = "the previous checkpoint is whole; see `df`, `quota` and `dmesg | tail`"
_NEW_IS_WHOLE = (
    "it is whole, and so are the files of the previous one, which a power cut may bring back: see `dmesg | tail`, then "
    "save again"
)
_DATA = re.compile(r"__\d+_\d+(\.(?P<token>[0-9a-f]{16}))?\.distcp")
"""Names of data files, written by DirectWriter or by torch's FileSystemWriter."""
_METADATA = re.compile(r"\.metadata\.(?P<token>[0-9a-f]{16})\.tmp")
"""The temporary file that DirectWriter renames to `.metadata`."""
_TOKEN = re.compile(r"[0-9a-f]{16}")
_SAVE_ID = re.compile(rb"\x8c\x07save_id\x94?\x8c\x10([0-9a-f]{16})")
"""In the pickle: the field ``save_id`` of ``StorageMeta``, and DirectWriter's token (torch's is longer)."""
UNFINISHED = ".tunetool-save.unfinished"
"""Tokens, one per line, of the multi-rank saves that began since the last commit. When a save fails, no process knows
whether all ranks have ended: files may still appear after the coordinator has removed the existing ones."""
_REMEMBERED = 1000
_TAIL = 4096
"""Bytes at the end of `.metadata` that contain the token of the save, if DirectWriter wrote it."""


def data_name(rank: int, index: int, token: str) -> str:
    """The name of a rank's ``index``-th data file in the save ``token``."""
    return f"__{rank}_{index}.{token}.distcp"


class Saving:
    """One save to one directory, opened by the coordinator. It must be ended by ``commit`` or ``abandon``."""

    def __init__(self, held: HeldDirectory, lock: saver_lock.Lock, unfinished: Sequence[str] = ()) -> None:
        self.directory = held.path
        self._held = held
        self._lock = lock
        self._pid = os.getpid()
        self.token = lock.tokens[-1]
        self._tokens = tuple(dict.fromkeys((*unfinished, *lock.tokens)))
        self.failed: tuple[str, ...] = ()
        """Tokens of earlier saves to this directory that were not committed. Their files are removed here; a node that
        has its own directory under the same path may have more files of them."""
        self.written: tuple[Created, ...] = ()
        """Files that the coordinator's own rank has written, wherever its path led."""

    @classmethod
    def open(cls, directory: Path, *, alone: bool = True) -> Saving:
        """Make the directory, lock it, and remove the files of earlier saves that were not committed.

        No other files are removed: where every node has its own storage, the metadata that names them may be in the
        same directory of another node, whose rank was the coordinator of the previous save.

        ``alone``: no other process writes files of this save.

        Raises ``CannotJudge`` naming the process that is saving there, or why the directory cannot be written.
        """
        with naming_errors(directory, PREVIOUS_IS_WHOLE, WRITING):
            make_directory(directory)
            # The time only sorts tokens; the random half makes them unique.
            token = f"{int(time.time()) & 0xFFFFFFFF:08x}{secrets.token_hex(4)}"
            held = HeldDirectory(directory)
            lock = saver_lock.Lock.take(directory, token)
        try:
            with naming_errors(directory, PREVIOUS_IS_WHOLE, WRITING):
                held.require_in_place()
                saving = cls(held, lock, _unfinished(directory))
                earlier = [known_token for known_token in saving._tokens if known_token != token]
                _delete_unnamed(directory, earlier)
                saving.failed = _tokens_not_named(directory, earlier)
                if not alone:
                    _record_unfinished(directory, [*earlier, token])
        except BaseException:
            lock.release()
            raise
        return saving

    def data_name(self, rank: int, index: int) -> str:
        """``__{rank}_{index}.{token}.distcp``; other ranks get the token with their plan and call
        ``commit.data_name``."""
        return data_name(rank, index, self.token)

    def commit(self, new: Metadata) -> None:
        """Make ``new`` the checkpoint of the directory. Every file that it names, and the directory, must be synced.

        Raises ``UsageProblem`` for metadata that ``metadata.loads`` refuses, ``CannotJudge`` when the storage fails.
        The old checkpoint then remains, unless only the last sync failed; the caller must still call ``abandon``.
        """
        self.commit_content([metadata.dumps(new, self.directory / metadata.NAME)], metadata.files_of(new))

    def commit_content(self, content: Sequence[bytes | memoryview], names: Collection[str]) -> None:
        """``commit`` of metadata as bytes, in parts, which name the data files ``names`` and no others."""
        temporary = self.directory / f"{metadata.NAME}.{self.token}.tmp"
        with naming_errors(self.directory, PREVIOUS_IS_WHOLE, WRITING):
            self._held.require_in_place()
            with temporary.open("xb") as stream:
                stream.writelines(content)
                stream.flush()
                os.fsync(stream.fileno())
            self._held.require_in_place()
            self._held.rename(temporary.name, metadata.NAME)
        try:
            with naming_errors(self.directory, _NEW_IS_WHOLE, "holds the new checkpoint, and cannot be synced"):
                self._held.sync()
        except SystemRefused as error:
            error.committed = True
            raise
        # The save is complete; the next save removes what cannot be removed now.
        with contextlib.suppress(OSError):
            _delete_unnamed(self._held.at, committed=names)
            for name in (UNFINISHED, f"{UNFINISHED}.tmp"):
                (self._held.at / name).unlink(missing_ok=True)
        self._end()

    def abandon(self) -> None:
        """Remove the files of this save, unless the metadata of the directory names them, and release the lock.

        Does nothing in a child of the process that opened it.
        """
        if os.getpid() != self._pid:
            return
        try:
            with contextlib.suppress(OSError):
                _delete_unnamed(self._held.at, self._tokens)
            if not self._held.is_in_place():
                # They may lie in what somebody put at the path, which names none of them.
                for file in self.written:
                    file.remove()
        finally:
            self._end()

    def _end(self) -> None:
        self._lock.release()
        self._held.close()


def make_directory(directory: Path) -> None:
    """Make the directory and its missing parents, and sync each parent so that the names survive a power cut."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        fsync_directory(path.parent)


def sweep_failed(directory: Path, failed: Collection[str]) -> None:
    """Remove the files of ``failed`` saves (tokens from the coordinator). Each rank calls this before it checks free
    space: the coordinator has cleaned its own directory, but other nodes may have their own."""
    with naming_errors(directory, PREVIOUS_IS_WHOLE, WRITING):
        _delete_unnamed(directory, failed)


def remove_uncommitted(directory: Path, token: str, files: Sequence[Created]) -> None:
    """Remove a rank's own files of the save ``token``, unless it was committed or is still running.

    Only for a directory that also has the coordinator's lock and `.metadata`. Raises ``CannotJudge`` while another
    process saves there; that save removes the files.
    """
    if not _names_save(directory / metadata.NAME, token) and any(file.path.exists() for file in files):
        # The next save would do the same: the directory lists this save as not committed, and once the lock is held,
        # the metadata says for certain which files belong to the checkpoint.
        Saving.open(directory).abandon()


def _names_save(path: Path, token: str) -> bool:
    """Whether the metadata names files of this save. Searches its bytes, since parsing takes far longer."""
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


def _record_unfinished(directory: Path, tokens: Sequence[str]) -> None:
    """Replace the list of unfinished saves, synced before any rank writes. The caller holds the lock."""
    temporary = directory / f"{UNFINISHED}.tmp"
    with temporary.open("w", encoding="utf-8") as stream:
        stream.writelines(f"{token}\n" for token in tokens[-_REMEMBERED:])
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(directory / UNFINISHED)
    fsync_directory(directory)


def _delete_unnamed(
    directory: Path, tokens: Collection[str] | None = None, committed: Collection[str] | None = None
) -> None:
    """Delete checkpoint files that no metadata of the directory names; with ``tokens``, only those of these saves.

    ``committed``: the files that `.metadata` names, where the caller has just written it. Deletes nothing if any
    metadata of the directory cannot be read.
    """
    if tokens is not None and not tokens:
        return
    candidates = [
        path
        for path in directory.iterdir()
        if (match := _DATA.fullmatch(path.name) or _METADATA.fullmatch(path.name))
        and (tokens is None or match["token"] in tokens)
    ]
    if committed is not None:
        candidates = [path for path in candidates if path.name not in committed]
    if not candidates:
        # Metadata of a large checkpoint takes long to read.
        return
    try:
        named = _named(directory, tokens, committed)
    except TunetoolError:
        return
    for path in candidates:
        match = _DATA.fullmatch(path.name)
        if path.name not in named.files and not (match and match["token"] in named.tokens):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()


@dataclass(frozen=True)
class _Named:
    """What the metadata of a directory names: files, and all files of the saves ``tokens``."""

    files: Collection[str]
    tokens: Collection[str]


def _named(directory: Path, tokens: Collection[str] | None, committed: Collection[str] | None) -> _Named:
    """Raises ``TunetoolError`` if metadata of the directory cannot be read.

    Metadata of a large checkpoint takes long to unpickle, so it is not where its names are known: it was just written,
    or it is that of a save of DirectWriter, whose files all have the token that its last bytes name.
    """
    if committed is not None:
        return _Named({*committed, *metadata.named_in(directory, but=metadata.NAME)}, ())
    token = _token_of(directory / metadata.NAME) if tokens is not None else None
    if token is not None:
        return _Named(metadata.named_in(directory, but=metadata.NAME), (token,))
    return _Named(metadata.named_in(directory), ())


def _token_of(path: Path) -> str | None:
    """The token of the save that wrote the metadata, from its last bytes; None if they do not name one."""
    try:
        content = regular_files.read_end(path, _TAIL)
    except OSError:
        return None
    if not without_sum(content).endswith(b"."):
        return None
    tokens = _SAVE_ID.findall(content)
    return tokens[-1].decode("ascii") if tokens else None


def _tokens_not_named(directory: Path, tokens: Collection[str]) -> tuple[str, ...]:
    """Those of ``tokens`` that the metadata of the directory does not name: other nodes may have files of these saves.
    Empty if the metadata cannot be read."""
    if not tokens:
        return ()
    try:
        named = _named(directory, tokens, None)
    except TunetoolError:
        return ()
    kept = {match["token"] for name in named.files if (match := _DATA.fullmatch(name))} | set(named.tokens)
    return tuple(token for token in tokens if token not in kept)
