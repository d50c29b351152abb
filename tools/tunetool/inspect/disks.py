"""Disks that are no NVMe drives: those of a cloud's machine are often all that there is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from tunetool.inspect import model
from tunetool.node.common.files import read_int, read_text
from tunetool.node.machine.block_stack import SECTOR, devices_under

_DISK = re.compile(r"^(sd|vd|xvd)[a-z]+$")
_VIRTIO = "vd"


def disks(mounted: Mapping[str, str], root: str) -> list[model.Disk]:
    """The disks in ``root``. ``mounted``: mount points by kernel name of what is mounted."""
    uses: dict[str, list[str]] = {}
    for name, place in mounted.items():
        for below in devices_under(name, root):
            uses.setdefault(below, []).append(place)
    found = []
    for path in sorted(Path(root, "sys/block").glob("*")):
        sectors = read_int(str(path / "size"))
        if not _DISK.match(path.name) or not sectors:
            continue
        words = [read_text(str(path / "device" / part)) or "" for part in ("vendor", "model")]
        # A virtio device's vendor is a number.
        kind = "virtio disk" if path.name.startswith(_VIRTIO) else " ".join(" ".join(words).split()) or "disk"
        found.append(
            model.Disk(
                name=path.name,
                kind=kind,
                size_bytes=sectors * SECTOR,
                mounted=list(dict.fromkeys(uses.get(path.name, []))),
            )
        )
    return found
