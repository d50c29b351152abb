"""Is the initramfs older than the mdadm.conf that it must carry, and how is it rebuilt here?"""

from __future__ import annotations

import glob
import os
import shutil
from typing import Optional

from .commands import run

MDADM_CONFS = ("/etc/mdadm/mdadm.conf", "/etc/mdadm.conf")
"""Debian's place, then everybody else's."""


def mdadm_conf_path(root: str = "/") -> str:
    """Where this distribution's mdadm reads its configuration."""
    debian = os.path.isdir(os.path.join(root, "etc/mdadm"))
    return MDADM_CONFS[0] if debian else MDADM_CONFS[1]


def images(root: str = "/") -> list[str]:
    """Every initramfs under /boot that belongs to an installed kernel."""
    found = glob.glob(os.path.join(root, "boot/initrd.img-*")) + glob.glob(os.path.join(root, "boot/initramfs-*.img"))
    return sorted(path for path in found if "rescue" not in path and "kdump" not in path and not path.endswith(".bak"))


def stale_images(conf: str, root: str = "/") -> list[str]:
    """Images built before ``conf`` was last written: at the next boot they would name the array from old knowledge.

    Times decide, not a note of our own, so that a run cut between the two writes is found by the next one.
    """
    try:
        written = os.stat(os.path.join(root, conf.lstrip("/"))).st_mtime_ns
    except FileNotFoundError:
        return []
    return [path for path in images(root) if os.stat(path).st_mtime_ns <= written]


def rebuild_command() -> Optional[list[str]]:
    """The distribution's own command that rebuilds all images; None where there is no initramfs tool."""
    if shutil.which("update-initramfs", path=_PATH):
        return ["update-initramfs", "-u", "-k", "all"]
    if shutil.which("dracut", path=_PATH):
        # --mdadmconf: without it dracut leaves mdadm.conf out and the array comes back as md127.
        return ["dracut", "--force", "--regenerate-all", "--mdadmconf"]
    return None


def rebuild() -> None:
    """Rebuild all images. Minutes on a slow node; raises ``CommandError`` when the tool fails."""
    command = rebuild_command()
    if command is not None:
        run(command, timeout=1800)


_PATH = os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin"
