"""The programs that the lab needs, and the packages that contain them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tunetool.errors import CannotJudge

_PACKAGES = {
    "qemu-system-x86_64": "qemu-system-x86",
    "qemu-img": "qemu-utils",
    "mmdebstrap": "mmdebstrap",
    "newuidmap": "uidmap",
    "mke2fs": "e2fsprogs",
    "e2fsck": "e2fsprogs",
    "debugfs": "e2fsprogs",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
}
# Debian keeps these out of an ordinary user's PATH.
_SBIN = ("/usr/sbin", "/sbin")
FULL = "is the file system full?"
"""The hint for a program that fails while it writes to a disk."""


def find(program: str) -> str | None:
    """The path of a program, including those in /sbin, which an ordinary user's PATH lacks. None if it is missing."""
    path = shutil.which(program)
    for directory in _SBIN:
        path = path or shutil.which(program, path=directory)
    return path


def require(*programs: str) -> None:
    """Raise an error that names the packages to install, if one of ``programs`` is missing."""
    missing = [program for program in programs if find(program) is None]
    if missing:
        packages = " ".join(sorted({_PACKAGES[program] for program in missing}))
        raise CannotJudge(
            f"`{'`, `'.join(missing)}` not found: the lab needs {'it' if len(missing) == 1 else 'them'}",
            f"apt-get install --no-install-recommends {packages}",
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
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    return done.stderr.strip() if done.returncode != 0 else None
