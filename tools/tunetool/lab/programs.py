"""The programs and the space that the lab needs."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from tunetool.errors import CannotJudge
from tunetool.node.common.commands import captured
from tunetool.system_packages import find, install_line

FULL = "is the file system full?"
"""The hint for a program that fails while it writes to a disk."""


def require(*programs: str) -> None:
    """Raise an error that names the packages to install, if one of ``programs`` is missing."""
    missing = [program for program in programs if find(program) is None]
    if missing:
        raise CannotJudge(
            f"`{'`, `'.join(missing)}` not found: the lab needs {'it' if len(missing) == 1 else 'them'}",
            install_line(*missing),
        )


def require_space(directory: Path, needed: int, purpose: str) -> None:
    """Raise an error if there is too little free space under ``directory``."""
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise CannotJudge(
            f"`{directory}` has {free / 2**30:.1f} GiB free, and {purpose} may take {needed / 2**30:.1f} GiB",
            "make room, or choose another place with XDG_CACHE_HOME, TUNETOOL_LAB_DIR or TMPDIR",
        )


def failure_of(command: Sequence[str]) -> str | None:
    """What the program said that failed, perhaps nothing; None where it succeeded."""
    done = captured(command, None)
    return done.stderr.strip() if done.returncode != 0 else None
