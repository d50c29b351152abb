"""What the storage refuses, as one line that names it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tunetool.errors import CannotJudge

WRITING = "cannot be written"


@contextlib.contextmanager
def naming_errors(path: Path, hint: str, doing: str = "") -> Iterator[None]:
    """Raise ``CannotJudge`` for an ``OSError``, with the file that it names, else ``path``. ``doing``: such as
    ``WRITING``."""
    try:
        yield
    except OSError as error:
        name = f"`{error.filename or path}`"
        raise CannotJudge(
            f"{name} {doing}: {error.strerror}" if doing else f"{name}: {error.strerror}", hint
        ) from error
