"""Lists every entry of the source before the copy."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from tunetool.errors import CannotJudge, UsageProblem

Kind = Literal["file", "directory", "link"]
MODE = 0o777
"""Mode bits that are copied. Set-user-ID and similar bits are not: the copy belongs to the current user."""
_NAMED = 5
_BLOCK = 512
"""Bytes of the unit in which the kernel counts what a file takes."""


class Entry(NamedTuple):
    """One entry. ``path`` is relative to the tree, ``.`` for the tree itself; ``origin`` is where a file is read.

    ``inode`` and ``ctime_ns`` are those of a file that was listed here. They show a change during the staging,
    even if its time of writing is set back; they mean nothing later, and no manifest holds them. There are as many as
    the tree has files, so it is the kind of object that is made most quickly.
    """

    path: str
    kind: Kind
    size: int = 0
    mtime_ns: int = 0
    mode: int = 0
    target: str = ""
    origin: str = ""
    inode: int = 0
    ctime_ns: int = 0
    holes: int = 0
    """Bytes of the size that the source's medium does not hold, of a file that was listed here."""


def scan(root: Path, ask: bool = True) -> list[Entry]:
    """Every entry under ``root``, parents first, by name; links that leave it are replaced by what they lead to.

    ``ask``: whether each file may be read; False for files that have been read.

    Raises ``UsageProblem`` for what cannot be copied: loops, links that leave it for nowhere, sockets, pipes, devices,
    what may not be read. ``CannotJudge`` when it changes meanwhile.
    """
    walk = _Walk(os.path.realpath(root), ask)
    walk.run()
    if walk.refused:
        first, hint = walk.refused[0]
        more = "".join(f"; {line}" for line, _ in walk.refused[1:_NAMED])
        rest = f"; and {len(walk.refused) - _NAMED} more" if len(walk.refused) > _NAMED else ""
        raise UsageProblem(f"{first}{more}{rest}", hint)
    return sorted(walk.entries, key=_place)


def _place(entry: Entry) -> str:
    """Sorts as the list of the path's names does, in a quarter of the time: no name holds a zero byte."""
    return entry.path.replace("/", "\0") if entry.path != "." else ""


def files_of(entries: Iterable[Entry]) -> list[Entry]:
    """The entries that are files."""
    return [entry for entry in entries if entry.kind == "file"]


def total_bytes(entries: Iterable[Entry]) -> int:
    """Total size of the files in bytes."""
    return sum(entry.size for entry in entries if entry.kind == "file")


def link_text(text: str, path: str, real_directory: str, root: str, destination: str) -> str:
    """What a link at ``path`` says in the copy, so that it leads to the copy of ``destination`` (under ``root``).

    Kept as it is where it cannot mean anything else there: relative, climbing only at its start and not out of the
    tree, and not in a directory that the copy has elsewhere.
    """
    parts = text.split("/")
    climbs = len(parts) - len([part for part in parts if part != ".."])
    depth = path.count("/")
    plain = parts[:climbs] == [".."] * climbs and climbs <= depth
    if plain and _at_home(path, real_directory, root) and not text.startswith("/"):
        return text
    inside = os.path.relpath(destination, root)
    return os.path.relpath(os.path.join("/", inside), os.path.join("/", path.rpartition("/")[0]))


def _at_home(path: str, real_directory: str, root: str) -> bool:
    """Whether what is at ``path`` in the copy lies there in the source too, and is not reached by a followed link."""
    return os.path.normpath(os.path.join(root, path.rpartition("/")[0])) == real_directory


def _breaks_within(text: str, directory: str, root: str) -> bool:
    """Whether a link in ``directory`` that says ``text`` breaks at something under ``root``, after no step outside.

    A copy of the tree has all of these steps, so that the same text breaks at the same step there.
    """
    if text.startswith("/"):
        return False
    at = directory
    for part in text.split("/"):
        if not within(at, root):
            return False
        step = os.path.join(at, part)
        if not os.path.isdir(at) or not os.path.exists(step):
            return True
        at = os.path.realpath(step)
    return False


def within(path: str, directory: str) -> bool:
    """Whether ``path`` is ``directory`` or under it; both real paths."""
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def same_source(now: Sequence[Entry], before: Sequence[Entry]) -> bool:
    """Whether two scans are equal. Times of directories do not count, since every temporary file changes them."""
    return now == before or [_identity(entry) for entry in now] == [_identity(entry) for entry in before]


def untouched(now: Sequence[Entry], before: Sequence[Entry]) -> bool:
    """Whether no file of a source was changed between two scans, not even its ctime."""
    if now == before:
        return True
    files = [[(entry.inode, entry.ctime_ns) for entry in files_of(entries)] for entries in (now, before)]
    return same_source(now, before) and files[0] == files[1]


def _identity(entry: Entry) -> tuple[object, ...]:
    if entry.kind == "file":
        return entry.path, entry.kind, entry.mode, entry.size, entry.mtime_ns
    return entry.path, entry.kind, entry.mode, entry.target


class _Walk:
    def __init__(self, root: str, ask: bool) -> None:
        self.root, self.ask = root, ask
        self.entries: list[Entry] = []
        self.refused: list[tuple[str, str]] = []
        # Where in the copy, the real directory, and the real directories on the way in whose links were followed.
        self._pending: list[tuple[str, str, tuple[str, ...]]] = []

    def run(self) -> None:
        try:
            top = os.stat(self.root)
            self._add_directory(".", self.root, top, ())
            while self._pending:
                relative, real, followed = self._pending.pop()
                prefix = "" if relative == "." else f"{relative}/"
                with os.scandir(real) as entries:
                    for entry in entries:
                        self._add_entry_at(prefix + entry.name, entry, real, followed)
        except PermissionError as error:
            raise UsageProblem(f"`{error.filename}` may not be read", "run as a user who may read it") from None
        except FileNotFoundError as error:
            raise CannotJudge(
                f"`{error.filename}` vanished while the source was listed", "stage a source at rest"
            ) from None

    def _add_entry_at(self, name: str, entry: os.DirEntry[str], real: str, followed: tuple[str, ...]) -> None:
        path, status = entry.path, entry.stat(follow_symlinks=False)
        if not stat.S_ISLNK(status.st_mode):
            self._add(name, path, status, followed)
            return
        text = os.readlink(path)
        try:
            # The kernel decides whether it leads anywhere: ``realpath`` takes `file/..` and `file/` for good.
            target_status = os.stat(path)
            destination = os.path.realpath(path, strict=True)
        except OSError as error:
            self._add_broken_link(name, path, real, text, error)
            return
        if within(destination, self.root):
            target = link_text(text, name, real, self.root, destination)
            self.entries.append(Entry(name, "link", target=target, mtime_ns=status.st_mtime_ns))
            return
        chain = (*followed, real)
        if stat.S_ISDIR(target_status.st_mode) and any(within(directory, destination) for directory in chain):
            self._refuse(
                f"`{path}` leads back to `{destination}`, which it is under", "a loop has no end: remove that link"
            )
            return
        self._add(name, destination, target_status, chain)

    def _add_broken_link(self, name: str, path: str, real: str, text: str, error: OSError) -> None:
        if error.errno == errno.ELOOP:
            self._refuse(f"`{path}` is a loop of links", "remove that link")
        elif error.errno == errno.EACCES:
            self._refuse(f"`{path}` leads to something that may not be read", "run as a user who may read it")
        elif (target := self._broken_text(name, real, text)) is None:
            self._refuse(
                f"`{path}` leads to `{text}`, which is not there", "fetch what is missing, or remove that link"
            )
        else:
            self.entries.append(Entry(name, "link", target=target, mtime_ns=os.lstat(path).st_mtime_ns))

    def _broken_text(self, name: str, real: str, text: str) -> str | None:
        """What a link says in the copy that leads nowhere there either; None where nothing can promise that."""
        if _breaks_within(text, real, self.root) and _at_home(name, real, self.root):
            return text
        destination = os.path.normpath(os.path.join(real, text))
        if text.startswith("/") or not within(destination, self.root) or os.path.exists(destination):
            return None
        return link_text(text, name, real, self.root, destination)

    def _add(self, name: str, path: str, status: os.stat_result, followed: tuple[str, ...]) -> None:
        if stat.S_ISDIR(status.st_mode):
            self._add_directory(name, path, status, followed)
        elif not stat.S_ISREG(status.st_mode):
            self._refuse(
                f"`{self.root}/{name}` is a {_special(status.st_mode)}",
                "only files, directories and links can be staged",
            )
        elif self.ask and not os.access(path, os.R_OK):
            self._refuse(f"`{self.root}/{name}` may not be read", "run as a user who may read it")
        else:
            mode = status.st_mode & MODE
            holes = max(0, status.st_size - status.st_blocks * _BLOCK)
            times = (status.st_ino, status.st_ctime_ns, holes)
            file = Entry(name, "file", status.st_size, status.st_mtime_ns, mode, "", path, *times)
            self.entries.append(file)

    def _add_directory(self, name: str, path: str, status: os.stat_result, followed: tuple[str, ...]) -> None:
        self.entries.append(Entry(name, "directory", mtime_ns=status.st_mtime_ns, mode=status.st_mode & MODE))
        self._pending.append((name, path, followed))

    def _refuse(self, line: str, hint: str) -> None:
        self.refused.append((line, hint))


def _special(mode: int) -> str:
    if stat.S_ISSOCK(mode):
        return "socket"
    return "pipe" if stat.S_ISFIFO(mode) else "device"
