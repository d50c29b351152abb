"""Finds what else on this machine sets the same: other udev rules, sysctl.d, tmpfiles.d, tuned, services."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from dataclasses import dataclass
from typing import Iterator, Sequence

from ..common.boot_files import SYSCTL_CONF, location, numbered_lines, ordered, sysctl_lines
from ..common.files import read_text
from ..common.io_settings import ARRAY, ROWS, SYSCTL, UDEV, Setting, Tuning
from .persistent_files import SYSCTL_PATH, TMPFILES_PATH, TUNED_PROFILE, UDEV_PATH
from .settings import wanted


@dataclass(frozen=True)
class Rival:
    """A line of another tool that sets the same. ``wins``: it overrules ours at the next boot."""

    setting: str
    location: str
    line: str
    wins: bool

    def __str__(self) -> str:
        return "%s has `%s`" % (self.location, self.line)


def rivals(tuning: Tuning, devices: Sequence[str], root: str = "/") -> list[Rival]:
    """Lines of other tools that set what ``tuning`` asks for. ``devices`` are kernel names, the array's too."""
    rival_lines: list[Rival] = []
    asked = [row for row in ROWS.values() if row.file and wanted(tuning, row.name) is not None]
    for row in asked:
        if row.keeper == UDEV:
            reached = [name for name in devices if name.startswith("md") == (row.target == ARRAY)]
            rival_lines += _udev(row, reached, root)
        elif row.keeper == SYSCTL:
            rival_lines += _sysctl(row, root)
        else:
            rival_lines += _tmpfiles(row, root)
        if row.keeper != SYSCTL:
            rival_lines += _mentions(row, root)
    return [*rival_lines, *_tuned(asked, root)]


def _udev(row: Setting, devices: Sequence[str], root: str) -> Iterator[Rival]:
    ours = os.path.basename(UDEV_PATH)
    assigned = re.compile(r'ATTR\{%s\}\s*\+?:?="([^"]*)"' % re.escape(row.ending))
    for path in ordered("udev/rules.d", ".rules", root):
        name = os.path.basename(path)
        for number, line in numbered_lines(path) if name != ours else ():
            match = assigned.search(line)
            if match and _may_match(line, devices):
                yield Rival(row.name, location(path, number, root), match.group(0), name > ours)


def _may_match(line: str, devices: Sequence[str]) -> bool:
    """Whether a rule's KERNEL matches one of the devices; its other conditions cannot be evaluated here."""
    for operator, pattern in re.findall(r'\bKERNEL\s*([!=]=)\s*"([^"]*)"', line):
        hits = [any(fnmatch.fnmatchcase(name, alternative) for alternative in pattern.split("|")) for name in devices]
        if not any(hit == (operator == "==") for hit in hits):
            return False
    return True


def _sysctl(row: Setting, root: str) -> Iterator[Rival]:
    ours = os.path.basename(SYSCTL_PATH)
    for path, number, key, line in sysctl_lines(root):
        name = os.path.basename(path)
        # `sysctl --system` reads the plain file last.
        wins = name > ours or path == os.path.join(root, SYSCTL_CONF)
        if name != ours and key in row.sysctls:
            yield Rival(row.name, location(path, number, root), line, wins)


def _tmpfiles(row: Setting, root: str) -> Iterator[Rival]:
    ours = os.path.basename(TMPFILES_PATH)
    for file in ordered("tmpfiles.d", ".conf", root):
        name = os.path.basename(file)
        for number, line in numbered_lines(file) if name != ours else ():
            fields = line.split()
            if len(fields) > 1 and fields[0].startswith("w") and row.ending in fields[1]:
                # Of two lines for one path the first counts (tmpfiles.d(5)).
                yield Rival(row.name, location(file, number, root), line, name < ours)


_ELSEWHERE = (
    "etc/rc.local",
    "etc/rc.d/rc.local",
    "etc/sysfs.conf",
    "etc/sysfs.d/*.conf",
    "etc/systemd/system/*.service",
)


def _mentions(row: Setting, root: str) -> Iterator[Rival]:
    """Lines of files that write to sysfs by themselves, later than udev and tmpfiles.d."""
    for pattern in _ELSEWHERE:
        for file in sorted(glob.glob(os.path.join(root, pattern))):
            for number, line in numbered_lines(file):
                if row.ending in line:
                    yield Rival(row.name, location(file, number, root), line, True)


def active_profile(root: str = "/") -> str | None:
    """The profile of a running tuned; None if it does not run."""
    if not os.path.exists(os.path.join(root, "run/tuned/tuned.pid")):
        return None
    return read_text(os.path.join(root, "etc/tuned/active_profile")) or None


def profile_files(names: str, root: str = "/") -> list[str]:
    """The configuration of tuned profiles, with included ones first."""
    files: list[str] = []
    for name in (part.lstrip("?-") for part in re.split(r"[\s,]+", names.strip())):
        for base in ("etc/tuned/profiles", "etc/tuned", "usr/lib/tuned/profiles", "usr/lib/tuned"):
            path = os.path.join(root, base, name, "tuned.conf")
            text = read_text(path)
            if name and text is not None and path not in files:
                include = re.search(r"^include\s*=\s*(.+)$", text, re.MULTILINE)
                files = [*(profile_files(include.group(1), root) if include else []), *files, path]
                break
    return files


def _tuned(asked: Sequence[Setting], root: str) -> Iterator[Rival]:
    profile = active_profile(root)
    for path in profile_files(profile, root) if profile else ():
        if os.path.basename(os.path.dirname(path)) == TUNED_PROFILE:
            continue
        section = ""
        for number, line in numbered_lines(path):
            if line.startswith("["):
                section = line.strip("[]")
                continue
            option = line.partition("=")[0].strip()
            for row in asked:
                where, *options = row.tuned or ("sysctl", *row.sysctls)
                if "=" in line and section == where and option in options:
                    # Our profile is on top of it; tuned applies sysctl.d again after its own settings (reapply_sysctl).
                    yield Rival(row.name, location(path, number, root), line, row.keeper == UDEV)
