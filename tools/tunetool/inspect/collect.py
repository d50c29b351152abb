"""Read a node or a recording into an ``Inspection``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tunetool import __version__
from tunetool.inspect import model
from tunetool.inspect.ceilings import ceilings
from tunetool.inspect.findings import Facts, findings
from tunetool.inspect.pci import link_of, tree
from tunetool.inspect.settings import read_ahead, read_cuda, read_settings
from tunetool.inspect.source import Source
from tunetool.node.array.drive_selection import occupied
from tunetool.node.array.md_arrays import Array, read_arrays
from tunetool.node.common.check_result import FAIL
from tunetool.node.common.drift import known_manifest
from tunetool.node.common.files import read_int, read_text
from tunetool.node.common.manifest import MANIFEST_PATH
from tunetool.node.common.manifest import damage as manifest_damage
from tunetool.node.gds import path_choice
from tunetool.node.gds.cufile_check import Problem, check_config
from tunetool.node.gds.facts import GdsFacts
from tunetool.node.gds.kernel_modules import read_driver
from tunetool.node.machine.block_stack import SECTOR, devices_under, read_stack
from tunetool.node.machine.container import Container, device_nodes, read_container
from tunetool.node.machine.drive_health import GRAVE_CHECKS, Health, Reader, judge_health
from tunetool.node.machine.drives import Drive, read_drives
from tunetool.node.machine.file_system import BUILT
from tunetool.node.machine.host import read_host, read_memory
from tunetool.node.machine.mounts import read_mounts
from tunetool.node.machine.nvme_admin import NotOffered, Refused, Silent
from tunetool.node.machine.pci_tree import read_gpus, read_pci

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


def inspect(source: Source) -> model.Inspection:
    """Read everything that the source shows; what it does not show is absent from the result."""
    root = source.root
    node_drives, arrays = read_drives(root), read_arrays(root)
    answers, health_note = _ask(node_drives, source)
    looked = source.occupied(node_drives)
    # By users and partitions alone where nobody looked into the drives.
    reasons = looked if looked is not None else {drive.name: occupied(drive, ()) for drive in node_drives}
    drives = [_drive(drive, arrays, answers.get(drive.controller), reasons.get(drive.name)) for drive in node_drives]
    drives = [drive.model_copy(update={"data": _is_data(drive, drives)}) for drive in drives]
    devices = read_pci(root)
    gpus = [
        model.Gpu.from_fields_of(gpu, index=index, link=link_of(gpu.link))
        for index, gpu in enumerate(read_gpus(devices, root))
    ]
    nodes = tree(devices, drives, gpus)
    version, is_open = read_driver(root)
    container = read_container(root)
    mounted = filesystems(arrays, root)
    manifest = _manifest(root)
    memory = _memory(root)
    gds_facts = source.gds_facts(volume(mounted, arrays))
    decision = path_choice.current(gds_facts)
    limits = ceilings(drives, gpus, nodes)
    host = _host(root, container)
    inspection = model.Inspection(
        tool_version=__version__,
        source="machine" if source.live else "recording",
        note=source.beside.note,
        host=host,
        drives=drives,
        health_note=health_note,
        disks=disks({Path(each.device).name: each.mount_point for each in mounted if each.device}, root),
        gpus=gpus,
        driver=model.Driver(version=version, open=is_open) if version else None,
        cuda=read_cuda(root),
        pcie=nodes,
        arrays=[_array(array, drives) for array in arrays],
        filesystems=[_with_space(each, source) for each in mounted],
        jobs=[model.JobScratch.model_validate(job) for job in source.jobs()],
        memory=memory,
        gds=model.Gds.model_validate(decision, from_attributes=True),
        settings=read_settings(drives, arrays, root),
        manifest=manifest,
        ceilings=limits,
        findings=[],
    )
    facts = Facts(
        inspection,
        manifest=manifest,
        manifest_problem=manifest_damage(root.rstrip("/") + MANIFEST_PATH) or "",
        occupied={drive.name: reason for drive in node_drives if (reason := reasons.get(drive.name))},
        looked=looked is not None,
        checks=judge_health(node_drives, _from(answers)) if answers else [],
        sys=Path(root, "sys/devices").is_dir(),
        udev=Path(root, "run/udev/data").is_dir(),
        nodes={kind: device_nodes(kind, root) for kind in ("nvme*", "nvidia[0-9]*", "nvidia-fs*")},
        cufile=gds_facts.config_path or "",
        cufile_problems=_cufile_problems(root, gds_facts),
        nvidia_fs=Path(root, "proc/driver/nvidia-fs/version").exists(),
        read_ahead={}
        if container
        else read_ahead([each.name for each in node_drives] + [each.device for each in arrays], root),
    )
    return inspection.model_copy(update={"findings": findings(facts)})


def _manifest(root: str) -> dict[str, Any] | None:
    try:
        return known_manifest(root.rstrip("/") + MANIFEST_PATH)
    except OSError:
        return None


def volume(mounted: Sequence[model.Filesystem], arrays: Sequence[Array]) -> str | None:
    """Mount point of the scratch volume, which is the first file system on an md array; None where there is none."""
    names = {array.path for array in arrays}
    return next((filesystem.mount_point for filesystem in mounted if filesystem.device in names), None)


def _with_space(filesystem: model.Filesystem, source: Source) -> model.Filesystem:
    size, free = source.space(filesystem.mount_point) or (None, None)
    return filesystem.model_copy(update={"size_bytes": size, "free_bytes": free})


def _cufile_problems(root: str, facts: GdsFacts) -> list[Problem]:
    if facts.config_path is None:
        return []
    text = read_text(root.rstrip("/") + facts.config_path)
    return check_config(text, facts.libcufile) if text is not None else []


Answer = Health | Silent | NotOffered


def _ask(drives: Sequence[Drive], source: Source) -> tuple[dict[str, Answer], str | None]:
    """The health log, or the error, by controller; and the reason where no drive could be asked."""
    answers: dict[str, Answer] = {}
    for controller in {drive.controller: None for drive in drives if drive.controller}:
        try:
            answers[controller] = source.health(controller)
        except Refused as error:
            return {}, str(error)
        except (Silent, NotOffered) as error:
            answers[controller] = error
        except ValueError as error:
            answers[controller] = Silent(str(error))
    return answers, None


def _from(answers: dict[str, Answer]) -> Reader:
    def reader(controller: str) -> Health:
        answer = answers.get(controller, NotOffered("no controller"))
        if isinstance(answer, Health):
            return answer
        raise answer

    return reader


def _drive(drive: Drive, arrays: Sequence[Array], answer: Answer | None, reason: str | None) -> model.Drive:
    member = next((array for array in arrays if drive.name in array.members), None)
    use = (member.name or member.device) if member else brief(reason)
    health = _health(drive, answer)
    return model.Drive.from_fields_of(drive, link=link_of(drive.link), health=health, use=use, data=member is not None)


def brief(reason: str | None) -> str:
    """What occupies the drive in brief: the mount point, the array, ``in use``, ``holds ext4``; or ``free``."""
    if reason is None:
        return "free"
    named = re.match(r"(?:mounted at|member of) `([^`]+)`", reason)
    return named.group(1) if named else re.split(r"[;:,]| \(| label `| UUID| at | nvme\d| `", reason)[0]


def _health(drive: Drive, answer: Answer | None) -> model.Health | None:
    if isinstance(answer, Silent):
        return model.Health(status="silent")
    if not isinstance(answer, Health):
        return None
    failed = {check.id for check in judge_health([drive], lambda _controller: answer) if check.status == FAIL}
    status: Literal["ok", "warning", "failing"] = (
        "failing" if failed & set(GRAVE_CHECKS) else "warning" if failed else "ok"
    )
    return model.Health.from_fields_of(answer, status=status)


def _is_data(drive: model.Drive, drives: Sequence[model.Drive]) -> bool:
    if any(other.data for other in drives):
        return drive.data
    return drive.use == "free" and drive.size_bytes > 0


def _array(array: Array, drives: Sequence[model.Drive]) -> model.Array:
    serials = {drive.name: drive.serial for drive in drives}
    members = [serials.get(member, member) if member else None for member in array.members]
    return model.Array.from_fields_of(array, members=members)


def filesystems(arrays: Sequence[Array], root: str) -> list[model.Filesystem]:
    """The mounted file systems of block devices, each once; that of an array also where only a directory of it is
    bind-mounted, as in a container.
    """
    by_number = {array.device_number: array for array in arrays}
    by_device: dict[str, model.Filesystem] = {}
    for mount in read_mounts(root):
        number, array = mount.device_number, by_number.get(mount.device_number)
        whole = mount.root == "/" or array is not None
        if number.startswith("0:") or number in by_device or not whole or mount.fs_type == "squashfs":
            continue
        stack = read_stack(mount.mount_point, root)
        geometry = BUILT.mounted_stripe(mount.options)
        aligned = None
        if array is not None and mount.fs_type == BUILT.type:
            aligned = geometry == (array.chunk_bytes, array.chunk_bytes * array.data_members)
        by_device[number] = model.Filesystem(
            mount_point=mount.mount_point,
            type=mount.fs_type,
            device=array.path if array else mount.source,
            medium=stack.medium,
            options=list(mount.options),
            stripe_unit_bytes=geometry[0] if geometry else None,
            stripe_width_bytes=geometry[1] if geometry else None,
            aligned=aligned,
        )
    return list(by_device.values())


def _memory(root: str) -> model.Memory:
    memory = read_memory(root)
    return model.Memory.from_fields_of(
        memory, hugepages=[model.HugePages.from_fields_of(pool.pages, free=pool.free) for pool in memory.pools]
    )


def _host(root: str, container: Container | None) -> model.Host:
    host = read_host(root)
    return model.Host.from_fields_of(
        host,
        numa=[model.NumaNode(node=node, cpus=cpus) for node, cpus in host.numa],
        container=container.runtime if container else None,
        container_evidence=container.evidence if container else None,
    )
