"""Recorded machines: documents of tunetool.node.recording, laid out as trees that readers can use as root."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tunetool.node.machine import recording

RECORDED = Path(__file__).parent / "data/machines"
ARRAY_CURES = {
    "broken": "tunetool.node.replace_drive",
    "clear": "mdadm --assemble --scan",
    "readonly": "mdadm --readwrite",
    "suspended": "a RAID0 has neither",
}
"""States of an array that takes no writes, and part of the remedy."""


def lay_out(name: str, root: Path) -> Path:
    """The recorded machine ``name`` under ``root``, links as links."""
    recording.lay_out(json.loads((RECORDED / f"{name}.json").read_text()), str(root))
    return root


def lay_out_drives(root: Path) -> dict[str, Any]:
    """The machine `built` with a file system on each of its drives and no array; returns its manifest."""
    lay_out("built", root)
    manifest: dict[str, Any] = json.loads((RECORDED / "built-manifest.json").read_text())
    array, filesystem = manifest.pop("array"), manifest.pop("filesystem")
    for path in [
        *root.glob("sys/devices/**/holders/md127"),
        *root.glob("sys/*/md127"),
        *root.glob("sys/class/*/md127"),
    ]:
        path.unlink()
    shutil.rmtree(root / "sys/devices/virtual/block/md127")
    (root / "etc/tunetool").mkdir(parents=True, exist_ok=True)
    kept = [line for line in (root / "proc/self/mountinfo").read_text().splitlines() if "md127" not in line]
    manifest["schema"], manifest["volumes"] = "tunetool.manifest/2", []
    for number, member in enumerate(array["members"]):
        name, uuid = f"drive{number}", f"{number:08d}-402a-4a1f-b255-742e748c22f3"
        device = f"nvme{number + 1}n1"
        block = root / "sys/class/block" / device
        point = f"{filesystem['mount_point']}/{name}"
        options = ",".join(filesystem["mount_options"])
        kept.append(
            f"{300 + number} 27 {(block / 'dev').read_text().strip()} / {point} rw,{options} - xfs /dev/{device} rw"
        )
        (root / "dev/disk/by-uuid" / uuid).symlink_to(f"../../{device}")
        (root / point.lstrip("/") / "deepspeed_offload").mkdir(parents=True)
        one = {"uuid": uuid, "name": name, "level": "single", "chunk_bytes": 0, "members": [member]}
        stripe = {"data_su_bytes": 0, "data_sw": 0, "log_su_bytes": 4096}
        manifest["volumes"].append(
            {
                "name": name,
                "array": one,
                "filesystem": {**filesystem, **stripe, "uuid": uuid, "mount_point": point},
                "offload_dir": f"{point}/deepspeed_offload",
            }
        )
    del manifest["offload_dir"]
    (root / "proc/self/mountinfo").write_text("\n".join(kept) + "\n")
    return manifest
