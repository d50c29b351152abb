"""Volumes of the drives of each NUMA node: which drives are one array, what it is called, and what stands against it.

A group is made once, by what sysfs says of the drives then. From that on its serials are its members: a drive that is
put into another node's slot stays in its array.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Collection, Iterable, Mapping, Sequence

from ..common.check_result import PASS, Check
from ..common.drift import Difference
from ..common.raid_levels import DEFAULT
from ..machine.drives import Drive
from .create import drawn_uuid
from .drive_volumes import AnyVolume, ArrayVolume, by_serial_of, in_order
from .md_arrays import Superblock

CHECK_ID = "array.numa"
_AT_HOME = "all drives on the NUMA node of its name"
_VOLUME = re.compile(r"numa(\d{1,4})")


def array_name(name: str, volume: str) -> str:
    """What the array of a volume is called; ``name``: `raid_array_name`."""
    return "%s_%s" % (name, volume)


@dataclass(frozen=True)
class Grouped:
    """The volumes of the chosen drives, and why they cannot be."""

    volumes: tuple[ArrayVolume, ...]
    problems: tuple[str, ...] = ()
    """A line each, with its hint."""

    def __str__(self) -> str:
        each = ", ".join("`%s` %d" % (volume.name, len(volume.serials)) for volume in self.volumes)
        if len(self.volumes) == 1:
            return "all drives are on one NUMA node, so there is one volume: %s" % each
        uneven = len({len(volume.serials) for volume in self.volumes}) > 1
        return "drives of each volume%s: %s" % (", not the same number everywhere" if uneven else "", each)


def grouped(
    drives: Sequence[Drive], known: Mapping[str, AnyVolume], kept: Collection[str], name: str, chunk_bytes: int
) -> Grouped:
    """A volume for each NUMA node that has some of the chosen ``drives``, in slot order.

    ``known``: volumes that were made or begun, by serial. One of which any drive is ``kept`` stays as it is, and one
    that was only begun keeps its drives if all are chosen. ``kept``: serials of the drives that carry their volume's
    label. The UUIDs of other volumes are drawn here.
    """
    chosen = {drive.serial for drive in drives}
    stay: list[ArrayVolume] = []
    problems = []
    for volume in in_order(known):
        if not isinstance(volume, ArrayVolume):
            continue
        gone = [serial for serial in volume.serials if serial not in chosen]
        if set(volume.serials) & chosen & set(kept):
            stay.append(volume)
            if gone:
                problems.append(
                    "volume `%s` also has %s, not chosen or not there. hint: put back what is missing, and ask for "
                    "all of its drives; one that is lost takes the volume with it: `ansible-playbook "
                    "tunetool.node.replace_drive` makes that anew" % (volume.name, _named(gone))
                )
        elif not gone:
            stay.append(replace(volume, array=array_name(name, volume.name), chunk_bytes=chunk_bytes))
    taken = by_serial_of(stay)
    rest = [drive for drive in drives if drive.serial not in taken]
    nowhere = [drive.serial for drive in rest if drive.numa_node is None]
    if nowhere:
        problems.append(
            "%s: the firmware names no NUMA node, so `raid_array_groups: numa` has no place for it. hint: "
            "`raid_array_groups: all`" % _named(nowhere)
        )
    volumes = list(stay)
    for node in sorted({drive.numa_node for drive in rest if drive.numa_node is not None}):
        of_node = "numa%d" % node
        serials = tuple(drive.serial for drive in rest if drive.numa_node == node)
        if any(each.name == of_node for each in stay):
            problems.append(
                "volume `%s` was made without %s, of the same NUMA node. hint: ask for the drives that it has, or use "
                "slots of another node" % (of_node, _named(serials))
            )
            continue
        volumes.append(ArrayVolume(of_node, serials, drawn_uuid(), array_name(name, of_node), DEFAULT, chunk_bytes))
    return Grouped(tuple(sorted(volumes, key=lambda each: (len(each.name), each.name))), tuple(problems))


def found_volumes(superblocks: Mapping[str, Superblock], serials: Mapping[str, str], name: str) -> dict[str, AnyVolume]:
    """Whole arrays with names of ours, by serial: those of an earlier system, of which nothing is noted on this one.

    ``superblocks`` by the drives' kernel names, ``serials`` too. One of two arrays of the same name is none.
    """
    arrays: dict[str, list[Superblock]] = {}
    for block in superblocks.values():
        if block.name.startswith(name + "_") and _VOLUME.fullmatch(block.name[len(name) + 1 :]):
            arrays.setdefault(block.uuid, []).append(block)
    names = [blocks[0].name for blocks in arrays.values()]
    volumes = []
    for uuid, blocks in arrays.items():
        roles = {block.role: serials.get(block.device, "") for block in blocks}
        first = blocks[0]
        whole = set(roles) == set(range(first.raid_disks)) and len(blocks) == first.raid_disks and all(roles.values())
        if whole and names.count(first.name) == 1:
            volumes.append(
                ArrayVolume(
                    first.name[len(name) + 1 :],
                    tuple(roles[slot] for slot in range(first.raid_disks)),
                    uuid,
                    first.name,
                    first.level,
                    first.chunk_bytes,
                )
            )
    return by_serial_of(volumes)


def belongs(numa_node: int | None, volume: AnyVolume) -> bool:
    """Whether a drive on this NUMA node is where the volume's name says."""
    match = _VOLUME.fullmatch(volume.name)
    return match is None or numa_node == int(match.group(1))


def moved(volumes: Sequence[AnyVolume], nodes: Mapping[str, int | None]) -> list[Difference]:
    """Drives in a slot of another NUMA node than their volume's. The data is whole: only its way is longer.

    ``nodes``: the NUMA node of each drive that is there, by serial; None where the firmware names none.
    """
    hint = "nothing is rebuilt, since the array keeps its drives; put them back into slots of that node"
    differences = []
    for volume in volumes:
        away = [
            "`%s` %s" % (serial, "on an unknown one" if nodes[serial] is None else "on %s" % nodes[serial])
            for serial in volume.serials
            if serial in nodes and not belongs(nodes[serial], volume)
        ]
        if away:
            name = "%s[%s]" % (CHECK_ID, volume.name)
            differences.append(Difference(name, _AT_HOME, ", ".join(away), False, hint))
    return differences


def check_numa(volume: AnyVolume, drives: Iterable[Drive]) -> Check:
    """The same as a check, which passes with a remedy: the node keeps its data, and works. ``drives``: those there."""
    for away in moved([volume], {drive.serial: drive.numa_node for drive in drives}):
        return Check(CHECK_ID, PASS, away.expected, away.found, away.hint)
    return Check(CHECK_ID, PASS, _AT_HOME, "all of those that are there")


def is_of_numa_node(volume: AnyVolume) -> bool:
    """Whether the volume has the drives of a NUMA node."""
    return _VOLUME.fullmatch(volume.name) is not None


def _named(serials: Sequence[str]) -> str:
    return ", ".join("`%s`" % serial for serial in serials)
