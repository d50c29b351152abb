"""Files of systemd units that tunetool writes, among them drop-ins: no service starts without the scratch volume."""

from __future__ import annotations

import contextlib
import glob
import os
import re
from dataclasses import dataclass
from typing import Iterable, Mapping, Sequence

from ..common.files import content, replace_file
from ..common.refusal import Expected

UNITS_DIRECTORY = "/etc/systemd/system"
FILE_NAME = "60-tunetool-scratch.conf"
HEADER = "# Written by tunetool (scratch_filesystem_services); it goes when the unit is no longer named there."

_UNIT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:@-]*\.(service|socket|timer|path|target)")


_LINK = "-> "


class ForeignDropIn(Expected):
    """A file with our name that tunetool did not write."""


@dataclass(frozen=True)
class Change:
    """A file that must be written, or removed where ``after`` is empty. A link is the text ``-> TARGET``."""

    path: str
    before: str
    after: str


def units_problem(units: Sequence[str]) -> str | None:
    """The problem of the units' names, or None."""
    for unit in units:
        if not _UNIT.fullmatch(unit):
            return "`%s` is not the name of a systemd unit. hint: write it in full, such as `slurmd.service`" % unit
    return None


def render(mount_points: Sequence[str]) -> str:
    """The drop-in's text. RequiresMountsFor= starts the mounts first, and the unit only with them."""
    return "%s\n[Unit]\nRequiresMountsFor=%s\n" % (HEADER, " ".join(map(quoted, mount_points)))


def quoted(path: str) -> str:
    """A path as a word of a unit file."""
    word = path.replace("%", "%%")
    if re.search(r"[\s\"'\\]", word):
        word = '"%s"' % word.replace("\\", "\\\\").replace('"', '\\"')
    return word


def escape(path: str) -> str:
    """A path as the name of its unit, without suffix: systemd-escape(1) with ``--path``."""
    plain = "/".join(part for part in path.split("/") if part)
    if not plain:
        return "-"

    def escaped(match: re.Match[str]) -> str:
        return "".join("\\x%02x" % byte for byte in match.group(0).encode("utf-8", "surrogateescape"))

    first = "\\x2e" if plain.startswith(".") else ""
    rest = plain[1:] if first else plain
    return first + re.sub(r"[^A-Za-z0-9:_./]", escaped, rest).replace("/", "-")


def device_unit(uuid: str) -> str:
    """The unit of the device with that file system."""
    return escape("/dev/disk/by-uuid/" + uuid) + ".device"


def changes(units: Sequence[str], mount_points: Sequence[str], directory: str = UNITS_DIRECTORY) -> list[Change]:
    """Differences from one drop-in for each of ``units`` and none for others. Raises ``ForeignDropIn``."""
    text = render(mount_points)
    wanted = {os.path.join(directory, unit + ".d", FILE_NAME): text for unit in units}
    present = glob.glob(os.path.join(glob.escape(directory), "*.d", FILE_NAME))
    changed = []
    for path in sorted(set(present) | set(wanted)):
        before = content(path)
        ours = before.startswith(HEADER)
        if before and not ours:
            if path in wanted:
                raise ForeignDropIn("`%s` is not tunetool's. hint: move it to another name" % path)
            continue
        after = wanted.get(path, "")
        if before != after:
            changed.append(Change(path, before, after))
    return changed


def exact_changes(unit: str, header: str, wanted: Mapping[str, str], present: Iterable[str]) -> list[Change]:
    """Differences from exactly the files ``wanted``, by path: others of ``present`` go. Raises ``ForeignDropIn``.

    The file ``unit`` is among them and begins with ``header``; one that does not is somebody else's, and nothing goes.
    """
    before = _shown(unit)
    if before and not before.startswith(header):
        if wanted:
            raise ForeignDropIn("`%s` is not tunetool's. hint: move it to another name" % unit)
        return []
    paths = [*wanted, *sorted(set(present) - set(wanted))]
    changed = [Change(path, _shown(path), wanted.get(path, "")) for path in paths]
    return [change for change in changed if change.before != change.after]


def link_to(target: str) -> str:
    """The text of a link, as ``Change`` has it."""
    return _LINK + target


def _shown(path: str) -> str:
    return link_to(os.readlink(path)) if os.path.islink(path) else content(path)


def apply(change: Change) -> None:
    """Write the file or link, or remove it, and its directory if that is empty then."""
    if change.after.startswith(_LINK):
        os.makedirs(os.path.dirname(change.path), exist_ok=True)
        if os.path.lexists(change.path):
            os.unlink(change.path)
        os.symlink(change.after[len(_LINK) :], change.path)
        return
    if change.after:
        replace_file(change.path, change.after)
        return
    os.unlink(change.path)
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(change.path))
