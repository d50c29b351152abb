"""Checks whether the initramfs carries the arrays of mdadm.conf, and rebuilds it.

The contents of an image decide, not its time: a clock that was behind makes an old image look new.
"""

from __future__ import annotations

import glob
import os
import re
from dataclasses import dataclass
from typing import Any, Callable, Mapping, Optional, Sequence

from ..common.check_result import FAIL, PASS, SKIP, UNKNOWN, Check
from ..common.commands import run
from ..common.files import exact_text
from ..machine.distribution import DEBIAN, REDHAT, read_distribution
from .boot_entries import Gone, gone_images
from .initramfs_reader import Carried, Damaged, Unreadable, read_carried
from .mdadm_conf import ArrayLine, array_lines

DEBIAN_CONF = "/etc/mdadm/mdadm.conf"
OTHERS_CONF = "/etc/mdadm.conf"

_IMAGE = re.compile(r"^(?:initrd\.img-(?P<debian>.+)|initramfs-(?P<dracut>.+)\.img)$")
_PROGRAM_PLACES = ("usr/sbin", "usr/bin", "sbin", "bin", "usr/local/sbin")


def mdadm_conf_path(root: str = "/") -> str:
    """Path of mdadm's configuration on this distribution, even before mdadm is installed."""
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
    image_files = []
    for path in glob.glob(os.path.join(root, "boot/init*")):
        match = _IMAGE.match(os.path.basename(path))
        if match and _is_kernel(match.group("debian") or match.group("dracut"), root):
            image_files.append(path)
    return sorted(image_files)


def _is_kernel(version: str, root: str) -> bool:
    return any(os.path.isdir(os.path.join(root, base, version)) for base in ("lib/modules", "usr/lib/modules"))


@dataclass(frozen=True)
class Image:
    """One image and its problem."""

    path: str
    problem: str = ""
    """Why the next boot would know other arrays than mdadm.conf; empty if it would not."""
    unknown: str = ""
    """Why the image cannot be judged; empty if it can."""

    def __str__(self) -> str:
        return "%s: %s" % (self.path, self.problem or self.unknown or "as mdadm.conf")


def judge_images(
    conf: str, root: str = "/", changed: bool = False, gone: Sequence[str] = (), only: Sequence[str] = ()
) -> list[Image]:
    """Every image against the file ``conf`` (``/etc/mdadm/mdadm.conf``).

    ``changed``: this run has changed, or would change, that file, so that no image has it yet. ``gone``: UUIDs of
    arrays that are no more; with ``only``, nothing but the arrays of those is asked about. A run that was cut
    between the two writes is found by the next one, from the image alone.
    """
    wanted = array_lines(exact_text(os.path.join(root, conf.lstrip("/"))))
    wanted = [array for array in wanted if any(map(array.names, only))] if only else wanted
    judged = []
    for path in images(root):
        if changed:
            judged.append(Image(path, "built before `%s` was changed" % conf))
            continue
        try:
            carried = read_carried(path, _NAMES)
        except Damaged as error:
            judged.append(Image(path, str(error)))
        except Unreadable as error:
            judged.append(Image(path, unknown=str(error)))
        else:
            judged.append(Image(path, apart(carried, wanted, gone)))
    return judged


_NAMES = (DEBIAN_CONF.lstrip("/"), OTHERS_CONF.lstrip("/"))


def apart(carried: Carried, wanted: Sequence[ArrayLine], gone: Sequence[str] = ()) -> str:
    """How an image differs from the lines ``wanted`` of mdadm.conf; empty if it is equivalent.

    Other lines do no harm, unless they are about the same array: initramfs-tools puts in what it finds on the drives
    where mdadm.conf has no ARRAY line.
    """
    if carried.conf is None:
        # Without mdadm nothing is assembled before the root file system with its own mdadm.conf is mounted.
        return "it has mdadm and no mdadm.conf" if carried.mdadm and wanted else ""
    carried_lines = array_lines(carried.conf.decode("utf-8", "surrogateescape"))
    known = {line.words for line in wanted}
    for line in wanted:
        if line.words not in {carried_line.words for carried_line in carried_lines}:
            return "it lacks `%s`" % line
    for carried_line in carried_lines:
        same = any(
            set(line.uuids) & set(carried_line.uuids) or set(line.devices) & set(carried_line.devices)
            for line in wanted
        )
        if carried_line.words not in known and (same or any(map(carried_line.names, gone))):
            return "it still has `%s`" % carried_line
    return ""


def check_images(array: Mapping[str, Any], root: str = "/") -> Check:
    """Check that the next boot knows the manifest's array, by every image."""
    conf = mdadm_conf_path(root)
    expected = "array `%s` by UUID in `%s` and in every initramfs" % (array["name"], conf)
    gone = gone_images(root)
    if gone:
        found = "; ".join("`%s` is gone, which %s names" % (each.path, each.entry) for each in gone)
        return Check(
            CHECK_ID, FAIL, expected, found, "; ".join(dict.fromkeys(_made_again(each, root) for each in gone))
        )
    judged = judge_images(conf, root, only=[array["uuid"]])
    if not judged:
        return Check(CHECK_ID, SKIP, expected, "no initramfs")
    text = exact_text(os.path.join(root, conf.lstrip("/")))
    mine = [line for line in array_lines(text) if line.names(array["uuid"])]
    if not any("/dev/md/" + array["name"] in line.devices for line in mine):
        state = "`%s` has %s" % (conf, "`%s`" % mine[0] if mine else "no line for it")
        return Check(CHECK_ID, FAIL, expected, state, "run `tunetool provision`")
    wrong = [str(image) for image in judged if image.problem]
    if wrong:
        command = rebuild_command(root)
        by_hand = "run `%s`" % " ".join(command) if command else "rebuild it as this distribution does"
        return Check(CHECK_ID, FAIL, expected, "; ".join(wrong), "run `tunetool provision`, or " + by_hand)
    dark = [str(image) for image in judged if image.unknown]
    if dark:
        return Check(
            CHECK_ID,
            UNKNOWN,
            expected,
            "; ".join(dark),
            "run this as root, with the program installed that unpacks the image",
        )
    return Check(CHECK_ID, PASS, expected, "%d looked into" % len(judged))


CHECK_ID = "array.initramfs"


def _made_again(gone: Gone, root: str) -> str:
    """What makes an image anew: the command that rebuilds all leaves out one that is not there."""
    if gone.version and not _is_kernel(gone.version, root):
        return (
            "kernel %s is not installed: install it, or make GRUB's configuration again, such as by `update-grub` or "
            "`grub2-mkconfig`" % gone.version
        )
    if gone.version and _has_program("update-initramfs", root):
        return "run `update-initramfs -c -k %s` before the node reboots" % gone.version
    if gone.version and _has_program("dracut", root):
        return "run `dracut --force --mdadmconf --kver %s` before the node reboots" % gone.version
    return "make `%s` again as this distribution does, before the node reboots" % gone.path


def rebuild_command(root: str = "/") -> Optional[list[str]]:
    """The distribution's own command that rebuilds all images; None without an initramfs tool."""
    if _has_program("update-initramfs", root):
        return ["update-initramfs", "-u", "-k", "all"]
    if _has_program("dracut", root):
        # --mdadmconf: without it dracut leaves mdadm.conf out and the array comes back as md127.
        return ["dracut", "--force", "--regenerate-all", "--mdadmconf"]
    return None


def _has_program(name: str, root: str) -> bool:
    return any(os.path.isfile(os.path.join(root, directory, name)) for directory in _PROGRAM_PLACES)


@dataclass(frozen=True)
class Renewal:
    """The result of a rebuild."""

    stale: tuple[Image, ...]
    """Rebuilt, or to be rebuilt in check mode."""
    left: tuple[Image, ...] = ()
    """Images that are still wrong after the rebuild."""
    unknown: tuple[Image, ...] = ()


def renew(
    conf: str,
    changed: bool,
    acting: bool,
    root: str = "/",
    ours: Sequence[str] = (),
    gone: Sequence[str] = (),
    begins: Callable[[], None] = lambda: None,
) -> Renewal:
    """Rebuild the images that do not carry the arrays of ``conf``, where ``acting`` and where there is a tool for it.

    Minutes on a slow node; raises ``CommandError`` when the tool fails. ``changed`` and ``gone`` are those of
    ``judge_images``. Afterwards only the arrays ``ours`` are checked. ``begins`` is called before a rebuild.
    """
    judged = judge_images(conf, root, changed=changed, gone=gone)
    command = rebuild_command(root)
    stale = tuple(image for image in judged if image.problem and command is not None)
    left: tuple[Image, ...] = ()
    if stale and acting and command is not None:
        begins()
        run(command, timeout=1800)
        judged = judge_images(conf, root, gone=gone, only=ours)
        left = tuple(image for image in judged if image.problem)
    return Renewal(stale, left, tuple(image for image in judged if image.unknown))
