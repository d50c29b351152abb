"""One entry of /etc/fstab, set without touching any other line."""

from __future__ import annotations

from typing import Iterable

from .mounts import parse_fstab

FSTAB = "/etc/fstab"


class FstabConflict(Exception):
    """The mount point already belongs to something else."""


def escape(text: str) -> str:
    """Blanks and backslashes as fstab(5) wants them."""
    return text.replace("\\", "\\134").replace(" ", "\\040").replace("\t", "\\011")


def with_entry(
    text: str, spec: str, mount_point: str, fs_type: str, options: str, replace_any_spec: bool = False
) -> str:
    """fstab with one entry for ``mount_point``.

    An entry there for another device raises ``FstabConflict`` unless ``replace_any_spec``: somebody put it there.
    Two entries for the mount point raise it always.
    """
    wanted = "%s %s %s %s 0 0" % (escape(spec), escape(mount_point), fs_type, options)
    lines = text.splitlines()
    present = [entry for entry in parse_fstab(text) if entry.mount_point == mount_point]
    if len(present) > 1:
        numbers = ", ".join(str(entry.line_number) for entry in present)
        raise FstabConflict("/etc/fstab has `%s` twice (lines %s)" % (mount_point, numbers))
    if not present:
        return "\n".join(lines + [wanted]) + "\n"
    entry = present[0]
    if entry.spec != spec and not replace_any_spec:
        raise FstabConflict("/etc/fstab line %d mounts `%s` at `%s`" % (entry.line_number, entry.spec, mount_point))
    if (entry.spec, entry.fs_type, ",".join(entry.options)) == (spec, fs_type, options):
        return text
    lines[entry.line_number - 1] = wanted
    return "\n".join(lines) + "\n"


def foreign_entry(text: str, mount_point: str, specs: Iterable[str]) -> str | None:
    """The first entry for ``mount_point`` whose device is none of ``specs``, in words."""
    known = set(specs)
    for entry in parse_fstab(text):
        if entry.mount_point == mount_point and entry.spec.replace('"', "") not in known:
            return "/etc/fstab line %d mounts `%s` at `%s`" % (entry.line_number, entry.spec, mount_point)
    return None


def without_entry(text: str, uuid: str) -> str:
    """fstab without the entries for the file system ``uuid``, all other lines as they are."""
    ours = {entry.line_number for entry in parse_fstab(text) if entry.spec.replace('"', "") == "UUID=" + uuid}
    if not ours:
        return text
    lines = text.splitlines(keepends=True)
    return "".join(line for number, line in enumerate(lines, start=1) if number not in ours)
