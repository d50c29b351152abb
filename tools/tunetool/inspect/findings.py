"""What is worth knowing on a node, each with its cure. Pure: facts in, findings out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tunetool.inspect.ceilings import spoken, words
from tunetool.inspect.container_advice import container_findings
from tunetool.inspect.model import Drive, Finding, Inspection, Link
from tunetool.node.common.check_result import FAIL, UNKNOWN, Check
from tunetool.node.gds.cufile_check import Problem
from tunetool.node.machine.pcie_links import bandwidth
from tunetool.node.units import format_size, format_size_binary


@dataclass(frozen=True)
class Facts:
    """The screen so far, and what is not on it."""

    shown: Inspection
    manifest: Mapping[str, Any] | None = None
    checks: Sequence[Check] = ()
    """What the drives' own health logs say."""
    sys: bool = True
    """/sys is there."""
    udev: bool = True
    """udev's database is there."""
    nodes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Device nodes by their pattern under /dev."""
    cufile: str = ""
    """Path of the cufile.json in force."""
    cufile_problems: Sequence[Problem] = ()
    nvidia_fs: bool = False
    """The module nvidia-fs is loaded."""


def findings(facts: Facts) -> list[Finding]:
    """Hardware first, then what was built on it, then what a container lacks."""
    found = [_health(check) for check in facts.checks if check.status in (FAIL, UNKNOWN)]
    for rule in (_links, _gpus, _alike, _arrays, _nothing_built, _filesystems, _shared, _memory, _cufile, _manifest):
        found += rule(facts)
    return found + container_findings(
        facts.shown,
        nodes=facts.nodes,
        sys=facts.sys,
        udev=facts.udev,
        nvidia_fs=facts.nvidia_fs,
        point=str(facts.manifest["filesystem"]["mount_point"]) if facts.manifest else None,
    )


def _health(check: Check) -> Finding:
    return Finding(id=check.id, found=check.found, remedy=check.remedy)


def _runs(link: Link) -> str:
    best = bandwidth(link.possible_speed_gts, link.possible_width)
    rates = f" ({link.bandwidth / 1e9:.1f} of {best / 1e9:.1f} GB/s)" if link.bandwidth and best else ""
    return f"{words(link)} where {spoken(link.possible_speed_gts, link.possible_width)} is possible{rates}"


def _links(facts: Facts) -> list[Finding]:
    bad = [drive for drive in facts.shown.drives if drive.link.downgraded]
    return [
        Finding(
            id="drive.link",
            found=f"`{drive.serial}` ({drive.name}, {drive.pci_address}) runs at {_runs(drive.link)}",
            remedy="reseat the drive, then its cable or riser; its slot's speed may also be set in the firmware",
        )
        for drive in bad
    ]


def _gpus(facts: Facts) -> list[Finding]:
    found = []
    for gpu in facts.shown.gpus:
        narrow = gpu.link.width is not None and gpu.link.width < (gpu.link.possible_width or 0)
        if narrow:
            remedy = "reseat the GPU or its baseboard; the firmware may also split the slot"
        elif gpu.link.downgraded:
            remedy = "look again under load: an idle GPU may slow its link down; if it stays, reseat it"
        else:
            continue
        found.append(
            Finding(id="gpu.link", found=f"GPU {gpu.index} ({gpu.address}) runs at {_runs(gpu.link)}", remedy=remedy)
        )
    if facts.shown.gpus and facts.shown.driver is None:
        found.append(
            Finding(
                id="gpu.driver",
                found=f"{len(facts.shown.gpus)} NVIDIA GPUs, and no NVIDIA kernel driver is loaded",
                remedy="install the open NVIDIA kernel module (GPUDirect Storage asks for it), then `modprobe nvidia`",
            )
        )
    return found


def _alike(facts: Facts) -> list[Finding]:
    """Drives that are to work together and differ."""
    data = [drive for drive in facts.shown.drives if drive.data]
    found = []
    rows: tuple[tuple[str, str, Sequence[tuple[Drive, str]], str], ...] = (
        (
            "drives.firmware",
            "firmware",
            [(drive, f"{drive.model} {drive.firmware}") for drive in data if _models(data) == 1],
            "bring all to the newest with `nvme fw-download` and `nvme fw-commit`, as the maker says",
        ),
        (
            "drives.lba",
            "logical blocks",
            [(drive, f"{drive.lba_bytes} B") for drive in data],
            "bring all to one LBA format with `nvme format --lbaf`, which erases; `site.yml` names the line",
        ),
        (
            "drives.size",
            "sizes",
            [(drive, format_size(drive.size_bytes)) for drive in data],
            "name the size of the data drives in the inventory (`nvme_drives_size`)",
        ),
    )
    for identity, what, pairs, remedy in rows:
        kinds: dict[str, list[str]] = {}
        for drive, value in pairs:
            kinds.setdefault(value, []).append(drive.serial)
        if len(kinds) > 1:
            rare = min(kinds, key=lambda value: len(kinds[value]))
            named = ", ".join(f"`{serial}`" for serial in kinds[rare][:4])
            told = f"the data drives differ in {what}: {rare} on {named}{' ...' if len(kinds[rare]) > 4 else ''}"
            found.append(Finding(id=identity, found=told, remedy=remedy))
    odd = [drive for drive in data if drive.metadata_bytes]
    if odd:
        told = ", ".join(f"`{drive.serial}`" for drive in odd)
        found.append(
            Finding(
                id="drives.metadata",
                found=f"{told}: metadata bytes in every block, which md and XFS cannot use",
                remedy="format without metadata (`nvme format --lbaf`), which erases; `site.yml` names the line",
            )
        )
    return found


def _models(drives: Sequence[Drive]) -> int:
    return len({drive.model for drive in drives})


def _arrays(facts: Facts) -> list[Finding]:
    found = []
    mounted = {one.device for one in facts.shown.filesystems}
    for array in facts.shown.arrays:
        name = f"array `{array.name or array.device}`"
        if not array.serves:
            gone = array.members.count(None)
            told = f"{gone} of {len(array.members)} members gone" if gone else f"state `{array.state}`"
            remedy = (
                "look for the drive in the kernel's log; a RAID0 that lost one is rebuilt by "
                "`playbooks/replace_drive.yml`"
            )
            found.append(Finding(id="array.state", found=f"{name} does not serve: {told}", remedy=remedy))
        elif f"/dev/{array.device}" not in mounted and facts.shown.host.container is None:
            found.append(
                Finding(
                    id="array.mount",
                    found=f"{name} is not mounted",
                    remedy="`mount` its place in /etc/fstab, or build the volume with `site.yml`",
                )
            )
    return found


def _nothing_built(facts: Facts) -> list[Finding]:
    free = [drive for drive in facts.shown.drives if drive.data]
    if facts.shown.arrays or len(free) < 2 or facts.shown.host.container is not None:
        return []
    sizes = " and ".join(sorted({format_size(drive.size_bytes) for drive in free}))
    return [
        Finding(
            id="volume",
            found=f"{len(free)} free drives of {sizes}, and no array over them",
            remedy="`site.yml` builds the scratch volume; with `--check` it only says of every drive what it would do",
        )
    ]


def _filesystems(facts: Facts) -> list[Finding]:
    found = []
    arrays = {f"/dev/{array.device}": array for array in facts.shown.arrays}
    for one in facts.shown.filesystems:
        array = arrays.get(one.device)
        if array is None or one.aligned is not False:
            continue
        has = (
            f"stripe unit {format_size_binary(one.stripe_unit_bytes)}, "
            f"width {format_size_binary(one.stripe_width_bytes or 0)}"
            if one.stripe_unit_bytes
            else "no stripe geometry"
        )
        told = (
            f"`{one.mount_point}` has {has}, its array chunks of {format_size_binary(array.chunk_bytes)} "
            f"over {len(array.members)} drives"
        )
        found.append(
            Finding(
                id="filesystem.alignment",
                found=told,
                remedy="make it anew for the array (`playbooks/teardown.yml`, then `site.yml`); its data must move",
            )
        )
    return found


def _shared(facts: Facts) -> list[Finding]:
    drives = next((one for one in facts.shown.ceilings if one.id == "drives"), None)
    links = next((one for one in facts.shown.ceilings if one.id == "links"), None)
    if not (drives and links and drives.value and links.value) or links.value > drives.value * 0.999:
        return []
    return [
        Finding(
            id="pcie.shared",
            found=f"{links.of}: {links.value / 1e9:.1f} of {drives.value / 1e9:.1f} GB/s can pass",
            remedy="spread the drives over more root ports or switches; no setting of the node's widens a link",
        )
    ]


def _memory(facts: Facts) -> list[Finding]:
    memory, found = facts.shown.memory, []
    if facts.shown.host.container is not None:
        return []
    if memory.memlock not in (None, "unlimited"):
        limit = format_size_binary(int(memory.memlock)) if memory.memlock.isdigit() else memory.memlock
        found.append(
            Finding(
                id="memory.memlock",
                found=f"this session may lock {limit} of memory: DeepSpeed's pinned buffers fail beyond it",
                remedy="role `host_memory` lifts it (`host_memory_memlock: unlimited`), then log in again",
            )
        )
    if memory.shm is None:
        found.append(
            Finding(
                id="memory.shm",
                found="no tmpfs at /dev/shm: DataLoader workers and NCCL need one",
                remedy="`mount -t tmpfs tmpfs /dev/shm`, or role `host_memory`, which keeps it",
            )
        )
    return found


def _cufile(facts: Facts) -> list[Finding]:
    return [
        Finding(
            id="gds.config",
            found=f"`{facts.cufile}`{f' line {problem.line}' if problem.line else ''}: {problem.message}",
            remedy=problem.remedy,
        )
        for problem in facts.cufile_problems
    ]


def _manifest(facts: Facts) -> list[Finding]:
    manifest = facts.manifest
    if manifest is None:
        return []
    found = []
    if manifest.get("reboot_required"):
        found.append(
            Finding(
                id="node.reboot",
                found="what was built here takes effect at the next boot",
                remedy="reboot the node, then run `site.yml` again",
            )
        )
    point = manifest["filesystem"]["mount_point"]
    if facts.shown.host.container is None and point not in {one.mount_point for one in facts.shown.filesystems}:
        found.append(
            Finding(
                id="filesystem.mounted",
                found=f"`{point}`, which was built here, is not mounted",
                remedy="`tunetool verify --level config` says what is missing beneath it",
            )
        )
    return found
