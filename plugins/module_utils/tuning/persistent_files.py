"""Files that keep I/O settings over a boot: udev rules, tmpfiles.d, sysctl.d and, if tuned runs, a profile."""

from __future__ import annotations

import os
import re
from typing import Sequence

from ..machine.drive_identity import parts
from .settings import CPU_SETTINGS, DRIVE_SETTINGS, THP, Tuning, wanted

UDEV_PATH = "/etc/udev/rules.d/90-tunetool-io.rules"
"""After 63-md-raid-arrays.rules, which sets an array's UUID, and the distributions' 60-block-scheduler.rules."""
TMPFILES_PATH = "/etc/tmpfiles.d/60-tunetool-io.conf"
SYSCTL_PATH = "/etc/sysctl.d/90-tunetool-io.conf"
TUNED_PROFILE = "tunetool-io"
STATE_PATH = "/etc/tunetool/io-tuning.json"
"""The previous values; see ``previous_values``."""

HEADER = "# Written by tunetool (role io_tuning); changes here are lost at its next run.\n"

_ATTRIBUTES = {"read_ahead": "read_ahead_kb"}
_CPU_FILES = {
    "cpu_governor": "/sys/devices/system/cpu/cpu*/cpufreq/scaling_governor",
    "cpu_latency_us": "/sys/devices/system/cpu/cpu*/power/pm_qos_resume_latency_us",
}
_TUNED_OPTIONS = {"cpu_governor": "governor", "cpu_latency_us": "pm_qos_resume_latency_us"}


def anything_of_ours(root: str = "/") -> bool:
    """Whether a run has tuned this node; if not, there is nothing to restore."""
    paths = (STATE_PATH, UDEV_PATH, TMPFILES_PATH, SYSCTL_PATH)
    return any(os.path.exists(os.path.join(root, path.lstrip("/"))) for path in paths)


def attribute(setting: str) -> str:
    """The name of a setting of a block device under queue/."""
    return _ATTRIBUTES.get(setting, setting)


def udev_rules(tuning: Tuning, serials: Sequence[str], array_uuid: str) -> str:
    """One rule for each drive by its serial and one for the array by its UUID; empty where nothing is asked for.

    They hold for a drive that comes back in another slot under another name, and at every boot. So their order says
    nothing: drives are chosen in the order of their names, which a boot may change.
    """
    lines = []
    queue = _assignments(tuning, DRIVE_SETTINGS)
    if queue:
        lines += [_rule(_drive(serial), queue) for serial in sorted(serials)]
    ahead = _assignments(tuning, ("read_ahead",))
    if ahead:
        lines.append(_rule('KERNEL=="md*", ENV{MD_UUID}=="%s"' % array_uuid, ahead))
    return HEADER + "".join(lines) if lines else ""


def _assignments(tuning: Tuning, settings: Sequence[str]) -> str:
    values = [(attribute(name), wanted(tuning, name)) for name in settings]
    return "".join(', ATTR{queue/%s}="%s"' % (name, value) for name, value in values if value is not None)


def _rule(match: str, assignments: str) -> str:
    return 'ACTION=="add|change", SUBSYSTEM=="block", ENV{DEVTYPE}=="disk", %s%s\n' % (match, assignments)


def _drive(identity: str) -> str:
    """The conditions for one drive. Those in plural are met by one device above it, its controller."""
    known = parts(identity)
    match = 'KERNEL=="nvme*", ATTRS{serial}=="%s"' % _pattern(known.serial)
    if known.own_id:
        match += ', ATTR{wwid}=="%s"' % known.own_id
    elif known.address:
        match += ', ATTRS{address}=="%s", ATTR{nsid}=="%s"' % (known.address, known.number)
    return match


def _pattern(serial: str) -> str:
    """A text for udev, which compares by glob without escapes: special characters become `?` (udev(7))."""
    return re.sub(r"[^A-Za-z0-9 ._:+-]", "?", serial.strip())


def tmpfiles(tuning: Tuning, tuned: bool) -> str:
    """Lines for huge pages and, unless tuned would overrule them, for the CPUs."""
    lines = []
    if not tuned:
        if "transparent_hugepages" in tuning:
            lines.append("w /%s - - - - %s\n" % (THP, tuning["transparent_hugepages"]))
        lines += ["w %s - - - - %s\n" % (_CPU_FILES[name], tuning[name]) for name in CPU_SETTINGS if name in tuning]
    return HEADER + "".join(lines) if lines else ""


def sysctl(tuning: Tuning) -> str:
    """The limits of dirty pages, as bytes or as a share of the memory."""
    lines = []
    for name in ("dirty_background", "dirty"):
        value = wanted(tuning, name)
        if value is not None:
            share = value.endswith("%")
            lines.append("vm.%s_%s = %s\n" % (name, "ratio" if share else "bytes", value.rstrip("%")))
    return HEADER + "".join(lines) if lines else ""


def tuned_profile(tuning: Tuning, base: str) -> str:
    """A profile on top of the owner's; empty if tuned has no part in the requested settings."""
    cpu = ["%s=%s\n" % (_TUNED_OPTIONS[name], tuning[name]) for name in CPU_SETTINGS if name in tuning]
    text = "".join(["\n[cpu]\n", *cpu]) if cpu else ""
    if "transparent_hugepages" in tuning:
        text += "\n[vm]\ntransparent_hugepages=%s\n" % tuning["transparent_hugepages"]
    if not text:
        return ""
    include = "include=%s\n" % base if base else ""
    return HEADER + "[main]\nsummary=%s with the I/O settings of tunetool\n%s" % (base or "tunetool", include) + text
