"""The directory that is measured."""

from __future__ import annotations

import os
from pathlib import Path

from tunetool.errors import UsageProblem


def check_target(target: Path) -> None:
    """A directory that can be written. Raises ``UsageProblem``."""
    if not target.exists():
        raise UsageProblem(f"`{target}` does not exist", "`--target` takes a directory on the storage to measure")
    if not target.is_dir():
        raise UsageProblem(f"`{target}` is not a directory", "`--target` takes a directory on the storage to measure")
    if not os.access(target, os.W_OK | os.X_OK):
        raise UsageProblem(
            f"`{target}` is not writable", "run as a user who may write there, or choose another `--target`"
        )
