"""Files that keep I/O settings over a boot: udev rules, tmpfiles.d, sysctl.d and, if tuned runs, a profile."""

from __future__ import annotations

import os
import re
from typing import Iterator, Sequence

from ..common.io_settings import ARRAY, DRIVE, ROWS, SYSCTL, TMPFILES, Setting, Tuning, of_target
from ..machine.drive_identity import parts
from .settings import wanted

UDEV_PATH = "/etc/udev/rules.d/90-tunetool-io.rules"
"""After 63-md-raid-arrays.rules, which sets an array's UUID, and the distributions' 60-block-scheduler.rules."""
TMPFILES_PATH = "/etc/tmpfiles.d/60-tunetool-io.conf"
SYSCTL_PATH = "/etc/sysctl.d/90-tunetool-io.conf"
TUNED_PROFILE = "tunetool-io"
STATE_PATH = "/etc/tunetool/io-tuning.json"
"""The previous values; see ``previous_values``."""

HEADER = "# Written by tunetool (role io_tuning); changes here are lost at its next run.\n"


def anything_of_ours(root: str = "/") -> bool:
    """Whether a run has tuned this node; if not, there is nothing to restore."""
    paths = (STATE_PATH, UDEV_PATH, TMPFILES_PATH, SYSCTL_PATH)
    return any(os.path.exists(os.path.join(root, path.lstrip("/"))) for path in paths)


def udev_rules(tuning: Tuning, serials: Sequence[str], array_uuids: Sequence[str]) -> str:
    """One rule for each drive by its serial and one for each array by its UUID; empty where nothing is asked for.
    Without an array what is asked of it is in the drives' rules.

    They hold for a drive that comes back in another slot under another name, and at every boot. So their order says
    nothing: drives are chosen in the order of their names, which a boot may change.
    """
    lines = []
    queue, ahead = _assignments(tuning, DRIVE), _assignments(tuning, ARRAY)
    if not array_uuids:
        queue, ahead = queue + ahead, ""
    if queue:
        lines += [_rule(_drive(serial), queue) for serial in sorted(serials)]
    if ahead:
        lines += [_rule('KERNEL=="md*", ENV{MD_UUID}=="%s"' % uuid, ahead) for uuid in sorted(array_uuids)]
    return HEADER + "".join(lines) if lines else ""


def _assignments(tuning: Tuning, target: str) -> str:
    values = [(ROWS[name].ending, wanted(tuning, name)) for name in of_target(target)]
    return "".join(', ATTR{%s}="%s"' % (attribute, value) for attribute, value in values if value is not None)


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
    """Lines for huge pages and for the CPUs, without those that tuned would overrule where it runs."""
    lines = [
        "w /%s - - - - %s\n" % (row.file.replace("%s", "cpu*"), value)
        for row, value in _kept_by(TMPFILES, tuning)
        if not (tuned and row.tuned)
    ]
    return HEADER + "".join(lines) if lines else ""


def sysctl(tuning: Tuning) -> str:
    """Lines for sysctl; of a limit as bytes or as a share of the memory, never both."""
    lines = [
        "%s = %s\n" % (row.sysctls[-1 if value.endswith("%") else 0], value.rstrip("%"))
        for row, value in _kept_by(SYSCTL, tuning)
    ]
    return HEADER + "".join(lines) if lines else ""


def tuned_profile(tuning: Tuning, base: str) -> str:
    """A profile on top of the owner's; empty if tuned has no part in the requested settings."""
    sections: dict[str, str] = {}
    for row, value in _kept_by(TMPFILES, tuning):
        if row.tuned:
            section, option = row.tuned[:2]
            sections[section] = sections.get(section, "") + "%s=%s\n" % (option, value)
    if not sections:
        return ""
    text = "".join("\n[%s]\n%s" % (name, sections[name]) for name in sorted(sections))
    include = "include=%s\n" % base if base else ""
    return HEADER + "[main]\nsummary=%s with the I/O settings of tunetool\n%s" % (base or "tunetool", include) + text


def _kept_by(keeper: str, tuning: Tuning) -> Iterator[tuple[Setting, str]]:
    for row in ROWS.values():
        value = wanted(tuning, row.name) if row.file and row.keeper == keeper else None
        if value is not None:
            yield row, value
