"""I/O settings on a machine: what is asked for in the manifest's form, and the kernel's files that hold it.

The settings are the rows of ``common.io_settings``. Only reads and sets these files.
"""

from __future__ import annotations

import glob
import os
import re
from dataclasses import dataclass, field
from typing import Any, Mapping, Sequence

from ..common.files import read_int, read_text, whole_number
from ..common.io_settings import ARRAY, CPU, DRIVE, ROWS, Setting, Tuning, Word, of_target
from ..common.refusal import Refusal

DRIVE_SETTINGS = of_target(DRIVE)
CPU_SETTINGS = of_target(CPU)
FSTRIM = "fstrim_timer"


def normal_form(asked: Mapping[str, str]) -> dict[str, Any]:
    """The requested settings. Raises ``Refusal`` for a value that no machine supports."""
    tuning: dict[str, Any] = {}
    for row in ROWS.values():
        if asked[row.name]:
            tuning.update(row.form.parsed(row.name, asked[row.name]))
    for kind in ("bytes", "percent"):
        low, high = tuning.get("dirty_background_" + kind), tuning.get("dirty_" + kind)
        if low is not None and high is not None and low >= high:
            raise Refusal(
                "`io_tuning_dirty_background` is not below `io_tuning_dirty`. hint: the kernel would silently use "
                "half of the latter"
            )
    return tuning


@dataclass(frozen=True)
class Machine:
    """The present places of the settings on this machine."""

    drives: Mapping[str, str]
    """Kernel name of each member drive by its serial: the name changes over reboots."""
    arrays: Mapping[str, str] = field(default_factory=dict)
    """Kernel name of the array by its UUID."""
    cpus: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """CPUs that have a setting, by the setting; most virtual machines have none."""
    root: str = "/"

    def targets(self, setting: str) -> list[str]:
        """The devices that the setting applies to: serials, UUIDs or CPUs, or one empty name for the machine."""
        target = ROWS[setting].target
        if target == CPU:
            return list(self.cpus.get(setting, ()))
        return list(self.drives if target == DRIVE else self.arrays if target == ARRAY else [""])

    def file(self, setting: str, target: str) -> str | None:
        """The file of the setting on a target, without its leading slash; None if the device is absent."""
        row = ROWS[setting]
        if "%s" not in row.file:
            return row.file
        names = self.drives if row.target == DRIVE else self.arrays if row.target == ARRAY else {target: target}
        return row.file % names[target] if names.get(target) else None

    def read(self, setting: str, target: str) -> str | None:
        """The current value, in the form of ``wanted``; None if there is none."""
        name = self.file(setting, target)
        if name is None:
            return None
        text = read_text(os.path.join(self.root, name))
        share_file = ROWS[setting].share_file
        if share_file:
            share = read_text(os.path.join(self.root, share_file))
            return "%s%%" % share if text == "0" and share is not None else text
        active = re.search(r"\[([^\]]+)\]", text or "")
        return active.group(1) if active else text

    def write(self, setting: str, target: str, value: str) -> None:
        """Set the value of a target now. Raises ``OSError``."""
        name = self.file(setting, target) or ""
        if value.endswith("%"):
            name, value = ROWS[setting].share_file, value[:-1]
        with open(os.path.join(self.root, name), "w", encoding="ascii") as stream:
            stream.write(value)


def wanted(tuning: Tuning, setting: str) -> str | None:
    """The value of a setting as the kernel shows it; None if it is left alone."""
    return ROWS[setting].form.wanted(setting, tuning)


def shown(setting: str, value: str | None) -> str:
    """A value for people."""
    return "nothing" if value is None else ROWS[setting].form.shown(value)


def by_value(setting: str, values: Mapping[str, str | None]) -> str:
    """The values with their targets, in words: ```none` on LAB1NV1, LAB1NV2``."""
    parts = []
    for value in sorted(set(values.values()), key=str):
        names = ["`%s`" % target for target in values if values[target] == value and target]
        # There is one array only: its UUID says nothing to a reader.
        where = " on %s" % ", ".join(names) if names and ROWS[setting].target != ARRAY else ""
        parts.append(shown(setting, value) + where)
    return "; ".join(parts)


def read_cpus(root: str = "/") -> dict[str, list[str]]:
    """The CPUs that have each of the CPUs' settings."""
    paths = glob.glob(os.path.join(root, "sys/devices/system/cpu/cpu[0-9]*"))
    names = [name for name in map(os.path.basename, paths) if whole_number(name[3:]) is not None]
    names.sort(key=lambda name: int(name[3:]))
    cpus = {}
    for setting in CPU_SETTINGS:
        row = ROWS[setting]
        without = bool(row.cpus_need) and read_text(os.path.join(root, row.cpus_need)) in (None, "", "none")
        there = [name for name in names if os.path.exists(os.path.join(root, row.file % name))]
        cpus[setting] = [] if without else there
    return cpus


def impossible(tuning: Tuning, machine: Machine) -> list[str]:
    """Problems: settings that this machine does not support, each with what it offers."""
    reasons = []
    for serial, name in machine.drives.items():
        base = os.path.join(machine.root, "sys/block", name)
        offered = _offered(os.path.join(base, "queue/scheduler"))
        scheduler = tuning.get("scheduler") or machine.read("scheduler", serial)
        if tuning.get("scheduler") and scheduler not in offered and not _loadable(str(scheduler), machine.root):
            reasons.append(
                "scheduler `%s` is not offered for drive `%s`. hint: %s" % (scheduler, serial, _choices(offered))
            )
        most = _most_requests(base, str(scheduler))
        if tuning.get("nr_requests", 0) > most:
            reasons.append(
                "nr_requests %d is more than drive `%s` takes with scheduler `%s`. hint: at most %d"
                % (tuning["nr_requests"], serial, scheduler, most)
            )
    for row in ROWS.values():
        form, value = row.form, wanted(tuning, row.name)
        if value is None or not isinstance(form, Word) or not form.offered:
            continue
        for target in machine.targets(row.name)[:1]:
            path = form.offered % target if target else form.offered
            choices = _offered(os.path.join(machine.root, path))
            if value not in choices:
                reasons.append("%s. hint: %s" % (form.refused % value, _choices(choices)))
    return reasons


def skipped(tuning: Tuning, machine: Machine) -> list[str]:
    """Warnings for settings that do not exist here; no error, since an inventory is for many nodes."""
    return [
        "`io_tuning_%s`: %s" % (row.name, row.skipped)
        for row in _absent(machine)
        if wanted(tuning, row.name) is not None
    ]


def done_here(tuning: Tuning, machine: Machine) -> dict[str, Any]:
    """The tuning without the skipped settings: what a later check can expect of the node."""
    gone = {key for row in _absent(machine) for key in row.form.keys(row.name)}
    return {name: value for name, value in tuning.items() if name not in gone}


def _absent(machine: Machine) -> list[Setting]:
    return [row for row in ROWS.values() if row.target == CPU and not machine.targets(row.name)]


def _offered(path: str) -> list[str]:
    return (read_text(path) or "").replace("[", " ").replace("]", " ").split()


def _choices(words: Sequence[str]) -> str:
    return "the kernel offers %s" % (", ".join("`%s`" % word for word in words) or "none")


def _loadable(scheduler: str, root: str) -> bool:
    """Whether the kernel can load the scheduler: one that is a module is not listed before it is loaded."""
    base = os.path.join(root, "lib/modules", read_text(os.path.join(root, "proc/sys/kernel/osrelease")) or "?")
    module, alias = "/%s-iosched.ko" % scheduler, "alias %s-iosched " % scheduler
    return module in (read_text(os.path.join(base, "modules.dep")) or "") or alias in (
        read_text(os.path.join(base, "modules.alias")) or ""
    )


_WITH_SCHEDULER = 2048
"""The kernel's limit with a scheduler (block/blk-mq.h: MAX_SCHED_RQ)."""


def _most_requests(base: str, scheduler: str) -> int:
    """Without a scheduler requests are the drive's own tags (block/blk-mq.c: blk_mq_update_nr_requests)."""
    if scheduler != "none":
        return _WITH_SCHEDULER
    tags = [read_int(path) for path in glob.glob(os.path.join(base, "mq/[0-9]*/nr_tags"))]
    known = [count for count in tags if count is not None]
    return min(known) if known else _WITH_SCHEDULER
