"""Reading small files of a machine, and replacing files so that a crash leaves the old or the new one, whole."""

from __future__ import annotations

import contextlib
import os
import tempfile


def read_text(path: str) -> str | None:
    """The file's text without surrounding blanks, or None where it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read().strip()
    except OSError:
        return None


def read_int(path: str) -> int | None:
    """The file's text as a whole number, or None; also when it is larger than any that a kernel counts in 64 bits."""
    text = read_text(path)
    try:
        value = int(text) if text is not None else None
    except ValueError:
        return None
    return value if value is None or abs(value) < 2**64 else None


def content(path: str) -> str:
    """The file's exact text, empty when there is no such file."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as stream:
            return stream.read()
    except FileNotFoundError:
        return ""


def replace_file(path: str, text: str, mode: int = 0o644) -> None:
    """Write ``text`` to ``path`` by rename, synced, keeping the owner and mode of a file that was there."""
    real = os.path.realpath(path)
    directory = os.path.dirname(real)
    os.makedirs(directory, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=".%s." % os.path.basename(real), dir=directory)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="surrogateescape") as stream:
            stream.write(text)
            stream.flush()
            try:
                old = os.stat(real)
            except FileNotFoundError:
                os.fchmod(stream.fileno(), mode)
            else:
                os.fchmod(stream.fileno(), old.st_mode & 0o7777)
                os.fchown(stream.fileno(), old.st_uid, old.st_gid)
            os.fsync(stream.fileno())
        os.replace(temporary, real)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    directory_handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(directory_handle)
    finally:
        os.close(directory_handle)
