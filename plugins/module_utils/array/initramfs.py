"""Is the initramfs older than the mdadm.conf that it must carry, and how is it rebuilt here?"""

from __future__ import annotations

import glob
import os
import re
from typing import Optional

from ..common.commands import run
from ..machine.distribution import DEBIAN, REDHAT, read_distribution

DEBIAN_CONF = "/etc/mdadm/mdadm.conf"
OTHERS_CONF = "/etc/mdadm.conf"

_IMAGE = re.compile(r"^(?:initrd\.img-(?P<debian>.+)|initramfs-(?P<dracut>.+)\.img)$")
_PROGRAM_PLACES = ("usr/sbin", "usr/bin", "sbin", "bin", "usr/local/sbin")


def mdadm_conf_path(root: str = "/") -> str:
    """Where this distribution's mdadm reads its configuration; known also before mdadm is installed."""
    family = read_distribution(root).family
    if family == DEBIAN:
        return DEBIAN_CONF
    if family == REDHAT:
        return OTHERS_CONF
    return DEBIAN_CONF if os.path.isdir(os.path.join(root, "etc/mdadm")) else OTHERS_CONF


def images(root: str = "/") -> list[str]:
    """Every initramfs under /boot that belongs to an installed kernel.

    The image of a kernel that was removed, a rescue or kdump image and a backup are no kernel's own: the tools do not
    rebuild them, so they would count as stale for ever.
    """
    found = []
    for path in glob.glob(os.path.join(root, "boot/init*")):
        match = _IMAGE.match(os.path.basename(path))
        if match and _is_kernel(match.group("debian") or match.group("dracut"), root):
            found.append(path)
    return sorted(found)


def _is_kernel(version: str, root: str) -> bool:
    return any(os.path.isdir(os.path.join(root, base, version)) for base in ("lib/modules", "usr/lib/modules"))


def stale_images(conf: str, root: str = "/") -> list[str]:
    """Images built before ``conf`` was last written: at the next boot they would name the array from old knowledge.

    Times decide, not a note of our own, so that a run cut between the two writes is found by the next one.
    """
    try:
        written = os.stat(os.path.join(root, conf.lstrip("/"))).st_mtime_ns
    except FileNotFoundError:
        return []
    return [path for path in images(root) if os.stat(path).st_mtime_ns <= written]


def rebuild_command(root: str = "/") -> Optional[list[str]]:
    """The distribution's own command that rebuilds all images; None where there is no initramfs tool."""
    if _has_program("update-initramfs", root):
        return ["update-initramfs", "-u", "-k", "all"]
    if _has_program("dracut", root):
        # --mdadmconf: without it dracut leaves mdadm.conf out and the array comes back as md127.
        return ["dracut", "--force", "--regenerate-all", "--mdadmconf"]
    return None


def _has_program(name: str, root: str) -> bool:
    return any(os.path.isfile(os.path.join(root, place, name)) for place in _PROGRAM_PLACES)


def rebuild() -> None:
    """Rebuild all images. Minutes on a slow node; raises ``CommandError`` when the tool fails."""
    command = rebuild_command()
    if command is not None:
        run(command, timeout=1800)
