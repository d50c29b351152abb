"""Reads small files, replaces files atomically (after a crash one of both is complete), opens them to all users."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from typing import Any, Sequence

from .documents import open_regular
from .temporary import new_file, remove_stale_files

_LARGEST = 64 << 20
"""Bytes. More than any file has that is read here as text."""
_PART = 1 << 16
_WHOLE = re.compile(r"[+-]?[0-9]{1,20}")
RUN_DIRECTORY = "/run/tunetool"


def read_text(path: str) -> str | None:
    """The file's text without surrounding blanks, or None if it cannot be read."""
    try:
        text = _content(path).decode("utf-8", "replace")
    except (OSError, ValueError):  # a path that was read from another file may hold a zero byte
        return None
    return text.replace("\r\n", "\n").replace("\r", "\n").strip()


def _content(path: str) -> bytes:
    """A file's bytes. In a tree that somebody recorded, a FIFO would hold ``open``, and a file could be endless.

    Raises ``OSError``.
    """
    with os.fdopen(open_regular(path), "rb", buffering=0) as stream:
        parts: list[bytes] = []
        size, read = os.fstat(stream.fileno()).st_size, 0
        # The files of /proc/sys have their whole text in the first answer, or none to a question of many MiB.
        while max(size, read) <= _LARGEST:
            part = stream.read(_PART)
            if not part:
                return b"".join(parts)
            parts.append(part)
            read += len(part)
    raise OSError(errno.EFBIG, "it is larger than %d bytes" % _LARGEST, path)


def whole_number(text: str | None) -> int | None:
    """The number that ``text`` is, in decimal ASCII digits, or None; also beyond what a kernel counts in 64 bits."""
    if text is None or not _WHOLE.fullmatch(text):
        return None
    value = int(text)
    return value if abs(value) < 2**64 else None


def read_int(path: str) -> int | None:
    """The file's text as a whole number, as ``whole_number`` reads it; None also where it cannot be read."""
    return whole_number(read_text(path))


def content(path: str) -> str:
    """The file's exact text, empty when there is no such file.

    ``replace_file`` writes back the same bytes: bytes that are not UTF-8 become lone surrogates, and line ends stay.
    Put such a text through ``printable`` before it is shown.
    """
    try:
        with open(path, encoding="utf-8", errors="surrogateescape", newline="") as stream:
            return stream.read()
    except FileNotFoundError:
        return ""


def exact_text(path: str) -> str:
    """``content``, empty also where the file cannot be read: for names that the kernel prints, byte for byte."""
    try:
        return _content(path).decode("utf-8", "surrogateescape")
    except (OSError, ValueError):
        return ""


def link_target(path: str) -> str:
    """Where a link leads, as it is written; empty where there is none or it may not be read."""
    with contextlib.suppress(OSError):
        return os.readlink(path)
    return ""


def entries_of(path: str) -> list[str]:
    """Names in a directory; none where it is gone or may not be read, as that of a process that ended."""
    with contextlib.suppress(OSError):
        return os.listdir(path)
    return []


def lines(text: str) -> list[str]:
    """The lines of a text with their ends, as the programs that read these files split them: at line feeds alone.

    ``str.splitlines`` also splits at form feeds, at vertical tabs and at U+2028, which occur within lines.
    """
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def with_line(text: str, line: str, before: int | None = None) -> str:
    """``text`` with one more line, so that taking that line away again gives back the same bytes.

    It is the last line, or the one before it if the last line has no line end, which then stays unchanged.
    ``before`` is the number (from 0) of the line before which it comes then, where that is not the last.
    """
    whole = lines(text)
    if text and not text.endswith("\n"):
        whole.insert(len(whole) - 1 if before is None else before, line + "\n")
    else:
        whole.append(line + "\n")
    return "".join(whole)


_UNPRINTABLE = re.compile("[\ud800-\udfff]")


def printable(value: Any) -> Any:
    """A text, or what JSON can hold, with bytes that are not UTF-8 as ``\\xfc``: ansible-core takes no other result."""
    if isinstance(value, str):
        return _UNPRINTABLE.sub(_shown, value)
    if isinstance(value, dict):
        return {printable(key): printable(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [printable(each) for each in value]
    return value


def _shown(match: re.Match[str]) -> str:
    code = ord(match.group())
    return "\\x%02x" % (code - 0xDC00) if 0xDC80 <= code <= 0xDCFF else "\\u%04x" % code


def refuse_irregular(path: str) -> None:
    """Raises ``OSError`` (EINVAL) where the path leads to something that is no regular file.

    A rename replaces also a device: as root, /dev/null would be a file from then on.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(errno.EINVAL, "it is not a regular file", path)


def replace_file(path: str, text: str, mode: int = 0o644, sync: bool = True, follow: bool = True) -> None:
    """Write ``text`` to ``path`` by rename, keeping the owner and mode of a file that was there.

    Raises ``OSError``, also as ``refuse_irregular`` does, and then whatever was there is as it was.
    A process that is killed in it leaves its temporary file beside ``path``; the next call for ``path`` removes that.
    ``sync``: it survives a power cut, not only the end of this process. ``follow``: False in a directory where others
    may write, as /dev/shm: a link at ``path``, or whatever else, is replaced and not followed, and nobody else's owner
    and mode are kept.
    """
    if follow:
        refuse_irregular(path)
    directory, name = os.path.split(os.path.realpath(path) if follow else os.path.abspath(path))
    directory = os.path.realpath(directory)
    real = os.path.join(directory, name)
    _make_directory(directory, sync)
    prefix = ".%s.tunetool-" % name
    remove_stale_files(prefix, directory)
    handle, temporary = new_file(prefix, directory)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="surrogateescape", newline="") as stream:
            stream.write(text)
            stream.flush()
            old = _status(real) if follow else None
            if old is None:
                os.fchmod(stream.fileno(), mode)
            else:
                os.fchown(stream.fileno(), old.st_uid, old.st_gid)
                # After the owner: a change of that takes the set-user-ID and set-group-ID bits away.
                os.fchmod(stream.fileno(), old.st_mode & 0o7777)
            if sync:
                os.fsync(stream.fileno())
            # Before the file is closed: then nothing tells it from a leftover.
            os.replace(temporary, real)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        if isinstance(error, OSError) and error.filename is None:
            # A full disk, of which the handle alone knows.
            error.filename = path
        raise
    if sync:
        sync_directory(directory)


def _make_directory(path: str, sync: bool) -> None:
    """Make it, with what is missing above it. ``sync``: its name, too, survives a power cut."""
    missing = []
    above = path
    while not os.path.isdir(above):
        missing.append(above)
        above = os.path.dirname(above)
    os.makedirs(path, exist_ok=True)
    for made in missing if sync else ():
        sync_directory(os.path.dirname(made))


def _status(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def sync_directory(path: str) -> None:
    """Let the names in a directory survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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


def make_run_directory(path: str = RUN_DIRECTORY) -> str:
    """Make root's own directory in /run, in which no user can be first, and which goes with a boot.

    Every user may read what lies there, whatever umask root has. Raises ``OSError``.
    """
    os.makedirs(path, exist_ok=True)
    os.chmod(path, 0o755)  # noqa: S103  (results and locks of root's have modes of their own)
    return path
