"""The directory that keeps the records: where it is, and whether it can take one."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tunetool import user_directories
from tunetool.errors import UsageProblem


def default_runs_dir() -> Path:
    """/var/lib/tunetool/runs as root, else under ``$XDG_STATE_HOME``."""
    return user_directories.runs()


def prepare_runs_dir(path: Path) -> None:
    """Make sure that a record can be kept, before anything is measured. Raises ``UsageProblem``."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise UsageProblem(
            f"`{path}` cannot keep records: {error.strerror}", "choose another directory with `--runs-dir`"
        ) from None
