"""PCIe access control (ACS): which ports between two devices send their traffic up to the root complex."""

from __future__ import annotations

import os
from typing import Optional, Sequence

from ..common.documents import open_regular
from .pci_tree import port_directories

_EXTENDED = 0x100
"""Offset of the extended capabilities (PCI Express Base Specification, 7.6)."""
_ACS = 0x000D
_CONTROL = 6
_REDIRECT = 0x04 | 0x08
"""P2P request redirect and completion redirect (linux/pci_regs.h, PCI_ACS_RR and PCI_ACS_CR)."""


def ports_above(address: str, root: str = "/") -> list[str]:
    """sysfs directories of the ports above a PCI device, the nearest first; empty if the device does not exist."""
    device = os.path.join(root, "sys/bus/pci/devices", address)
    if not os.path.exists(device):
        return []
    return port_directories(device)


def redirects(config: bytes) -> Optional[bool]:
    """Whether ACS of a port redirects peer traffic, from its configuration space.

    None if the bytes end before the extended capabilities: without root the kernel shows only the first 64.
    """
    if len(config) < _EXTENDED + 4:
        return None
    offset, seen = _EXTENDED, set()
    while offset and offset not in seen and offset + 8 <= len(config):
        seen.add(offset)
        header = int.from_bytes(config[offset : offset + 4], "little")
        if header & 0xFFFF == _ACS:
            control = int.from_bytes(config[offset + _CONTROL : offset + _CONTROL + 2], "little")
            return bool(control & _REDIRECT)
        offset = header >> 20 & 0xFFC
    return False


def redirecting_ports(gpus: Sequence[str], drives: Sequence[str], root: str = "/") -> Optional[tuple[str, ...]]:
    """Addresses of the ports on the paths between ``gpus`` and ``drives`` that redirect; None where one cannot be read.

    Of each pair the ports below the one where their ways meet; under different root ports, all of them.
    """
    between: set[str] = set()
    for gpu in gpus:
        for drive in drives:
            first, second = ports_above(gpu, root), ports_above(drive, root)
            between |= set(first) ^ set(second)
    redirecting = []
    for port in sorted(between):
        try:
            with os.fdopen(open_regular(os.path.join(port, "config")), "rb") as stream:
                answer = redirects(stream.read(4096))
        except OSError:
            answer = None
        if answer is None:
            return None
        if answer:
            redirecting.append(os.path.basename(port))
    return tuple(redirecting)
