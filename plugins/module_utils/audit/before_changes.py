"""Every difference of a built node from what is asked, and every obstacle on any other, before anything is changed.

The roles act one after the other, and the first thing that cannot be done ends the run. So the first of them
compares everything: the owner reads every difference, or every obstacle, in one run.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, Callable, Mapping, Sequence

from ..array.drift import ANEW, Asked, array_differences, built_array, complete, of_volume
from ..array.drive_volumes import ALL, NUMA, groups_of
from ..array.initramfs_check import images, mdadm_conf_path, rebuild_command
from ..array.md_arrays import Array, Superblock, examine, read_arrays
from ..array.numa_volumes import array_name
from ..common.commands import CommandError, NotInstalled
from ..common.drift import Collector, Difference, Ledger, built_manifest
from ..common.files import content
from ..common.io_settings import ARGUMENTS as TUNING
from ..common.manifest import MANIFEST_PATH, built_members, each_volume
from ..common.raid_levels import BUILT_LEVELS, DEFAULT, data_members
from ..common.refusal import Refusal
from ..gds import apply as gds_apply
from ..machine.drive_contents import UnreadableDevice
from ..machine.drives import Drive, read_drives
from ..machine.file_system import BUILT
from ..machine.fstab import FSTAB, foreign_entry
from ..machine.writable import Later, unwritable
from ..memory import apply as memory_apply
from ..memory.apply import MemoryJob
from ..memory.limits import memory_problems
from ..tuning.apply import TuningJob
from ..units import UnitError
from ..volume import apply as volume_apply
from ..volume.apply import Volume, former_uuid
from ..volume.mount_point import MountPoint
from ..volume.several import Volumes
from ..volume.unit_dropins import UNITS_DIRECTORY
from ..volume.volume_values import volume_problems

WISHES: dict[str, Any] = {
    "type": "dict",
    "default": {},
    "options": {
        "filesystem": {"type": "dict", "options": volume_apply.WISHES},
        "memory": {"type": "dict", "options": memory_apply.ARGUMENTS},
        "tuning": {"type": "dict", "options": TUNING},
        "gds": {"type": "dict", "options": gds_apply.WISHES},
    },
}
"""A module's argument: what the modules after it in the play will be asked for."""


def overview(asked: Asked, wishes: Mapping[str, Any], root: str = "/") -> list[Difference]:
    """Every difference on a built node; none on any other, nor where its drives carry no array at all.

    Where mdadm cannot be asked what they carry and the kernel runs none of it, the array is unknown: one difference.

    ``wishes`` has what M(tunetool.node.scratch_filesystem) and M(tunetool.node.host_memory) will be asked for, as
    ``filesystem`` and ``memory``; either may be None.
    """
    manifest = built_manifest(root.rstrip("/") + MANIFEST_PATH)
    if manifest is None:
        return []
    drives = read_drives(root)
    if groups_of(manifest) != ALL:
        return _overview_of_several(manifest, asked, wishes, root)
    serials = {drive.name: drive.serial for drive in drives}
    arrays = read_arrays(root)
    superblocks, no_answer = {}, ""
    if not any(array.uuid == manifest["array"]["uuid"] for array in arrays):
        try:
            superblocks = examine([drive.name for drive in drives])
        except CommandError as error:
            no_answer = str(error)
    array = built_array(manifest, arrays, superblocks, serials)
    if array is None:
        return [_unknown_array(manifest, no_answer)] if no_answer else []
    differences = array_differences(manifest, asked, arrays, superblocks, serials, root)
    volume, memory = wishes.get("filesystem"), wishes.get("memory")
    if volume and array.device and complete(array):
        # Compare the file system with the present array: otherwise one wrong chunk would be reported three times.
        wanted = dict(volume, array=array.name, chunk_bytes=array.chunk_bytes, members=array.data_members)
        differences += _look(manifest, "filesystem", lambda ledger: Volume(wanted, ledger, array, root).all())
    if memory:
        differences += _look(manifest, "memory", lambda ledger: MemoryJob(memory, ledger, root).all())
    return differences


def _overview_of_several(
    manifest: Mapping[str, Any], asked: Asked, wishes: Mapping[str, Any], root: str
) -> list[Difference]:
    built = [member["serial"] for member in built_members(manifest)]
    drives, arrays = read_drives(root), read_arrays(root)
    present = {drive.serial for drive in drives}
    absent = [serial for serial in built if serial not in present]
    of_md = groups_of(manifest) == NUMA
    differences = []
    parts = [
        "%s %s" % (word, ", ".join("`%s`" % serial for serial in some))
        for word, some in (
            # Of an array its own difference has it.
            ("absent:", [] if of_md else absent),
            ("asked for and without a volume:", [serial for serial in asked.members if serial not in built]),
            ("with a volume and not asked for:", sorted(set(built) & present - set(asked.members or built))),
        )
        if some
    ]
    if parts or asked.count != len(built):
        found = "; ".join(["%d" % len(built), *parts])
        hint = BUILT_LEVELS[asked.level].remedy if parts else "ask for these %d, or %s" % (len(built), ANEW)
        expected = "%d %s by serial" % (asked.count, "members" if of_md else "volumes")
        differences.append(Difference("array.members", expected, found, False, hint))
    if of_md:
        differences += _overview_of_arrays(manifest, asked, drives, arrays, root)
    volume, memory = wishes.get("filesystem"), wishes.get("memory")
    if volume and not parts and not absent:
        whole = {array.uuid for array in arrays if complete(array)}
        parts_of = [
            # What is on an array that is not assembled yet is compared once it is.
            {"name": name, "array": each["array"], "later": of_md and each["array"]["uuid"] not in whole}
            for name, each in each_volume(manifest)
        ]
        wanted = dict(volume, volumes=parts_of)
        differences += _look(manifest, "filesystem", lambda ledger: Volumes(wanted, ledger, root).all())
    if memory:
        differences += _look(manifest, "memory", lambda ledger: MemoryJob(memory, ledger, root).all())
    return differences


def _overview_of_arrays(
    manifest: Mapping[str, Any], asked: Asked, drives: Sequence[Drive], arrays: Sequence[Array], root: str
) -> list[Difference]:
    """What differs of the arrays of several volumes, each with its volume's name."""
    serials = {drive.name: drive.serial for drive in drives}
    running = {array.uuid for array in arrays}
    superblocks: dict[str, Superblock] = {}
    differences: list[Difference] = []
    volumes = each_volume(manifest)
    try:
        if not all(volume["array"]["uuid"] in running for _, volume in volumes):
            superblocks = examine([drive.name for drive in drives])
    except CommandError as error:
        unknown = [(name, _unknown_array(volume, str(error))) for name, volume in volumes]
        return [difference for name, each in unknown for difference in of_volume([each], name)]
    for name, volume in volumes:
        members = tuple(member["serial"] for member in volume["array"]["members"])
        own = replace(asked, name=array_name(asked.name, name), members=members, count=len(members), volume=name)
        differences += of_volume(array_differences(volume, own, arrays, superblocks, serials, root), name)
    return differences


def _unknown_array(manifest: Mapping[str, Any], no_answer: str) -> Difference:
    built = manifest["array"]
    return Difference(
        "array",
        "array `%s` UUID %s" % (built["name"], built["uuid"]),
        "no answer: %s" % no_answer,
        mended=False,
        hint="`mdadm --examine` must answer for the drives: `tunetool provision -- --tags packages` installs "
        "it where it is missing",
    )


def in_the_way(mount_point: str, root: str = "/") -> str | None:
    """The fstab entry of something else at the volume's mount point; checked before any drive is touched."""
    ours = ["UUID=%s" % uuid for uuid in former_uuid(root)]
    return foreign_entry(content(root.rstrip("/") + FSTAB), mount_point, ours)


def not_writable(root: str = "/") -> list[str]:
    """Why a build could not write after its drives what the next boot needs, a line for each cause with its cure."""
    later = [Later(path) for path in (mdadm_conf_path(root), FSTAB, MANIFEST_PATH, UNITS_DIRECTORY + "/tunetool")]
    present = [path for path in images(root) if os.path.isfile(path)] if rebuild_command(root) is not None else []
    sizes = [os.path.getsize(path) for path in present]
    if sizes:
        # The tools write an image beside the old one, one after the other, and collect its files in /var/tmp.
        later += [Later("/boot/initrd", max(sizes)), Later("/var/tmp/initrd", max(sizes))]
    return unwritable(later, root)


def obstacles(
    mount_point: str,
    wishes: Mapping[str, Any],
    serials: Sequence[str] = (),
    array: Array | None = None,
    root: str = "/",
    removed: bool = False,
    level: str = DEFAULT,
    volumes: Sequence[Mapping[str, Any]] = (),
) -> list[str]:
    """Everything that would stop a build after its first write, a line each with its hint.

    ``wishes`` is as for ``overview``, with ``tuning`` for M(tunetool.node.io_tuning), and with ``gds`` (``mode``,
    ``packages``, ``cufile``) for M(tunetool.node.gpudirect_storage). ``serials``: the drives that are
    chosen, for an array of this ``level``; ``array``: the running array over them, if it is to be kept; ``removed``:
    the volume that is there now is gone by then; ``volumes``: those of a node that has several.
    """
    found = Collector()
    found.refusals += not_writable(root)
    volume, memory, tuning = (wishes.get(name) for name in ("filesystem", "memory", "tuning"))
    invalid: list[str] = []
    if volume:
        invalid = volume_problems(
            volume, BUILT.geometry(volume["chunk_bytes"], data_members(level, len(serials))).log_su_bytes
        )
    found.refusals += invalid
    if volumes:
        _obstacles_of_several(found, mount_point, None if invalid else volume, volumes, root)
    elif not invalid:
        _volume_obstacles(found, mount_point, volume, array, root, removed)
    if memory:
        _memory_obstacles(found, memory, root)
    gds = wishes.get("gds")
    if gds:
        names = tuple(drive.name for drive in read_drives(root) if drive.serial in serials)
        _collect(found, lambda: found.refusals.extend(gds_apply.early_refusals(gds, names, root, level)))
    if tuning and serials:
        asked = dict(tuning, serials=list(serials), array_uuid="", volumes=volumes)
        _collect(found, lambda: TuningJob(asked, found, root).all())
    return list(dict.fromkeys(found.refusals))


def _volume_obstacles(
    found: Collector,
    mount_point: str,
    wanted: Mapping[str, Any] | None,
    array: Array | None,
    root: str,
    removed: bool,
) -> None:
    if array is not None:
        if wanted:
            present = dict(wanted, array=array.name, chunk_bytes=array.chunk_bytes, members=array.data_members)
            _collect(found, lambda: Volume(present, found, array, root).all())
        return
    if not mount_point:
        return
    entry = in_the_way(mount_point, root)
    if entry:
        found.refusals.append("%s. hint: remove that line, or choose another `scratch_filesystem_mount_point`" % entry)
    if not wanted and not removed:
        point = MountPoint({"mount_point": mount_point, "protect_mount_point": False}, found, None, root)
        _collect(found, point.bare_mount_point)
    if not wanted:
        return
    volume = Volume(wanted, found, None, root)
    steps: list[Callable[[], object]] = [lambda: volume.late(None), volume.services, volume.offload]
    if not removed:
        steps.insert(0, volume.bare_mount_point)
    if not entry and not removed:
        steps.append(lambda: volume.remember(None))
    for step in steps:
        _collect(found, step)


def _obstacles_of_several(
    found: Collector,
    mount_point: str,
    wanted: Mapping[str, Any] | None,
    volumes: Sequence[Mapping[str, Any]],
    root: str,
) -> None:
    if not wanted or not mount_point:
        return
    several = Volumes(dict(wanted, volumes=volumes), found, root)
    _collect(found, several.around)
    for each in volumes:
        if each.get("left"):
            continue
        volume = several.volume(each)
        if volume.array is None and not each["new"]:
            continue  # what is on an array, and so which line in fstab is its own, is known once it is assembled
        _volume_obstacles(found, volume.point, volume.wanted, None if each["new"] else volume.array, root, False)


def _memory_obstacles(found: Collector, wanted: Mapping[str, Any], root: str) -> None:
    problems = memory_problems(wanted)
    if problems:
        found.refusals += problems
        return
    job = MemoryJob(wanted, found, root)
    steps: list[Callable[[], object]] = [job.hugepages, job.shm, job.memlock]
    for step in steps:
        _collect(found, step)


def _collect(found: Collector, step: Callable[[], object]) -> None:
    try:
        step()
    except NotInstalled:
        pass  # role node_packages comes later
    except (Refusal, CommandError, UnreadableDevice, UnitError, ValueError) as error:
        found.refusals += str(error).splitlines()


def _look(manifest: Mapping[str, Any], name: str, work: Callable[[Ledger], object]) -> list[Difference]:
    ledger = Ledger(manifest, acting=False)
    try:
        work(ledger)
    except (Refusal, CommandError, UnreadableDevice, UnitError, ValueError) as error:
        text, _, hint = str(error).partition(". hint: ")
        ledger.cannot(name, "as asked", text, hint or "look at the node first", "")
    return ledger.differences
