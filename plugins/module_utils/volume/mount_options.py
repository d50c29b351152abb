"""Mount options: which ones the file system takes by remount, and which are set but not asked for."""

from __future__ import annotations

from typing import Sequence

from ..machine.file_system import BUILT

_TIMES = ("noatime", "relatime", "strictatime", "atime")
_OPPOSITES = {
    "ro": "rw",
    "nosuid": "suid",
    "nodev": "dev",
    "noexec": "exec",
    "sync": "async",
    "nodiratime": "diratime",
    "lazytime": "nolazytime",
}
_REMOUNTED = {*_TIMES, *_OPPOSITES, *_OPPOSITES.values(), *BUILT.remounted}
"""Flags of the VFS, and those of the file system."""


def at_mount_only(option: str) -> bool:
    """Whether the file system takes the option only at mount; a remount with it is ignored or refused."""
    return option not in _REMOUNTED


def like(options: Sequence[str], shown: Sequence[str]) -> str:
    """The mount's values that contradict ``options``: another value, or the flag's opposite."""
    alike = []
    for option in options:
        key = option.partition("=")[0]
        if option in _TIMES:
            alike += [shown_option for shown_option in shown if shown_option in _TIMES]
        else:
            alike += [
                shown_option
                for shown_option in shown
                if shown_option.partition("=")[0] == key or key in (_OPPOSITES.get(shown_option), _inode(shown_option))
            ]
    return ",".join(dict.fromkeys(alike))


def _inode(option: str) -> str | None:
    return {"inode32": "inode64", "inode64": "inode32"}.get(option)


def unwanted(asked: Sequence[str], shown: Sequence[str]) -> dict[str, str]:
    """Flags that are set and not asked for, each with the option that removes it."""
    opposites = {option: opposite for option, opposite in _OPPOSITES.items() if option in shown and option not in asked}
    if not set(asked) & set(_TIMES):
        # relatime is mount(8)'s default.
        opposites.update((option, "relatime") for option in ("noatime", "strictatime") if option in shown)
    return opposites


_HURT = ("sync", "dirsync", "noexec")


def hurting(asked: Sequence[str], shown: Sequence[str]) -> list[str]:
    """Options that were added, with which jobs crawl, or whose programs on the volume do not start."""
    return [option for option in _HURT if option in shown and option not in asked]


def without(added: Sequence[str], point: str) -> str | None:
    """The command that takes these options away; None where only another mount does, as for dirsync (mount(8))."""
    opposites = [_OPPOSITES.get(option, "") for option in added]
    return "mount -o remount,%s %s" % (",".join(opposites), point) if all(opposites) else None


def last_of(names: Sequence[str], options: Sequence[str]) -> str | None:
    """The one of ``names`` that holds: of options that exclude each other, mount(8) takes the last."""
    return next((option for option in reversed(options) if option in names), None)


# Options for mount(8) and systemd, and defaults: the mount table never shows them.
_NOT_SHOWN = {"nofail", "defaults", "auto", "noauto", "_netdev"}
_NOT_SHOWN |= {"suid", "dev", "exec", "async", "diratime", "atime", "nolazytime"}


def shown_options(options: list[str]) -> list[str]:
    """The options of an fstab entry that the kernel shows for the mount."""
    return [option for option in options if option not in _NOT_SHOWN and not option.startswith("x-")]
