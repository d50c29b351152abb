"""What no node can give a volume: judges the values that are asked for, without reading anything."""

from __future__ import annotations

import re
from typing import Any, Mapping

from ..machine.file_system import BUILT
from ..machine.mounts import plain_path
from .unit_dropins import units_problem

SETTINGS: dict[str, Any] = {
    "mount_point": {"type": "path", "required": True},
    "mount_options": {"type": "list", "elements": "str", "default": ["noatime", "logbufs=8", "logbsize=256k"]},
    "device_timeout": {"type": "str", "default": "30s"},
    "label": {"type": "str", "default": "nvme_raid0"},
    "offload_dir": {"type": "str", "default": ""},
    "offload_owner": {"type": "str", "default": "root"},
    "offload_group": {"type": "str", "default": "root"},
    "offload_mode": {"type": "str", "default": "1777"},
    "protect_mount_point": {"type": "bool", "default": True},
    "services": {"type": "list", "elements": "str", "default": []},
}
"""The variables of the role scratch_filesystem, as a module takes them."""
TAKEN = (
    "/",
    "/usr",
    "/etc",
    "/var",
    "/boot",
    "/home",
    "/bin",
    "/dev",
    "/lib",
    "/proc",
    "/root",
    "/run",
    "/sbin",
    "/sys",
)
"""Directories of the operating system, which a volume would hide."""
_MODE = re.compile(r"[0-7]{3,4}")
_SPAN = re.compile(
    r"\d+(\.\d+)?\s*(us|usec|ms|msec|s|sec|seconds?|m|min|minutes?|h|hr|hours?|d|days?|w|weeks?|M|months?|y|years?)?"
)


def options_of(wanted: Mapping[str, Any]) -> list[str]:
    """The mount options that are asked for, with the one that limits of jobs need."""
    quota = [BUILT.project_quota] if wanted.get("project_quota") else []
    return list(dict.fromkeys([*wanted["mount_options"], *quota]))


def volume_problems(wanted: Mapping[str, Any], log_su_bytes: int) -> list[str]:
    """Every problem, a line each with its hint. ``wanted``: the arguments of M(tunetool.node.scratch_filesystem).

    ``log_su_bytes`` is the log stripe unit that the chunk leads to.
    """
    nowhere = _mount_point(wanted["mount_point"])
    problems = [
        nowhere,
        _label(wanted["label"]),
        # By default that directory is under the mount point: one wrong value is one problem.
        None if nowhere else _offload_dir(wanted["offload_dir"], wanted["mount_point"]),
        *(_option(option, log_su_bytes) for option in wanted["mount_options"]),
        _device_timeout(wanted["device_timeout"]),
        mode_problem(wanted["offload_mode"]),
        *(units_problem([unit]) for unit in wanted["services"]),
    ]
    return [problem for problem in problems if problem]


def _mount_point(point: str) -> str | None:
    if not point.startswith("/") or plain_path(point) in TAKEN:
        return "mount point `%s` is not usable for scratch. hint: use `/mnt/nvme_raid0`" % point
    return None


def _label(label: str) -> str | None:
    if len(label.encode()) > BUILT.label_max or not re.fullmatch(r"[^\s\"'\\]*", label):
        return "label `%s` is longer than %d characters, or holds a blank or a quote. hint: `nvme_raid0`" % (
            label,
            BUILT.label_max,
        )
    return None


def _offload_dir(path: str, point: str) -> str | None:
    if path and not plain_path(path).startswith(plain_path(point).rstrip("/") + "/"):
        return "offload directory `%s` is not under `%s`. hint: put it there" % (path, point)
    return None


def _option(option: str, log_su_bytes: int) -> str | None:
    if not option or re.search(r"[\s,]", option):
        return "`%s` is not one mount option. hint: a list such as `[noatime, logbufs=8]`" % option
    return BUILT.option_problem(option, log_su_bytes)


def _device_timeout(text: str) -> str | None:
    words = re.sub(r"(?<=[a-zM])\s*(?=\d)", "\n", text.strip()).split("\n")
    if text != "infinity" and not all(_SPAN.fullmatch(word) for word in words):
        return "time-out `%s` is no time span of systemd.time(7). hint: use `30s`" % text
    return None


def mode_problem(text: str) -> str | None:
    """Why ``text`` is no mode of the offload directory; None if it is one."""
    if not _MODE.fullmatch(text):
        return 'mode `%s` is not three or four octal digits. hint: use `"1777"`, in quotes' % text
    # One of owner, group and others has to write and enter.
    if not any(int(text, 8) >> shift & 0o3 == 0o3 for shift in (6, 3, 0)):
        return 'mode `%s` lets no job write there. hint: use `"1777"`, in quotes' % text
    return None
