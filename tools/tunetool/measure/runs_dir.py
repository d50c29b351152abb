"""The directory that keeps the records: where it is, and whether it can take one."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tunetool import user_directories
from tunetool.errors import UsageProblem

_RECORD_BYTES = 1 << 19
"""Room that a record and its page may need."""


def default_runs_dir() -> Path:
    """/var/lib/tunetool/runs as root, else under ``$XDG_STATE_HOME``."""
    return user_directories.runs()


def prepare_runs_dir(path: Path) -> None:
    """Make sure that a record can be kept, before anything is measured. Raises ``UsageProblem``."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as stream:
            # A file without bytes has room where a file system is full.
            stream.write(bytes(_RECORD_BYTES))
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise UsageProblem(
            f"`{path}` cannot keep records: {error.strerror}", "choose another directory with `--runs-dir`"
        ) from None
