"""Every PCI device of a machine, with the ports between it and its root complex, and which of these redirect (ACS)."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Mapping, Optional, Sequence

from ..common.documents import open_regular
from ..common.files import read_int, read_text
from .drives import Link, read_link

DRIVE, GPU, NIC, BRIDGE, OTHER = "drive", "gpu", "nic", "bridge", "other"

NVIDIA = 0x10DE

_ROOT = re.compile(r"^pci[0-9a-f]{4,}:[0-9a-f]{2}$")
_ADDRESS = re.compile(r"^[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")

# Base class and subclass (PCI Code and ID Assignment Specification).
_NVME, _VGA, _3D, _PCI_BRIDGE, _NETWORK = 0x0108, 0x0300, 0x0302, 0x0604, 0x02


@dataclass(frozen=True)
class PciDevice:
    """One function of a device."""

    address: str
    root_complex: str
    """Such as ``pci0000:15``."""
    ports: tuple[str, ...]
    """Addresses of the ports above it, from the root complex down."""
    kind: str
    vendor: int | None
    device: int | None
    link: Link
    numa_node: int | None
    interfaces: tuple[str, ...] = ()
    """Names of its network and RDMA devices."""


def port_directories(device: str) -> list[str]:
    """sysfs directories of the ports between the PCI device of a sysfs path and the root complex, the nearest first."""
    directories = []
    directory = os.path.dirname(os.path.realpath(device))
    while _ADDRESS.match(os.path.basename(directory)):
        directories.append(directory)
        directory = os.path.dirname(directory)
    return directories


def read_pci(root: str = "/") -> dict[str, PciDevice]:
    """PCI devices by address; empty without sysfs."""
    base = os.path.join(root, "sys/bus/pci/devices")
    try:
        names = sorted(os.listdir(base))
    except OSError:
        return {}
    devices = (_read(os.path.join(base, name)) for name in names)
    return {device.address: device for device in devices if device is not None}


def _read(entry: str) -> PciDevice | None:
    directory = os.path.realpath(entry)
    parts = directory.split(os.sep)
    roots = [part for part in parts if _ROOT.match(part)]
    addresses = [part for part in parts if _ADDRESS.match(part)]
    if not roots or not addresses:
        return None
    vendor, code = _hex(directory, "vendor"), _hex(directory, "class")
    kind = _kind(vendor, code)
    node = read_int(os.path.join(directory, "numa_node"))
    return PciDevice(
        address=addresses[-1],
        root_complex=roots[0],
        ports=tuple(addresses[:-1]),
        kind=kind,
        vendor=vendor,
        device=_hex(directory, "device"),
        link=read_link(directory),
        # The kernel reports -1 if the firmware names no node.
        numa_node=node if node is not None and node >= 0 else None,
        interfaces=_interfaces(directory) if kind == NIC else (),
    )


def _kind(vendor: int | None, code: int | None) -> str:
    if code is None:
        return OTHER
    short = code >> 8
    if short == _NVME:
        return DRIVE
    # An NVSwitch is NVIDIA's too, and a bridge of another class.
    if vendor == NVIDIA and short in (_VGA, _3D):
        return GPU
    if short == _PCI_BRIDGE:
        return BRIDGE
    return NIC if short >> 8 == _NETWORK else OTHER


def _hex(directory: str, name: str) -> int | None:
    try:
        return int(read_text(os.path.join(directory, name)) or "", 16)
    except ValueError:
        return None


def _interfaces(directory: str) -> tuple[str, ...]:
    interfaces: list[str] = []
    for kind in ("infiniband", "net"):
        try:
            interfaces += sorted(os.listdir(os.path.join(directory, kind)))
        except OSError:
            continue
    return tuple(interfaces)


# pci.ids of the PCI ID Project; for a machine whose driver is not loaded, which knows the name otherwise.
_NAMES = {
    0x20B0: "NVIDIA A100-SXM4-40GB",
    0x20B2: "NVIDIA A100-SXM4-80GB",
    0x2330: "NVIDIA H100 SXM5 80GB",
    0x2331: "NVIDIA H100 PCIe",
    0x2335: "NVIDIA H200 SXM 141GB",
    0x2901: "NVIDIA B200",
}


@dataclass(frozen=True)
class Gpu:
    """One GPU."""

    address: str
    model: str
    link: Link
    numa_node: int | None


def read_gpus(devices: Mapping[str, PciDevice], root: str = "/") -> list[Gpu]:
    """The GPUs among ``devices``, by address."""
    return [
        Gpu(device.address, _model(device, root), device.link, device.numa_node)
        for device in devices.values()
        if device.kind == GPU
    ]


def _model(device: PciDevice, root: str) -> str:
    text = read_text(os.path.join(root, "proc/driver/nvidia/gpus", device.address, "information")) or ""
    match = re.search(r"^Model:\s*(.+)$", text, re.MULTILINE)
    if match:
        return match.group(1).strip()
    number = device.device or 0
    return _NAMES.get(number, "NVIDIA device 10de:%04x" % number)


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
