"""Where a user's files lie, by the XDG specification: a relative path in its variables is to be ignored."""

from __future__ import annotations

import os
from pathlib import Path


def cache() -> Path:
    """What can be made again."""
    return _base("XDG_CACHE_HOME", ".cache") / "tunetool"


def state() -> Path:
    """What is to be kept."""
    return _base("XDG_STATE_HOME", ".local/state") / "tunetool"


def runs() -> Path:
    """Where records go without ``--runs-dir``: /var/lib/tunetool/runs as root, else below ``state``."""
    return Path("/var/lib/tunetool/runs") if os.geteuid() == 0 else state() / "runs"


def _base(variable: str, default: str) -> Path:
    value = os.environ.get(variable, "")
    return Path(value) if value.startswith("/") else Path.home() / default
