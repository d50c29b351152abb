"""The I/O settings: one table, a row each. What sets, keeps, checks, compares and records them reads it.

A row ``NAME`` is the variable ``io_tuning_NAME``. The normal form is the manifest's ``tuning``: only what is asked for
is in it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Mapping

from ..units import UnitError, format_size_binary, parse_size
from .refusal import Refusal

Tuning = Mapping[str, Any]

DRIVE, ARRAY, CPU, MACHINE, SERVICE = "drive", "array", "cpu", "machine", "service"
"""What a setting is of. md passes requests on and has no queue of its own, so most of a queue are of the drives."""

UDEV, TMPFILES, SYSCTL = "udev", "tmpfiles.d", "sysctl.d"
"""What sets it again at the next boot."""

_PAGE = 4096
_PROC_SYS = "proc/sys/"
_SERVES = {DRIVE: "Of each member drive", ARRAY: "Of the array", CPU: "Of each CPU that has it"}


class Form:
    """How the value of a setting is asked for, kept in the manifest, and written by the kernel."""

    def keys(self, name: str) -> dict[str, dict[str, Any]]:
        """The manifest's keys for it, with their JSON Schema."""
        raise NotImplementedError

    def parsed(self, name: str, text: str) -> dict[str, Any]:
        """Those keys with their values for what is asked. Raises ``Refusal`` for what no machine supports."""
        raise NotImplementedError

    def wanted(self, name: str, tuning: Tuning) -> str | None:
        """The value as the kernel shows it; None if the setting is left alone."""
        return None if tuning.get(name) is None else str(tuning[name])

    def shown(self, value: str) -> str:
        """A value for people."""
        return "`%s`" % value


@dataclass(frozen=True)
class Whole(Form):
    """A whole number."""

    least: int
    most: int

    def keys(self, name: str) -> dict[str, dict[str, Any]]:
        return {name: {"type": "integer", "minimum": min(self.least, 1)}}

    def parsed(self, name: str, text: str) -> dict[str, Any]:
        if not re.match(r"^\d{1,9}$", text) or not self.least <= int(text) <= self.most:
            raise _refusal(name, text, "a whole number from %d to %d" % (self.least, self.most))
        return {name: int(text)}


@dataclass(frozen=True)
class Word(Form):
    """One word, as the kernel prints it."""

    choices: tuple[str, ...] = ()
    """All that there are; empty where it depends on the kernel."""
    offered: str = ""
    """The kernel's file that lists what it offers; ``%s`` stands for the target."""
    refused: str = ""
    """What is said of a word that is not in that file."""

    def keys(self, name: str) -> dict[str, dict[str, Any]]:
        return {name: {"type": "string", "enum": list(self.choices)} if self.choices else {"type": "string"}}

    def parsed(self, name: str, text: str) -> dict[str, Any]:
        if not re.match(r"^[a-z][a-z0-9_-]*$", text):
            raise _refusal(name, text, "one word as the kernel prints it")
        if self.choices and text not in self.choices:
            raise _refusal(name, text, " or ".join("`%s`" % choice for choice in self.choices))
        return {name: text}


@dataclass(frozen=True)
class Size(Form):
    """Whole pages, which the kernel counts in KiB."""

    def keys(self, name: str) -> dict[str, dict[str, Any]]:
        return {name + "_bytes": {"type": "integer", "minimum": 0}}

    def parsed(self, name: str, text: str) -> dict[str, Any]:
        size = _size(name, text)
        if size % _PAGE:
            raise Refusal("`io_tuning_%s` is %d bytes. hint: whole pages of 4 KiB, such as `4MiB`" % (name, size))
        return {name + "_bytes": size}

    def wanted(self, name: str, tuning: Tuning) -> str | None:
        size = tuning.get(name + "_bytes")
        return None if size is None else str(size // 1024)

    def shown(self, value: str) -> str:
        return format_size_binary(int(value) * 1024) if value.isdigit() else super().shown(value)


@dataclass(frozen=True)
class ShareOrSize(Form):
    """Bytes, or a share of the memory, for which the kernel has another file: of the two it keeps one at 0."""

    share_file: str

    def keys(self, name: str) -> dict[str, dict[str, Any]]:
        return {"%s_%s" % (name, kind): {"type": "integer", "minimum": 1} for kind in ("bytes", "percent")}

    def parsed(self, name: str, text: str) -> dict[str, Any]:
        if text.endswith("%"):
            return {name + "_percent": Whole(1, 100).parsed(name, text[:-1])[name]}
        size = _size(name, text)
        if size < 2 * _PAGE:
            raise Refusal("`io_tuning_%s` is %d bytes. hint: the kernel ignores less than two pages" % (name, size))
        return {name + "_bytes": size}

    def wanted(self, name: str, tuning: Tuning) -> str | None:
        size, share = tuning.get(name + "_bytes"), tuning.get(name + "_percent")
        return str(size) if size is not None else None if share is None else "%d%%" % share

    def shown(self, value: str) -> str:
        return format_size_binary(int(value)) if value.isdigit() else super().shown(value)


def _refusal(name: str, text: str, hint: str) -> Refusal:
    return Refusal("`io_tuning_%s` is `%s`. hint: %s" % (name, text, hint))


def _size(name: str, text: str) -> int:
    try:
        return parse_size(text)
    except UnitError as error:
        raise Refusal("`io_tuning_%s`: %s. hint: %s" % (name, error.message, error.hint)) from None


@dataclass(frozen=True)
class Setting:
    """One setting: a row is all that a new one needs here."""

    name: str
    target: str
    file: str
    """The kernel's file without its leading slash; ``%s`` stands for the target. Empty: it is no file of the kernel."""
    form: Form
    resets: tuple[str, ...] = ()
    """Settings that the kernel resets when this one changes; they stand below it."""
    tuned: tuple[str, ...] = ()
    """The section of a tuned profile and the options there that set it; a profile of ours writes the first."""
    cpus_need: str = ""
    """The kernel's file that names a driver where CPUs have it."""
    skipped: str = ""
    """Why a machine without any target skips it."""

    @property
    def keeper(self) -> str:
        """What sets it again at the next boot."""
        if self.target in (DRIVE, ARRAY):
            return UDEV
        return SYSCTL if self.file.startswith(_PROC_SYS) else TMPFILES

    @property
    def share_file(self) -> str:
        """The kernel's other file, for a share; empty where there is one file only."""
        return self.form.share_file if isinstance(self.form, ShareOrSize) else ""

    @property
    def sysctls(self) -> tuple[str, ...]:
        """Its names for sysctl, that of the share last; empty if it is none."""
        files = (self.file, self.share_file) if self.keeper == SYSCTL else ()
        return tuple(file[len(_PROC_SYS) :].replace("/", ".") for file in files if file)

    @property
    def ending(self) -> str:
        """The end of its path by which another program's line names it: directory and file."""
        return "/".join(self.file.split("/")[-2:])


_QUEUE = "sys/block/%s/queue/"
_CPU = "sys/devices/system/cpu/%s/"
_THP = "sys/kernel/mm/transparent_hugepage/enabled"

_TABLE = (
    Setting(
        "scheduler",
        DRIVE,
        _QUEUE + "scheduler",
        Word(),
        resets=("nr_requests",),
        tuned=("disk", "elevator"),
    ),
    Setting("nr_requests", DRIVE, _QUEUE + "nr_requests", Whole(4, 65535)),
    Setting("nomerges", DRIVE, _QUEUE + "nomerges", Whole(0, 2)),
    Setting(
        "read_ahead",
        ARRAY,
        _QUEUE + "read_ahead_kb",
        Size(),
        tuned=("disk", "readahead"),
    ),
    Setting(
        "transparent_hugepages",
        MACHINE,
        _THP,
        Word(offered=_THP, refused="transparent huge pages `%s` are not offered"),
        tuned=("vm", "transparent_hugepages", "transparent_hugepage"),
    ),
    Setting(
        "cpu_governor",
        CPU,
        _CPU + "cpufreq/scaling_governor",
        Word(
            offered=_CPU + "cpufreq/scaling_available_governors",
            refused="CPU governor `%s` is not offered",
        ),
        tuned=("cpu", "governor"),
        skipped="no CPU here has frequency scaling (cpufreq), so it is skipped",
    ),
    Setting(
        "cpu_latency_us",
        CPU,
        _CPU + "power/pm_qos_resume_latency_us",
        Whole(1, 10**6),
        tuned=("cpu", "pm_qos_resume_latency_us", "force_latency"),
        cpus_need="sys/devices/system/cpu/cpuidle/current_driver",
        skipped="the CPUs here have no idle states (cpuidle), so it is skipped",
    ),
    Setting(
        "dirty_background",
        MACHINE,
        "proc/sys/vm/dirty_background_bytes",
        ShareOrSize("proc/sys/vm/dirty_background_ratio"),
    ),
    Setting(
        "dirty",
        MACHINE,
        "proc/sys/vm/dirty_bytes",
        ShareOrSize("proc/sys/vm/dirty_ratio"),
    ),
    Setting("fstrim_timer", SERVICE, "", Word(choices=("enabled", "disabled"))),
)

ROWS: Mapping[str, Setting] = {row.name: row for row in _TABLE}
"""In the order in which they are set."""
SETTINGS = tuple(row.name for row in ROWS.values() if row.file)
"""Settings in /sys and /proc."""
ARGUMENTS: dict[str, Any] = {row.name: {"type": "str", "default": ""} for row in ROWS.values()}
"""The settings as arguments of M(tunetool.node.io_tuning); empty leaves one alone."""


def of_target(*targets: str) -> tuple[str, ...]:
    """The settings of these targets."""
    return tuple(row.name for row in ROWS.values() if row.target in targets)


def manifest_schema() -> dict[str, dict[str, Any]]:
    """JSON Schema of what the normal form may hold, by key; none of it is required."""
    return {
        key: dict(schema, description=_SERVES[row.target]) if row.target in _SERVES else schema
        for row in ROWS.values()
        for key, schema in row.form.keys(row.name).items()
    }
