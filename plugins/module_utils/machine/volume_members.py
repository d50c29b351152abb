"""The devices of a file system that spans several of them: mountinfo names only one."""

from __future__ import annotations

import glob
import os
import re
from dataclasses import dataclass

from ..common.files import read_text, whole_number
from .mounts import Mount

_ONE_COPY = ("single", "raid0")
_COPIES = re.compile(r"^(?:data_)?replicas=([0-9]+)$")


@dataclass(frozen=True)
class Members:
    """The devices of a mounted file system."""

    devices: tuple[str, ...]
    """Kernel names; the mounted one first."""
    copies: bool = False
    """True if it writes data more than once, or parity, so that its devices count more than was asked for."""
    profile: tuple[str, ...] = ()
    """How btrfs spreads data, such as ``RAID0``."""


def volume_members(mount: Mount, name: str, root: str = "/") -> Members | None:
    """The members of the file system of which ``name`` is mounted; None where the kernel does not say them."""
    if mount.fs_type == "btrfs":
        return _btrfs(name, root)
    if mount.fs_type == "bcachefs":
        return _bcachefs(mount, name, root)
    if mount.fs_type == "xfs":
        return _xfs(mount, name, root)
    return Members((name,))


def named_device(source: str, root: str) -> str | None:
    """Kernel name of the device that a path below /dev names; None where there is no such device."""
    if not source.startswith("/dev/"):
        return None
    name = os.path.basename(os.path.realpath(os.path.join(root, source.lstrip("/"))))
    return name if os.path.isdir(os.path.join(root, "sys/class/block", name)) else None


def _first(name: str, devices: list[str]) -> tuple[str, ...]:
    return (name, *sorted(set(devices) - {name}))


def _btrfs(name: str, root: str) -> Members | None:
    # /sys/fs/btrfs/UUID/devices has a link for each member (kernel: fs/btrfs/sysfs.c).
    for directory in glob.glob(os.path.join(root, "sys/fs/btrfs/*/devices")):
        devices = os.listdir(directory)
        if name in devices:
            data = os.path.join(os.path.dirname(directory), "allocation/data")
            profiles = sorted(each for each in _listdir(data) if os.path.isdir(os.path.join(data, each)))
            shown = tuple(profile.upper() for profile in profiles if profile != "single")
            copies = any(profile not in _ONE_COPY for profile in profiles)
            return Members(_first(name, devices), copies, shown)
    return None


def _bcachefs(mount: Mount, name: str, root: str) -> Members | None:
    sources = mount.source.split(":/dev/")
    named = [named_device("/dev/" + each if index else each, root) for index, each in enumerate(sources)]
    devices = [device for device in named if device is not None]
    if len(devices) < len(named):
        return None
    copies = [match.group(1) for match in map(_COPIES.match, mount.options) if match]
    for block in glob.glob(os.path.join(root, "sys/fs/bcachefs/*/dev-*/block")):
        if os.path.basename(os.path.realpath(block)) == name:
            options = os.path.join(os.path.dirname(os.path.dirname(block)), "options")
            copies.append(read_text(os.path.join(options, "data_replicas")) or "")
    return Members(_first(name, devices), "erasure_code" in mount.options or any(map(_several, copies)))


def _several(copies: str) -> bool:
    number = whole_number(copies)
    return number is not None and number > 1


def _xfs(mount: Mount, name: str, root: str) -> Members | None:
    # The data of real-time files, and an external log, lie on devices of their own (xfs(5)).
    options = dict(option.split("=", 1) for option in mount.options if option.startswith(("rtdev=", "logdev=")))
    devices = {option: named_device(path, root) for option, path in options.items()}
    known = [device for device in devices.values() if device is not None]
    return Members(_first(name, known)) if devices.get("rtdev", name) is not None else None


def _listdir(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []
