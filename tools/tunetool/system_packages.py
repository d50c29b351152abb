"""Which package brings a program, and the line that installs it with this machine's package manager."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from tunetool.errors import CannotJudge

_SBIN = ("/usr/local/sbin", "/usr/sbin", "/sbin")
"""Debian keeps these out of an ordinary user's PATH."""
_MANAGERS = {
    "apt-get": "apt-get install --no-install-recommends",
    "dnf": "dnf install",
    "brew": "brew install",
}
"""The line of each package manager, in the order in which a machine is asked for them."""
_NONE = ""
_PACKAGES = {
    "fio": ("fio", "fio", "fio"),
    "ssh": ("openssh-client", "openssh-clients", "openssh"),
    "ssh-keygen": ("openssh-client", "openssh-clients", "openssh"),
    "sshpass": ("sshpass", "sshpass", _NONE),
    "rclone": ("rclone", "rclone", "rclone"),
    "pdsh": ("pdsh", "pdsh", "pdsh"),
    "qemu-system-x86_64": ("qemu-system-x86", "qemu-system-x86-core", "qemu"),
    "qemu-img": ("qemu-utils", "qemu-img", "qemu"),
    "mmdebstrap": ("mmdebstrap", _NONE, _NONE),
    "newuidmap": ("uidmap", "shadow-utils", _NONE),
    "mke2fs": ("e2fsprogs", "e2fsprogs", "e2fsprogs"),
    "e2fsck": ("e2fsprogs", "e2fsprogs", "e2fsprogs"),
    "debugfs": ("e2fsprogs", "e2fsprogs", "e2fsprogs"),
    "mkfs.ext4": ("e2fsprogs", "e2fsprogs", _NONE),
    "mkfs.xfs": ("xfsprogs", "xfsprogs", _NONE),
    "mdadm": ("mdadm", "mdadm", _NONE),
    "wipefs": ("util-linux", "util-linux", _NONE),
    "c++": ("g++", "gcc-c++", "gcc"),
    "/usr/include/libaio.h": ("libaio-dev", "libaio-devel", _NONE),
}
"""The package of each program, or of a file, for apt, dnf and brew."""


def find(program: str) -> str | None:
    """The path of a program, including those in /sbin, which an ordinary user's PATH lacks; or of a file by its path.

    None if it is missing.
    """
    if program.startswith("/"):
        return program if Path(program).exists() else None
    return shutil.which(program) or shutil.which(program, path=os.pathsep.join(_SBIN))


def need(program: str, purpose: str) -> str:
    """The path of ``program``. Raises ``CannotJudge`` if it is missing, with the line that installs it."""
    path = find(program)
    if path is None:
        raise CannotJudge(f"`{program}` is not installed: {purpose}", install_line(program))
    return path


def install_line(*programs: str) -> str:
    """The command, in backticks, that installs ``programs``, and the names of those without a package here."""
    search = os.pathsep.join([os.environ.get("PATH", ""), os.defpath])
    manager = next((name for name in _MANAGERS if shutil.which(name, path=search)), None)
    if manager is None:
        return f"this machine's package manager brings {_listed(programs)}"
    number = list(_MANAGERS).index(manager)
    packages = sorted({_PACKAGES[each][number] for each in programs} - {_NONE})
    without = [each for each in programs if _PACKAGES[each][number] == _NONE]
    # Homebrew refuses to run as root.
    sudo = "" if manager == "brew" or os.geteuid() == 0 else "sudo "
    line = f"`{sudo}{_MANAGERS[manager]} {' '.join(packages)}`" if packages else ""
    rest = f"{manager} has no package of {_listed(without)}: use a machine with Debian or Ubuntu" if without else ""
    return "; ".join(part for part in (line, rest) if part)


def _listed(programs: Sequence[str]) -> str:
    return ", ".join(f"`{each}`" for each in programs)
