"""Where a user's files lie, by the XDG specification: a relative path in its variables is to be ignored. And whether
the directory of the records can take one."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from tunetool.errors import CannotJudge, UsageProblem


def cache() -> Path:
    """What can be made again."""
    return _base("XDG_CACHE_HOME", ".cache") / "tunetool"


def state() -> Path:
    """What is to be kept."""
    return _base("XDG_STATE_HOME", ".local/state") / "tunetool"


def default_runs_dir() -> Path:
    """Where records go without ``--runs-dir``: /var/lib/tunetool/runs as root, else below ``state``."""
    return Path("/var/lib/tunetool/runs") if os.geteuid() == 0 else state() / "runs"


def _base(variable: str, default: str) -> Path:
    value = os.environ.get(variable, "")
    return Path(value) if value.startswith("/") else Path.home() / default


_RECORD_BYTES = 1 << 19
"""Room that a record and its page may need."""


_OF_THE_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


def prepare_runs_dir(path: Path) -> None:
    """Make sure that a record can be kept, before anything is measured. Raises ``UsageProblem``, and ``CannotJudge``
    where the call is right and the machine has no room, or fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as stream:
            # A file without bytes has room where a file system is full.
            stream.write(bytes(_RECORD_BYTES))
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        kind = CannotJudge if error.errno in _OF_THE_MACHINE else UsageProblem
        raise kind(
            f"`{path}` cannot keep records: {error.strerror}", "choose another directory with `--runs-dir`"
        ) from None
