"""What the storage refuses, as one line that names it: errors that a job may survive."""

from __future__ import annotations

import contextlib
import errno
import sys
from collections.abc import Iterator
from pathlib import Path

from tunetool.errors import CannotJudge

WRITING = "cannot be written"


class SystemRefused(CannotJudge):
    """The system refused something: storage, memory, or the lock of a save. ``errno``: the kernel's error number, if
    there is one; ``committed``: the new checkpoint is whole all the same, and what failed came after that."""

    errno: int | None = None
    committed: bool = False

    @classmethod
    def with_number(cls, number: int | None, message: str, hint: str) -> SystemRefused:
        failure = cls(message, hint)
        failure.errno = number
        return failure


@contextlib.contextmanager
def naming_errors(path: Path, hint: str, doing: str = "") -> Iterator[None]:
    """Raise ``SystemRefused`` for an ``OSError``, with the file that it names, else ``path``. ``doing``: such as
    ``WRITING``."""
    try:
        yield
    except OSError as error:
        name = f"`{error.filename or path}`"
        why = error.strerror or error
        message = f"{name} {doing}: {why}" if doing else f"{name}: {why}"
        raise SystemRefused.with_number(error.errno, message, hint) from error


_HINTS = {
    errno.ENOSPC: "free some space; the previous checkpoint is whole",
    errno.EDQUOT: "raise the quota or free some space; the previous checkpoint is whole",
    errno.EFBIG: "raise the file size limit (`ulimit -f`), or write more files; the previous checkpoint is whole",
    errno.EIO: "look at `dmesg | tail` and the drives' health; the previous checkpoint is whole",
}


class WriteFailed(SystemRefused):
    """A data file cannot be written. The message names the file and the reason."""

    @classmethod
    def of(cls, path: Path, doing: str, error: OSError) -> WriteFailed:
        hint = _HINTS.get(error.errno or 0, "the previous checkpoint is whole")
        failure = cls(f"`{path}`: {doing} failed: {error.strerror or error}", hint)
        failure.errno = error.errno
        return failure


def warn(text: str) -> None:
    """One line on stderr, if it can be written: where stderr leads may be full as well."""
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is not None:
            sys.stderr.write(f"warning: {text}\n")
