"""The kernel's settings that affect the speed of I/O, as they are now, and the CUDA toolkit's version."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from tunetool.inspect.findings import ReadAhead
from tunetool.inspect.model import Drive, Setting
from tunetool.node.array.md_arrays import Array
from tunetool.node.common.files import read_int, read_text
from tunetool.node.common.io_settings import SETTINGS
from tunetool.node.tuning.settings import Machine, read_cpus

OTHERS = {
    "nvme_poll_queues": "sys/module/nvme/parameters/poll_queues",
    "nvme_multipath": "sys/module/nvme_core/parameters/multipath",
    "pcie_aspm": "sys/module/pcie_aspm/parameters/policy",
    "smt": "sys/devices/system/cpu/smt/control",
    "numa_balancing": "proc/sys/kernel/numa_balancing",
}
"""Files, without their leading slash, of settings that the role io_tuning does not have."""


def read_settings(drives: Sequence[Drive], arrays: Sequence[Array], root: str) -> list[Setting]:
    """Each setting that this kernel has; those of drives are of the data drives."""
    names = {drive.name: drive.name for drive in drives if drive.data}
    devices = {array.device: array.device for array in arrays if any(member in names for member in array.members)}
    machine = Machine(names, devices, read_cpus(root), root)
    return list(_settings(machine))


def read_ahead(devices: Sequence[str], root: str) -> dict[str, ReadAhead]:
    """How much each of these block devices reads ahead, by kernel name.

    The kernel's own choice (block/blk-settings.c): twice what the device calls optimal, which is a stripe for an array,
    and at least 128 KiB.
    """
    found = {}
    for device in devices:
        queue = f"{root.rstrip('/')}/sys/block/{device}/queue"
        now, optimal = read_int(f"{queue}/read_ahead_kb"), read_int(f"{queue}/optimal_io_size")
        if now is not None and optimal is not None:
            found[device] = ReadAhead(now * 1024, max(2 * optimal, 128 * 1024))
    return found


def _settings(machine: Machine) -> Iterator[Setting]:
    for name in SETTINGS:
        values = [machine.read(name, target) for target in machine.targets(name)]
        yield from _setting(name, values)
    for name, path in OTHERS.items():
        text = read_text(f"{machine.root.rstrip('/')}/{path}")
        chosen = re.search(r"\[([^\]]+)\]", text or "")
        yield from _setting(name, [chosen.group(1) if chosen else text])


def _setting(name: str, values: Sequence[str | None]) -> Iterator[Setting]:
    counted = Counter(value for value in values if value)
    if counted:
        yield Setting(name=name, values=dict(sorted(counted.items())))


def read_cuda(root: str) -> str | None:
    """Version of the CUDA toolkit at /usr/local/cuda; None where there is none."""
    try:
        version = json.loads(read_text(f"{root.rstrip('/')}/usr/local/cuda/version.json") or "")["cuda"]["version"]
    except (ValueError, KeyError, TypeError):
        return None
    return str(version)
