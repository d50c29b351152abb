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


def lay_out_numa(root: Path) -> dict[str, Any]:
    """The machine `built` with an array of its own over the drives of each of two NUMA nodes; returns its manifest."""
    lay_out("built", root)
    manifest: dict[str, Any] = json.loads((RECORDED / "built-manifest.json").read_text())
    array, filesystem = manifest.pop("array"), manifest.pop("filesystem")
    manifest["schema"], manifest["volumes"] = "tunetool.manifest/2", []
    shutil.copytree(root / "sys/devices/virtual/block/md127", root / "sys/devices/virtual/block/md126", symlinks=True)
    for path in (*root.glob("dev/disk/by-id/md-*"), *root.glob("dev/disk/by-uuid/44aa7403-*")):
        path.unlink()
    (root / "etc/tunetool").mkdir(parents=True, exist_ok=True)
    kept = [line for line in (root / "proc/self/mountinfo").read_text().splitlines() if "md127" not in line]
    for node, device in enumerate(("md127", "md126")):
        name, uuid = f"numa{node}", f"{node:08d}-402a-4a1f-b255-742e748c22f3"
        own = f"{node:08d}:a7b73bbf:d9e19d4e:8dcddec7"
        members = [{**member, "numa_node": node} for member in array["members"][node::2]]
        drives = [f"nvme{number}n1" for number in range(node + 1, 9, 2)]
        block = root / "sys/devices/virtual/block" / device
        for path in (*block.glob("md/rd*"), *block.glob("slaves/*")):
            if path.readlink().name.removeprefix("dev-") not in drives:
                path.unlink()
        for slot, drive in enumerate(drives):
            (block / "md" / f"rd{2 * slot + node}").unlink()
            (block / "md" / f"rd{slot}").symlink_to(f"dev-{drive}")
            (holder,) = root.glob(f"sys/devices/pci*/**/{drive}/holders/md127")
            holder.unlink()
            (holder.parent / device).symlink_to(block)
            (holder.parents[2] / "numa_node").write_text(f"{node}\n")
        (block / "md/raid_disks").write_text("4\n")
        (block / "dev").write_text(f"9:{device[2:]}\n")
        for place in ("sys/block", "sys/class/block"):
            (root / place / device).unlink(missing_ok=True)
            (root / place / device).symlink_to(block)
        (root / "sys/dev/block" / f"9:{device[2:]}").unlink(missing_ok=True)
        (root / "sys/dev/block" / f"9:{device[2:]}").symlink_to(block)
        for link in (f"by-id/md-name-node1:nvme_raid0_{name}", f"by-id/md-uuid-{own}", f"by-uuid/{uuid}"):
            (root / "dev/disk" / link).symlink_to(f"../../{device}")
        point = f"{filesystem['mount_point']}/{name}"
        options = ",".join(filesystem["mount_options"])
        shown = f"rw,{options},sunit=2048,swidth=8192"
        kept.append(f"{300 + node} 27 9:{device[2:]} / {point} rw,noatime - xfs /dev/{device} {shown}")
        (root / point.lstrip("/") / "deepspeed_offload").mkdir(parents=True)
        one = {**array, "uuid": own, "name": f"nvme_raid0_{name}", "members": members}
        manifest["volumes"].append(
            {
                "name": name,
                "array": one,
                "filesystem": {**filesystem, "uuid": uuid, "data_sw": 4, "mount_point": point},
                "offload_dir": f"{point}/deepspeed_offload",
            }
        )
    del manifest["offload_dir"]
    (root / "proc/self/mountinfo").write_text("\n".join(kept) + "\n")
    return manifest


def wishes_for_several(manifest: dict[str, Any]) -> dict[str, Any]:
    """What was asked of the volumes of a node that has several, as the module scratch_filesystem gets it."""
    point = str(Path(manifest["volumes"][0]["filesystem"]["mount_point"]).parent)
    return {
        "mount_point": point,
        "mount_options": manifest["volumes"][0]["filesystem"]["mount_options"],
        "device_timeout": "30s",
        "label": "nvme_raid0",
        "offload_dir": f"{point}/deepspeed_offload",
        "offload_owner": "root",
        "offload_group": "root",
        "offload_mode": "1777",
        "protect_mount_point": True,
        "services": [],
        "adopt": False,
    }
