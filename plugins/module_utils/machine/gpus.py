"""NVIDIA GPUs, from sysfs and /proc/driver/nvidia: no nvidia-smi, no library, no process."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Mapping

from ..common.files import read_text
from .drives import Link
from .pci_tree import GPU, PciDevice

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
