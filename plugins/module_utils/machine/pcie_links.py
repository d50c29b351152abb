"""PCIe links: the bandwidth of one, and the ports that several drives share."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Sequence

from .drives import Drive, Link, read_link
from .pci_tree import port_directories


def link_bandwidth(link: Link) -> float | None:
    """Raw bytes per second of a link as negotiated, after line encoding; None if unknown.

    2.5 and 5 GT/s (Gen1, Gen2) carry 8 bits in 10, 8 to 32 GT/s (Gen3 to Gen5) 128 in 130 (PCIe base
    specification). 64 GT/s (Gen6) has no line code; its flit overhead is not subtracted here.
    """
    return bandwidth(link.current_speed_gts, link.current_width)


def downgraded(
    speed_gts: float | None, width: int | None, possible_speed_gts: float | None, possible_width: int | None
) -> bool:
    """Whether a link runs slower or narrower than possible, as far as both are known."""
    pairs = ((speed_gts, possible_speed_gts), (width, possible_width))
    return any(now is not None and best is not None and now < best for now, best in pairs)


def bandwidth(speed_gts: float | None, width: int | None) -> float | None:
    """Raw bytes per second of a link with that speed in GT/s and number of lanes; None if one is unknown."""
    if speed_gts is None or width is None:
        return None
    if speed_gts <= 5:
        share = 8 / 10
    elif speed_gts <= 32:
        share = 128 / 130
    else:
        share = 1.0
    return speed_gts * 1e9 * share / 8 * width


@dataclass(frozen=True)
class SharedPort:
    """A port whose link carries the traffic of several drives."""

    address: str
    link: Link
    serials: tuple[str, ...]


def ports_above(drive: Drive, root: str = "/") -> list[str]:
    """Directories of the ports between a drive and the root complex, the nearest first."""
    directories = [
        os.path.join(root, "sys/class/nvme", drive.controller, "device"),
        os.path.join(root, "sys/block", drive.name, "device/device"),
    ]
    device = next((directory for directory in directories if os.path.isdir(directory)), None)
    if device is None:
        return []
    return port_directories(device)


def shared_ports(drives: Sequence[Drive], root: str = "/") -> list[SharedPort]:
    """Ports above at least two of ``drives`` whose link is known, by address."""
    below: dict[str, list[str]] = {}
    for drive in drives:
        for port in ports_above(drive, root):
            below.setdefault(port, []).append(drive.serial)
    ports = []
    for port, serials in sorted(below.items()):
        link = read_link(port)
        if len(serials) > 1 and link.current_speed_gts is not None and link.current_width is not None:
            ports.append(SharedPort(os.path.basename(port), link, tuple(serials)))
    return ports
