"""The PCIe ports above drives: which of them several drives share, and what such a link carries."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Sequence

from .drives import Drive, Link, read_link

_ADDRESS = re.compile(r"^[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")


@dataclass(frozen=True)
class SharedPort:
    """A port whose link carries the traffic of several drives."""

    address: str
    link: Link
    serials: tuple[str, ...]


def ports_above(drive: Drive, root: str = "/") -> list[str]:
    """Directories of the ports between a drive and the root complex, the nearest first."""
    places = [
        os.path.join(root, "sys/class/nvme", drive.controller, "device"),
        os.path.join(root, "sys/block", drive.name, "device/device"),
    ]
    device = next((place for place in places if os.path.isdir(place)), None)
    if device is None:
        return []
    found = []
    place = os.path.dirname(os.path.realpath(device))
    while _ADDRESS.match(os.path.basename(place)):
        found.append(place)
        place = os.path.dirname(place)
    return found


def shared_ports(drives: Sequence[Drive], root: str = "/") -> list[SharedPort]:
    """Ports above at least two of ``drives`` whose link is known, by address."""
    below: dict[str, list[str]] = {}
    for drive in drives:
        for port in ports_above(drive, root):
            below.setdefault(port, []).append(drive.serial)
    found = []
    for port, serials in sorted(below.items()):
        link = read_link(port)
        if len(serials) > 1 and link.current_speed_gts is not None and link.current_width is not None:
            found.append(SharedPort(os.path.basename(port), link, tuple(serials)))
    return found
