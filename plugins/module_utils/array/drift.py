"""Drift of the array: what its manifest and the inventory expect of it, against what the drives carry."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any, Mapping, Sequence

from ..common.drift import Difference, lines_only_in
from ..common.files import content
from ..common.raid_levels import LEVELS
from ..units import format_size_binary
from .drive_volumes import groups_of
from .initramfs_check import judge_images, mdadm_conf_path, rebuild_command
from .md_arrays import LET_GO, Array, Superblock, cure_of, find
from .mdadm_conf import conf_with_array

ANEW = "save the data, `ansible-playbook tunetool.node.teardown`, then `tunetool provision`; or ask for what is there"

GIVE_UP = (
    "`ansible-playbook tunetool.node.teardown --tags plan -e plan_file=plan.json` shows what giving the array up loses"
)


def layout_difference(manifest: Mapping[str, Any], groups: str) -> Difference | None:
    """The difference where a node was built with other volumes than one for all its drives, or for each, as asked."""
    built = groups_of(manifest)
    if built == groups:
        return None
    hint = "what is one volume of the drives cannot be changed in place: " + ANEW
    return Difference("array.groups", groups, built, mended=False, hint=hint)


def of_volume(differences: Sequence[Difference], name: str) -> list[Difference]:
    """Differences of the array of one of several volumes, which their names say."""
    return [replace(each, name="%s[%s]" % (each.name, name)) for each in differences]


@dataclass(frozen=True)
class Asked:
    """The array that the inventory asks for, by serial."""

    name: str
    level: str
    chunk_bytes: int
    members: tuple[str, ...]
    """Serial numbers of the members; empty if the present drives do not make a valid selection."""
    count: int
    adopt: bool = False
    volume: str = ""
    """The name of the volume on it, where it is one of several: such a one is not adopted."""


def built_array(
    manifest: Mapping[str, Any],
    arrays: Sequence[Array],
    superblocks: Mapping[str, Superblock],
    serials: Mapping[str, str],
) -> Array | None:
    """The manifest's array, assembled or not; otherwise the present one over its drives, or None.

    ``serials`` are the drives' by kernel name.
    """
    uuid = manifest["array"]["uuid"]
    known = {member["serial"] for member in manifest["array"]["members"]}
    emptied = next((array for array in arrays if array.was(uuid)), None)
    if emptied is not None:
        # Also where its drives are back: it stands in their way.
        return emptied
    pieces = [*arrays, *_unassembled(arrays, superblocks)]
    same = find(pieces, uuid)
    if same is not None:
        return same
    over = (piece for piece in pieces if {serials.get(name or "") for name in piece.members} & known)
    return next(over, None)


def _unassembled(arrays: Sequence[Array], superblocks: Mapping[str, Superblock]) -> list[Array]:
    """Arrays on the drives that the kernel does not run."""
    running = {array.uuid for array in arrays}
    differences = []
    for uuid in sorted({block.uuid for block in superblocks.values()} - running):
        blocks = [block for block in superblocks.values() if block.uuid == uuid]
        roles = {block.role: block.device for block in blocks}
        first = blocks[0]
        members = tuple(roles.get(slot) for slot in range(first.raid_disks))
        differences.append(
            Array("", uuid, first.name, first.level, first.chunk_bytes, first.raid_disks, "inactive", members)
        )
    return differences


def complete(array: Array) -> bool:
    """Whether every member is present."""
    return bool(array.members) and None not in array.members


def compare_array(
    manifest: Mapping[str, Any], asked: Asked, array: Array, serials: Mapping[str, str]
) -> list[Difference]:
    """Each difference of the array, those that can be mended (it is assembled) and those that cannot."""
    left = []

    def cannot(name: str, expected: str, found: str, hint: str) -> None:
        if expected != found:
            left.append(Difference(name, expected, found, mended=False, hint=hint))

    if array.uuid != manifest["array"]["uuid"]:
        left.append(
            Difference(
                "array.uuid",
                manifest["array"]["uuid"],
                str(array.uuid),
                asked.adopt,
                "" if asked.adopt else "somebody made it again. " + _taken(manifest["array"], array, asked.volume),
            )
        )
    if not asked.adopt:
        cannot("array.name", asked.name, str(array.name), name_hint(asked.name, str(array.name), asked.volume))
    cannot("array.level", asked.level, array.level, ANEW)
    cannot("array.chunk", format_size_binary(asked.chunk_bytes), format_size_binary(array.chunk_bytes), ANEW)
    left += _members(manifest, asked, array, serials)
    cure = cure_of(array.state, array.level)
    if array.device and array.empty:
        cannot("array.state", "active", "without any of its drives", LET_GO % array.path)
    elif array.device and cure and array.state != "inactive":
        cannot("array.state", "active", array.state, cure)
    if (not array.device or array.state == "inactive") and complete(array):
        left.append(Difference("array.assembled", "array `%s`" % array.name, "not assembled"))
    return left


def _taken(built: Mapping[str, Any], array: Array, volume: str) -> str:
    """How an array that somebody made again becomes the node's, with what it holds."""
    if not volume:
        return "`raid_array_adopt: true` takes it as it is, with what it holds"
    stop = "unmount it, `mdadm --stop %s`, then " % array.path if array.device else ""
    return (
        "%s`mdadm --assemble /dev/md/%s --update=uuid --uuid=%s` with its drives gives it the UUID that is noted, and "
        "keeps what it holds" % (stop, built["name"], built["uuid"])
    )


def name_hint(wanted: str, found: str, volume: str = "") -> str:
    """The setting that asks for an array of this name, or what gives it the one that is asked for. ``volume``: its,
    where it is one of several, by which their names end."""
    end = "_" + volume if volume else ""
    if found.endswith(end):
        return "`raid_array_name: %s` asks for what is there" % found[: len(found) - len(end)]
    rename = "mdadm --assemble /dev/md/%s --update=name --name=%s" % (wanted, wanted)
    return "unmount it, `mdadm --stop` it, then `%s` with its drives renames it" % rename


def _members(manifest: Mapping[str, Any], asked: Asked, array: Array, serials: Mapping[str, str]) -> list[Difference]:
    present = {serials[name] for name in array.members if name is not None and name in serials}
    built = [member["serial"] for member in manifest["array"]["members"]]
    parts = ["%d of %d members" % (len(present), array.raid_disks)]
    for word, some in (
        ("missing", [serial for serial in built if serial not in present]),
        ("not the manifest's", sorted(present - set(built))),
        ("asked for and no member", [serial for serial in asked.members if serial not in {*present, *built}]),
        ("member and not asked for", sorted(present - set(asked.members)) if asked.members else []),
    ):
        if some:
            parts.append("%s: %s" % (word, ", ".join("`%s`" % serial for serial in some)))
    if len(parts) == 1 and array.raid_disks == asked.count == len(present):
        return []
    hint = (
        LEVELS[asked.level].remedy
        if len(present) < array.raid_disks
        else "a %s keeps its members: ask for these %d, or %s" % (LEVELS[asked.level], array.raid_disks, ANEW)
    )
    expected = "%d members by serial" % asked.count
    # An adopted array may have other drives; it suffices that it has the requested number, all present.
    if asked.adopt and len(present) == array.raid_disks == asked.count and set(asked.members) == present:
        return [Difference("array.members", expected, "; ".join(parts))]
    return [Difference("array.members", expected, "; ".join(parts), mended=False, hint=hint)]


def compare_memory_of_it(name: str, uuid: str, root: str = "/") -> list[Difference]:
    """Differences of mdadm.conf and the images, which decide the array at the next boot."""
    conf = mdadm_conf_path(root)
    before = content(os.path.join(root, conf.lstrip("/")))
    after = conf_with_array(before, name, uuid)
    differences = []
    if after != before:
        differences.append(Difference("mdadm.conf", lines_only_in(after, before), lines_only_in(before, after)))
    stale = [image for image in judge_images(conf, root, changed=after != before) if image.problem]
    if stale and rebuild_command(root) is not None:
        differences.append(Difference("initramfs", "the arrays of mdadm.conf", "; ".join(map(str, stale))))
    return differences


def array_differences(
    manifest: Mapping[str, Any],
    asked: Asked,
    arrays: Sequence[Array],
    superblocks: Mapping[str, Superblock],
    serials: Mapping[str, str],
    root: str = "/",
) -> list[Difference]:
    """Every difference of the array and of its boot configuration; none if the drives carry no array."""
    array = built_array(manifest, arrays, superblocks, serials)
    if array is None:
        return []
    differences = compare_array(manifest, asked, array, serials)
    ours = array.uuid == manifest["array"]["uuid"] or asked.adopt
    name = str(array.name) if asked.adopt else asked.name
    return differences + compare_memory_of_it(name, str(array.uuid) if ours else manifest["array"]["uuid"], root)
