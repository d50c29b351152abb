"""I/O tuning: valid settings in one normal form, and the kernel's files for them. Only reads and sets these files.

The normal form is the manifest's ``tuning``: only what is asked for is in it.
"""

from __future__ import annotations

import glob
import os
import re
from dataclasses import dataclass, field
from typing import Any, Mapping, Sequence

from ..common.files import read_int, read_text, whole_number
from ..common.refusal import Refusal
from ..units import UnitError, format_size_binary, parse_size

Tuning = Mapping[str, Any]

DRIVE_SETTINGS = ("scheduler", "nr_requests", "nomerges")
"""Settings of the member drives; md passes requests on and has no queue of its own."""
CPU_SETTINGS = ("cpu_governor", "cpu_latency_us")
SETTINGS = (*DRIVE_SETTINGS, "read_ahead", "transparent_hugepages", *CPU_SETTINGS, "dirty_background", "dirty")
"""Settings in /sys and /proc, in the order in which they are set: another scheduler resets nr_requests."""
FSTRIM = "fstrim_timer"

ARGUMENTS: dict[str, Any] = {name: {"type": "str", "default": ""} for name in (*SETTINGS, FSTRIM)}
"""The settings as arguments of M(tunetool.node.io_tuning); empty leaves one alone."""

_PAGE = 4096
_FILES = {
    "scheduler": "sys/block/%s/queue/scheduler",
    "nr_requests": "sys/block/%s/queue/nr_requests",
    "nomerges": "sys/block/%s/queue/nomerges",
    "read_ahead": "sys/block/%s/queue/read_ahead_kb",
    "cpu_governor": "sys/devices/system/cpu/%s/cpufreq/scaling_governor",
    "cpu_latency_us": "sys/devices/system/cpu/%s/power/pm_qos_resume_latency_us",
}
THP = "sys/kernel/mm/transparent_hugepage/enabled"


def normal_form(asked: Mapping[str, str]) -> dict[str, Any]:
    """The requested settings. Raises ``Refusal`` for a value that no machine supports."""
    tuning: dict[str, Any] = {}
    for name, least, most in (("nr_requests", 4, 65535), ("nomerges", 0, 2), ("cpu_latency_us", 1, 10**6)):
        if asked[name]:
            tuning[name] = _whole(name, asked[name], least, most)
    for name in ("scheduler", "transparent_hugepages", "cpu_governor", FSTRIM):
        if asked[name]:
            tuning[name] = _word(name, asked[name])
    if asked["read_ahead"]:
        tuning["read_ahead_bytes"] = size = _size("read_ahead", asked["read_ahead"])
        if size % _PAGE:
            raise Refusal("`io_tuning_read_ahead` is %d bytes. hint: whole pages of 4 KiB, such as `4MiB`" % size)
    for name in ("dirty_background", "dirty"):
        if asked[name]:
            kind, value = _share_or_size(name, asked[name])
            tuning["%s_%s" % (name, kind)] = value
    for kind in ("bytes", "percent"):
        low, high = tuning.get("dirty_background_" + kind), tuning.get("dirty_" + kind)
        if low is not None and high is not None and low >= high:
            raise Refusal(
                "`io_tuning_dirty_background` is not below `io_tuning_dirty`. hint: the kernel would silently use "
                "half of the latter"
            )
    if tuning.get(FSTRIM) not in (None, "enabled", "disabled"):
        raise Refusal("`io_tuning_fstrim_timer` is `%s`. hint: `enabled` or `disabled`" % tuning[FSTRIM])
    return {name: tuning[name] for name in KEYS if name in tuning}


KEYS = (
    *DRIVE_SETTINGS,
    "read_ahead_bytes",
    "transparent_hugepages",
    *CPU_SETTINGS,
    "dirty_background_bytes",
    "dirty_background_percent",
    "dirty_bytes",
    "dirty_percent",
    FSTRIM,
)
"""What the normal form may hold."""


def _whole(name: str, text: str, least: int, most: int) -> int:
    if not re.match(r"^\d{1,9}$", text) or not least <= int(text) <= most:
        raise Refusal("`io_tuning_%s` is `%s`. hint: a whole number from %d to %d" % (name, text, least, most))
    return int(text)


def _word(name: str, text: str) -> str:
    if not re.match(r"^[a-z][a-z0-9_-]*$", text):
        raise Refusal("`io_tuning_%s` is `%s`. hint: one word as the kernel prints it" % (name, text))
    return text


def _size(name: str, text: str) -> int:
    try:
        return parse_size(text)
    except UnitError as error:
        raise Refusal("`io_tuning_%s`: %s. hint: %s" % (name, error.message, error.hint)) from None


def _share_or_size(name: str, text: str) -> tuple[str, int]:
    if text.endswith("%"):
        return "percent", _whole(name, text[:-1], 1, 100)
    size = _size(name, text)
    if size < 2 * _PAGE:
        raise Refusal("`io_tuning_%s` is %d bytes. hint: the kernel ignores less than two pages" % (name, size))
    return "bytes", size


@dataclass(frozen=True)
class Machine:
    """The present places of the settings on this machine."""

    drives: Mapping[str, str]
    """Kernel name of each member drive by its serial: the name changes over reboots."""
    arrays: Mapping[str, str] = field(default_factory=dict)
    """Kernel name of the array by its UUID."""
    governed: Sequence[str] = ()
    """CPUs with frequency scaling; empty on most virtual machines."""
    idling: Sequence[str] = ()
    """CPUs with idle states that can be limited."""
    root: str = "/"

    def targets(self, setting: str) -> list[str]:
        """The devices that the setting applies to: serials, UUIDs or CPUs, or one empty name for the machine."""
        if setting in DRIVE_SETTINGS:
            return list(self.drives)
        if setting == "read_ahead":
            return list(self.arrays)
        if setting in CPU_SETTINGS:
            return list(self.governed if setting == "cpu_governor" else self.idling)
        return [""]

    def file(self, setting: str, target: str) -> str | None:
        """The file of the setting on a target, without its leading slash; None if the device is absent."""
        if setting == "transparent_hugepages":
            return THP
        if setting.startswith("dirty"):
            return "proc/sys/vm/%s_bytes" % setting
        device: str | None = target
        if setting in DRIVE_SETTINGS:
            device = self.drives.get(target)
        elif setting == "read_ahead":
            device = self.arrays.get(target)
        return _FILES[setting] % device if device else None

    def read(self, setting: str, target: str) -> str | None:
        """The current value, in the form of ``wanted``; None if there is none."""
        name = self.file(setting, target)
        if name is None:
            return None
        text = read_text(os.path.join(self.root, name))
        if setting.startswith("dirty"):
            # Of the two files the kernel keeps one at 0, whichever was not written last.
            share = read_text(os.path.join(self.root, name.replace("_bytes", "_ratio")))
            return "%s%%" % share if text == "0" and share is not None else text
        active = re.search(r"\[([^\]]+)\]", text or "")
        return active.group(1) if active else text

    def write(self, setting: str, target: str, value: str) -> None:
        """Set the value of a target now. Raises ``OSError``."""
        name = self.file(setting, target) or ""
        if value.endswith("%"):
            name, value = name.replace("_bytes", "_ratio"), value[:-1]
        with open(os.path.join(self.root, name), "w", encoding="ascii") as stream:
            stream.write(value)


def wanted(tuning: Tuning, setting: str) -> str | None:
    """The value of one of ``SETTINGS`` as the kernel shows it; None if it is left alone."""
    if setting == "read_ahead":
        size = tuning.get("read_ahead_bytes")
        return None if size is None else str(size // 1024)
    if setting.startswith("dirty"):
        size, share = tuning.get(setting + "_bytes"), tuning.get(setting + "_percent")
        return str(size) if size is not None else None if share is None else "%d%%" % share
    value = tuning.get(setting)
    return None if value is None else str(value)


def shown(setting: str, value: str | None) -> str:
    """A value for people."""
    if value is None:
        return "nothing"
    if setting == "read_ahead" and value.isdigit():
        return format_size_binary(int(value) * 1024)
    if setting.startswith("dirty") and value.isdigit():
        return format_size_binary(int(value))
    return "`%s`" % value


def by_value(setting: str, values: Mapping[str, str | None]) -> str:
    """The values with their targets, in words: ```none` on LAB1NV1, LAB1NV2``."""
    parts = []
    for value in sorted(set(values.values()), key=str):
        names = ["`%s`" % target for target in values if values[target] == value and target]
        # There is one array only: its UUID says nothing to a reader.
        where = " on %s" % ", ".join(names) if names and setting != "read_ahead" else ""
        parts.append(shown(setting, value) + where)
    return "; ".join(parts)


def read_cpus(root: str = "/") -> tuple[list[str], list[str]]:
    """CPUs with frequency scaling, and CPUs whose idle states can be limited."""
    base = os.path.join(root, "sys/devices/system/cpu")
    names = [os.path.basename(path) for path in glob.glob(os.path.join(base, "cpu[0-9]*"))]
    names = sorted((name for name in names if whole_number(name[3:]) is not None), key=lambda name: int(name[3:]))
    driver = read_text(os.path.join(base, "cpuidle/current_driver"))
    idle = driver not in (None, "", "none")
    governed = [name for name in names if os.path.exists(os.path.join(root, _FILES["cpu_governor"] % name))]
    limited = [name for name in names if os.path.exists(os.path.join(root, _FILES["cpu_latency_us"] % name))]
    return governed, limited if idle else []


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
    choices = _offered(os.path.join(machine.root, THP))
    if tuning.get("transparent_hugepages") and tuning["transparent_hugepages"] not in choices:
        reasons.append(
            "transparent huge pages `%s` are not offered. hint: %s"
            % (tuning["transparent_hugepages"], _choices(choices))
        )
    for cpu in machine.governed[:1]:
        governors = _offered(
            os.path.join(machine.root, "sys/devices/system/cpu", cpu, "cpufreq/scaling_available_governors")
        )
        if tuning.get("cpu_governor") and tuning["cpu_governor"] not in governors:
            reasons.append("CPU governor `%s` is not offered. hint: %s" % (tuning["cpu_governor"], _choices(governors)))
    return reasons


def skipped(tuning: Tuning, machine: Machine) -> list[str]:
    """Warnings for settings that do not exist here; no error, since an inventory is for many nodes."""
    skips = []
    if "cpu_governor" in tuning and not machine.governed:
        skips.append("`io_tuning_cpu_governor`: no CPU here has frequency scaling (cpufreq), so it is skipped")
    if "cpu_latency_us" in tuning and not machine.idling:
        skips.append("`io_tuning_cpu_latency_us`: the CPUs here have no idle states (cpuidle), so it is skipped")
    return skips


def done_here(tuning: Tuning, machine: Machine) -> dict[str, Any]:
    """The tuning without the skipped settings: what a later check can expect of the node."""
    gone = {name for name in CPU_SETTINGS if not machine.targets(name)}
    return {name: value for name, value in tuning.items() if name not in gone}


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
