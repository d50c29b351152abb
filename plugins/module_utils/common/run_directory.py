"""The directory of root's own in /run: what tunetool leaves there goes with a boot, and no user can be first."""

from __future__ import annotations

import os

RUN_DIRECTORY = "/run/tunetool"


def make_run_directory(path: str = RUN_DIRECTORY) -> str:
    """Make it, with what is missing above it. Every user may read what lies there, whatever umask root has.

    Raises ``OSError``.
    """
    os.makedirs(path, exist_ok=True)
    os.chmod(path, 0o755)  # noqa: S103  (results and locks of root's have modes of their own)
    return path
