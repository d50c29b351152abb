"""The findings of a node, each with its remedy. Pure: facts in, findings out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tunetool.inspect.ceilings import format_link, format_link_speed
from tunetool.inspect.container_advice import container_findings
from tunetool.inspect.model import Drive, Finding, Inspection, Link
from tunetool.node.array.drive_volumes import volumes_of
from tunetool.node.array.md_arrays import cure_of
from tunetool.node.array.numa_volumes import CHECK_ID as NUMA
from tunetool.node.array.numa_volumes import moved
from tunetool.node.common.check_result import FAIL, UNKNOWN, Check
from tunetool.node.common.manifest import common_mount_point, each_volume
from tunetool.node.common.raid_levels import LEVELS, needs_every_member
from tunetool.node.gds.cufile_check import Problem
from tunetool.node.machine.pcie_links import bandwidth
from tunetool.node.units import format_size, format_size_binary


@dataclass(frozen=True)
class ReadAhead:
    """How much a device reads ahead, in bytes."""

    now: int
    own: int
    """What the kernel takes by itself."""


@dataclass(frozen=True)
class Facts:
    """What the rules judge: the inspection, and facts that are not part of it."""

    shown: Inspection
    manifest: Mapping[str, Any] | None = None
    manifest_problem: str = ""
    """Why the manifest that is there cannot be used."""
    occupied: Mapping[str, str] = field(default_factory=dict)
    """Why a drive is not free, by kernel name."""
    looked: bool = False
    """Whether somebody looked into the drives; else a free drive may hold something."""
    checks: Sequence[Check] = ()
    """Checks of the drives' health logs."""
    sys: bool = True
    """Whether /sys is there."""
    udev: bool = True
    """Whether udev's database is there."""
    nodes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Device nodes by their pattern under /dev."""
    cufile: str = ""
    """Path of the cufile.json that libcufile reads."""
    cufile_problems: Sequence[Problem] = ()
    nvidia_fs: bool = False
    """Whether the kernel module nvidia-fs is loaded."""
    read_ahead: Mapping[str, ReadAhead] = field(default_factory=dict)
    """Of drives and arrays, by kernel name."""

    @property
    def data_drives(self) -> list[Drive]:
        """The drives for the volume: those in it, or free for it."""
        return [drive for drive in self.shown.drives if drive.data]


def findings(facts: Facts) -> list[Finding]:
    """All findings: of the hardware first, then of what was built on it, then of the container."""
    result = [_health(check) for check in facts.checks if check.status in (FAIL, UNKNOWN)]
    rules: Sequence[Callable[[Facts], Iterable[Finding]]] = (
        _links,
        _gpus,
        _different_drives,
        _arrays,
        _nothing_built,
        _occupied,
        _filesystems,
        _read_ahead,
        _shared,
        _memory,
        _cufile,
        _manifest,
    )
    for rule in rules:
        result += rule(facts)
    return result + container_findings(
        facts.shown,
        nodes=facts.nodes,
        sys=facts.sys,
        udev=facts.udev,
        nvidia_fs=facts.nvidia_fs,
        point=common_mount_point(facts.manifest) if facts.manifest else None,
    )


def _health(check: Check) -> Finding:
    return Finding(id=check.id, found=check.found, remedy=check.remedy)


def _actual_and_possible(link: Link) -> str:
    best = bandwidth(link.possible_speed_gts, link.possible_width)
    rates = f" ({link.bandwidth / 1e9:.1f} of {best / 1e9:.1f} GB/s)" if link.bandwidth and best else ""
    best_link = format_link_speed(link.possible_speed_gts, link.possible_width)
    return f"{format_link(link)} where {best_link} is possible{rates}"


def _links(facts: Facts) -> list[Finding]:
    bad = [drive for drive in facts.shown.drives if drive.link.downgraded]
    return [
        Finding(
            id="drive.link",
            found=f"`{drive.serial}` ({drive.name}, {drive.pci_address}) runs at {_actual_and_possible(drive.link)}",
            remedy="reseat the drive, then its cable or riser; the firmware may also limit the slot's speed",
        )
        for drive in bad
    ]


def _gpus(facts: Facts) -> Iterator[Finding]:
    for gpu in facts.shown.gpus:
        narrow = gpu.link.width is not None and gpu.link.width < (gpu.link.possible_width or 0)
        if narrow:
            remedy = "reseat the GPU or its baseboard; the firmware may also split the slot"
        elif gpu.link.downgraded:
            remedy = "inspect again under load: an idle GPU may slow its link down; if it stays slow, reseat it"
        else:
            continue
        runs = f"GPU {gpu.index} ({gpu.address}) runs at {_actual_and_possible(gpu.link)}"
        yield Finding(id="gpu.link", found=runs, remedy=remedy)
    if facts.shown.gpus and facts.shown.driver is None:
        yield Finding(
            id="gpu.driver",
            found=f"{len(facts.shown.gpus)} NVIDIA GPUs, but no NVIDIA kernel driver is loaded",
            remedy="install the open NVIDIA kernel module (GPUDirect Storage needs it), then `modprobe nvidia`",
        )


def _different_drives(facts: Facts) -> Iterator[Finding]:
    """Differences between the data drives, which form one array."""
    data = facts.data_drives
    rows: tuple[tuple[str, str, Sequence[tuple[Drive, str]], str], ...] = (
        (
            "drives.firmware",
            "firmware",
            [(drive, f"{drive.model} {drive.firmware}") for drive in data if _models(data) == 1],
            "update all to the newest with `nvme fw-download` and `nvme fw-commit`, as the manufacturer describes",
        ),
        (
            "drives.lba",
            "logical blocks",
            [(drive, f"{drive.lba_bytes} B") for drive in data],
            "give all one LBA format with `nvme format --lbaf`, which erases them; `tunetool provision` "
            "prints the command",
        ),
        (
            "drives.size",
            "sizes",
            [(drive, format_size(drive.size_bytes)) for drive in data],
            "set the size of the data drives in the inventory (`nvme_drives_size`)",
        ),
    )
    for identity, what, pairs, remedy in rows:
        kinds: dict[str, list[str]] = {}
        for drive, value in pairs:
            kinds.setdefault(value, []).append(drive.serial)
        if len(kinds) > 1:
            rare = min(kinds, key=lambda value: len(kinds[value]))
            named = ", ".join(f"`{serial}`" for serial in kinds[rare][:4])
            serials = f"the data drives differ in {what}: {rare} on {named}{' ...' if len(kinds[rare]) > 4 else ''}"
            yield Finding(id=identity, found=serials, remedy=remedy)
    odd = [drive for drive in data if drive.metadata_bytes]
    if odd:
        serials = ", ".join(f"`{drive.serial}`" for drive in odd)
        yield Finding(
            id="drives.metadata",
            found=f"{serials}: metadata bytes in every block, which md and XFS cannot use",
            remedy="format without metadata (`nvme format --lbaf`), which erases; `tunetool provision` "
            "prints the command",
        )


def _models(drives: Sequence[Drive]) -> int:
    return len({drive.model for drive in drives})


def _arrays(facts: Facts) -> Iterator[Finding]:
    mounted = {filesystem.device for filesystem in facts.shown.filesystems}
    for array in facts.shown.arrays:
        name = f"array `{array.name or array.device}`"
        if not array.serves:
            gone = array.members.count(None)
            reason = f"{gone} of {len(array.members)} members missing" if gone else f"state `{array.state}`"
            cure = cure_of(array.state, array.level)
            rebuilt = (
                f"; a {array.level.upper()} that lost one is rebuilt by `ansible-playbook tunetool.node.replace_drive`"
            )
            remedy = (not gone and cure) or (
                "look for the drive in the kernel's log" + (rebuilt if needs_every_member(array.level) else "")
            )
            yield Finding(id="array.state", found=f"{name} does not serve: {reason}", remedy=remedy)
            continue
        if array.level in LEVELS and (None in array.members or array.rebuild):
            gone = array.members.count(None)
            left = f"{gone} of {len(array.members)} members missing" if gone else f"its rebuild is at {array.rebuild}"
            remedy = LEVELS[array.level].remedy if gone else "wait: one more loss there takes the data"
            yield Finding(id="array.redundancy", found=f"{name} is degraded and serves: {left}", remedy=remedy)
        if f"/dev/{array.device}" not in mounted and facts.shown.host.container is None:
            yield Finding(
                id="array.mount",
                found=f"{name} is not mounted",
                remedy="`mount` it by its line in /etc/fstab, or build the volume with `tunetool provision`",
            )


def _nothing_built(facts: Facts) -> list[Finding]:
    free = [drive for drive in facts.data_drives if drive.use == "free"]
    if facts.shown.arrays or len(free) < 2 or facts.shown.host.container is not None:
        return []
    sizes = " and ".join(sorted({format_size(drive.size_bytes) for drive in free}))
    return [
        Finding(
            id="volume",
            found=f"{len(free)} free drives of {sizes}, but no array over them",
            remedy=f"`tunetool provision` builds the scratch volume{'' if facts.looked else ' if they hold nothing'}; "
            "with `--check` it only prints what it would do to each drive",
        )
    ]


def _occupied(facts: Facts) -> Iterator[Finding]:
    """Drives that are no member of an array and that provisioning refuses, but for mounted ones and swap."""
    if facts.shown.arrays or facts.shown.host.container is not None:
        return
    refused = [
        (drive, reason)
        for drive in facts.shown.drives
        if (reason := facts.occupied.get(drive.name)) and not reason.startswith(("mounted at", "active swap"))
    ]
    if not refused:
        return
    named = "; ".join(f"`{drive.serial}` ({drive.name}) {reason}" for drive, reason in refused[:2])
    more = f"; and {len(refused) - 2} more" if len(refused) > 2 else ""
    yield Finding(
        id="drives.occupied",
        found=f"{len(refused)} drives are not blank or in use: {named}{more}",
        remedy="`tunetool provision` refuses them: end what uses them and save what they hold; then "
        "`tunetool provision --plan FILE` names what would be lost",
    )


def _filesystems(facts: Facts) -> list[Finding]:
    misaligned = []
    arrays = {f"/dev/{array.device}": array for array in facts.shown.arrays}
    for filesystem in facts.shown.filesystems:
        array = arrays.get(filesystem.device)
        if array is None or filesystem.aligned is not False:
            continue
        geometry = (
            f"stripe unit {format_size_binary(filesystem.stripe_unit_bytes)}, "
            f"width {format_size_binary(filesystem.stripe_width_bytes or 0)}"
            if filesystem.stripe_unit_bytes
            else "no stripe geometry"
        )
        sentence = (
            f"`{filesystem.mount_point}` has {geometry}, but its array has chunks of "
            f"{format_size_binary(array.chunk_bytes)} over {len(array.members)} drives"
        )
        misaligned.append(
            Finding(
                id="filesystem.alignment",
                found=sentence,
                remedy="rebuild it for the array (`ansible-playbook tunetool.node.teardown`, then "
                "`tunetool provision`); move its data first",
            )
        )
    return misaligned


def _read_ahead(facts: Facts) -> Iterator[Finding]:
    """More than the kernel takes by itself, unless the inventory asked for it."""
    asked = ((facts.manifest or {}).get("tuning") or {}).get("read_ahead_bytes")
    for filesystem in facts.shown.filesystems:
        device = filesystem.device.removeprefix("/dev/")
        ahead = facts.read_ahead.get(device)
        array = any(each.device == device for each in facts.shown.arrays)
        if ahead is None or ahead.now <= ahead.own or (array and ahead.now == asked):
            continue
        now, own = format_size_binary(ahead.now), format_size_binary(ahead.own)
        file = f"/sys/block/{device}/queue/read_ahead_kb"
        keeper = "`io_tuning_read_ahead` keeps it" if array else "a udev rule or a tuned profile set it"
        yield Finding(
            id="read_ahead",
            found=f"`{filesystem.mount_point}` ({device}) reads {now} ahead, {own} by the kernel's own choice: samples "
            "that are read by mmap in shuffled order fetch as much for each page",
            remedy=f"as root, until the next boot: `echo {ahead.own // 1024} > {file}`; {keeper}",
        )


def _shared(facts: Facts) -> list[Finding]:
    drives = next((ceiling for ceiling in facts.shown.ceilings if ceiling.id == "drives"), None)
    links = next((ceiling for ceiling in facts.shown.ceilings if ceiling.id == "links"), None)
    if not (drives and links and drives.value and links.value) or links.value > drives.value * 0.999:
        return []
    return [
        Finding(
            id="pcie.shared",
            found=f"{links.of}: {links.value / 1e9:.1f} of {drives.value / 1e9:.1f} GB/s can pass",
            remedy="spread the drives over more root ports or switches; no setting of the node widens a link",
        )
    ]


def _memory(facts: Facts) -> Iterator[Finding]:
    memory = facts.shown.memory
    if facts.shown.host.container is not None:
        return
    if memory.memlock not in (None, "unlimited"):
        yield Finding(
            id="memory.memlock",
            found=f"this session may lock {memory.memlock_in_words} of memory: larger pinned buffers of DeepSpeed fail",
            remedy="as root: `printf '%s - memlock unlimited\\n' '*' root > /etc/security/limits.d/memlock.conf`, then "
            "log in again; on nodes role `host_memory` does it (`host_memory_memlock: unlimited`)",
        )
    if memory.shm is None:
        yield Finding(
            id="memory.shm",
            found="no tmpfs at /dev/shm: DataLoader workers and NCCL need one",
            remedy="`mount -t tmpfs tmpfs /dev/shm`, or role `host_memory`, which makes the mount permanent",
        )
    if memory.shm_huge == "never":
        yield Finding(
            id="memory.shm_huge",
            found="/dev/shm has pages of 4 KiB: large files there are written and mapped more slowly",
            remedy="as root, until the next boot: `mount -o remount,huge=within_size /dev/shm`; role `host_memory` "
            "does it at boot too",
        )


def _cufile(facts: Facts) -> list[Finding]:
    return [
        Finding(
            id="gds.config",
            found=f"`{facts.cufile}`{f' line {problem.line}' if problem.line else ''}: {problem.message}",
            remedy=problem.remedy,
        )
        for problem in facts.cufile_problems
    ]


def _manifest(facts: Facts) -> Iterator[Finding]:
    manifest = facts.manifest
    if manifest is None:
        if facts.manifest_problem:
            remedy = "run `tunetool provision` for this node, which writes it again"
            yield Finding(id="manifest.damaged", found=facts.manifest_problem, remedy=remedy)
        return
    if manifest.get("reboot_required"):
        yield Finding(
            id="node.reboot",
            found="changes of the last `tunetool provision` take effect at the next boot",
            remedy="reboot the node, then run `tunetool provision` again",
        )
    nodes = {drive.serial: drive.numa_node for drive in facts.shown.drives}
    for volume in volumes_of(manifest):
        for away in moved([volume], nodes):
            found = f"volume `{volume.name}`: {away.expected} expected, found {away.found}"
            yield Finding(id=NUMA, found=found, remedy=away.hint)
    points = [volume["filesystem"]["mount_point"] for _, volume in each_volume(manifest)]
    mounted = {filesystem.mount_point for filesystem in facts.shown.filesystems}
    gone = [point for point in points if point not in mounted]
    if facts.shown.host.container is None and gone:
        were = "was built on this node, but is" if len(gone) == 1 else "were built on this node, but are"
        yield Finding(
            id="filesystem.mounted",
            found=f"`{'`, `'.join(gone)}` {were} not mounted",
            remedy="`tunetool verify --level config` shows what is missing below it",
        )
