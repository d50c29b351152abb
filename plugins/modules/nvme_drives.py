#!/usr/bin/python
# Copyright: the tunetool authors
# Apache License 2.0 (see LICENSE)
"""Ansible module: choose the NVMe drives that become members, and say why for every drive."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: nvme_drives
short_description: Choose NVMe drives by model, size, transport and count, refusing all that are in use
version_added: "0.1.0"
description:
  - Reads every NVMe namespace of the node and decides for each whether it becomes a member of the scratch array.
  - A drive is refused when it is mounted, is swap, has partitions or holders, or carries any signature that
    libblkid knows (file system, partition table, RAID, LVM, ZFS, LUKS). Members of the array of O(array) are kept.
  - A drive without any signature is refused when it carries a btrfs or XFS whose first superblock is gone, or when a
    block in its first or last MiB, or one of some thousand blocks between, is neither zeros nor a pattern of discarded
    blocks. Data elsewhere on it is not seen.
  - Where each NUMA node has an array (C(groups=numa)), a drive of which sysfs names no node is refused, and so is one
    that the array of its node was made without.
  - Fails with a table of all drives unless exactly C(count) alike drives are usable. Never changes anything.
  - Refuses drives with metadata bytes, or with another logical block than the rest, and prints the C(nvme format) line
    that would mend them. Never runs that line.
  - With O(plan) it does not fail because of a drive, and returns what a plan file would have to allow.
  - Fails before anything else on a node whose manifest was written by a newer version.
options:
  array:
    description:
      - The variables of the role P(tunetool.node.raid_array#role) without its name; C(name) is required. Members of an
        array of that name count as ours.
      - With C(adopt), members of an array of another name are selected if its level, chunk and member count are as
        asked.
    type: dict
    required: true
  settings:
    description:
      - The variables of the role P(tunetool.node.nvme_drives#role) without its name; C(count) is required.
    type: dict
    required: true
  plan:
    description: Return the host's part of a plan instead of failing; see RV(plan).
    type: bool
    default: false
  mount_point:
    description:
      - Where the volume will be mounted. A node whose array would be made is refused before a drive is touched if its
        C(/etc/fstab) mounts something else there, if something is mounted there, or if the directory holds files.
    type: path
  wishes:
    description:
      - What M(tunetool.node.scratch_filesystem), M(tunetool.node.host_memory) and M(tunetool.node.io_tuning) will be
        asked for, their options as C(filesystem), C(memory) and C(tuning); and as C(gds) the path (C(mode)), the
        C(packages) and the settings (C(cufile)) of GPUDirect Storage. With them, a built node is compared as a
        whole. When one difference cannot be mended, the module reports all of them and nothing is changed.
      - A node that is to be built is refused with a list of everything that would stop its build later, such as a
        user that does not exist, more huge pages than the RAM allows, a scheduler that its kernel does not offer, or a
        required path of GPUDirect Storage that is not possible there.
    type: dict
    default: {}
extends_documentation_fragment:
  - tunetool.node.wipes
  - tunetool.node.read_only
author:
  - The tunetool authors (@tunetool)
"""

EXAMPLES = r"""
- name: Choose eight 3.84 TB drives
  tunetool.node.nvme_drives:
    array:
      name: nvme_raid0
    settings:
      count: 8
      size: 3.84TB
      transport: pcie
  register: nvme_drives_result
"""

RETURN = r"""
selected:
  description: The members, by PCI address.
  returned: success
  type: list
  elements: dict
wipes:
  description: Those of O(wipes) that this run needs, for M(tunetool.node.raid_array).
  returned: success
  type: list
  elements: dict
boot_unit:
  description: Whether anything of M(tunetool.node.ephemeral_unit) is on the node.
  returned: success, without O(plan)
  type: bool
health_check:
  description: Whether anything of M(tunetool.node.node_health) is on the node.
  returned: success, without O(plan)
  type: bool
job_scratch:
  description: Whether anything of M(tunetool.node.job_scratch) is on the node.
  returned: success, without O(plan)
  type: bool
gds:
  description: Whether there are NVIDIA GPUs (C(gpus)), and anything of M(tunetool.node.gpudirect_storage) (C(traces)).
  returned: success, without O(plan)
  type: dict
tuned:
  description: Whether anything of M(tunetool.node.io_tuning) is on the node.
  returned: success, without O(plan)
  type: bool
plan:
  description: The host's part of a plan file.
  returned: when O(plan)
  type: dict
decisions:
  description: Every NVMe drive with its verdict (take, keep, adopt, wipe, refuse, ignore) and the reason.
  returned: always
  type: list
  elements: dict
differences:
  description:
    - On a built node whose drives, array, volume and memory cannot all be brought to what is asked, everything that is
      not as asked. See M(tunetool.node.raid_array).
  returned: failure
  type: list
  elements: dict
table:
  description: The decisions as a table in text.
  returned: always
  type: str
"""

from dataclasses import dataclass, replace  # noqa: E402  (Ansible wants the documentation first)
from typing import Any, Mapping, Sequence  # noqa: E402

from ..module_utils.array.adopt_or_wipe import (  # noqa: E402
    Consent,
    Foreign,
    array_mates,
    cut_off,
    is_foreign,
)
from ..module_utils.array.create import begun  # noqa: E402
from ..module_utils.array.drift import GIVE_UP, Asked, complete, layout_difference  # noqa: E402
from ..module_utils.array.drive_decisions import (  # noqa: E402
    ADOPT,
    ARRAY,
    DRIVES,
    KEEP,
    TAKE,
    WIPE,
    Criteria,
    Decision,
    chunk_problem,
    criteria_of,
    drives_problems,
    groups_problem,
    name_problem,
    shown_size,
    table,
    wipeable,
)
from ..module_utils.array.drive_selection import Selection, select  # noqa: E402
from ..module_utils.array.drive_volumes import (  # noqa: E402
    ALL,
    DRIVE,
    NUMA,
    AnyVolume,
    ArrayVolume,
    groups_of,
    in_order,
    known_volumes,
    left_alone,
    named,
    part_left_alone,
    standing,
)
from ..module_utils.array.md_arrays import Wanted, adopted, decide, examine, read_arrays  # noqa: E402
from ..module_utils.array.numa_volumes import found_volumes, grouped, moved  # noqa: E402
from ..module_utils.audit.before_changes import WISHES, obstacles, overview  # noqa: E402
from ..module_utils.common.commands import CommandError  # noqa: E402
from ..module_utils.common.drift import Drifted, as_results, built_manifest  # noqa: E402
from ..module_utils.common.files import read_text  # noqa: E402
from ..module_utils.common.manifest import MANIFEST_PATH  # noqa: E402
from ..module_utils.common.raid_levels import BUILT_LEVELS, LEVELS, RAID0, SINGLE, canonical, data_members  # noqa: E402
from ..module_utils.ephemeral import boot_unit  # noqa: E402
from ..module_utils.ephemeral.boot_decision import BEGUN_PATH  # noqa: E402
from ..module_utils.gds import apply as gds_apply  # noqa: E402
from ..module_utils.gds.facts import read_gpus  # noqa: E402
from ..module_utils.health import health_units  # noqa: E402
from ..module_utils.job_scratch import scratch_units  # noqa: E402
from ..module_utils.machine.drive_contents import (  # noqa: E402
    RAID_MEMBER,
    Contents,
    UnreadableDevice,
    contents_hash,
    devices_of,
    plain_uuid,
    read_contents,
    read_signatures,
)
from ..module_utils.machine.drives import Drive, disks_under, read_drives  # noqa: E402
from ..module_utils.machine.nvme_admin import Formats, try_formats, with_capacity  # noqa: E402
from ..module_utils.plan.plan_file import host_part  # noqa: E402
from ..module_utils.play.convergence import READING, AnsibleModule, in_one_line, look_at_earlier_manifest  # noqa: E402
from ..module_utils.removal.wipe_drives import WIPES  # noqa: E402
from ..module_utils.tuning.persistent_files import anything_of_ours  # noqa: E402
from ..module_utils.units import parse_size  # noqa: E402


def foreign_arrays(drives: list[Drive], contents: Contents, array_name: str) -> tuple[Foreign, ...]:
    """Arrays that are not ours and whose members are whole drives; from their superblocks, else from sysfs."""
    arrays: dict[str, Foreign] = {}
    for array in read_arrays():
        if array.uuid and array.name:
            uuid = plain_uuid(array.uuid)
            arrays[uuid] = Foreign(uuid, array.name, array.level, array.chunk_bytes, array.raid_disks)
    members = [
        drive.name
        for drive in drives
        for signature in contents.get(drive.name, ())
        if signature.type == RAID_MEMBER
        and signature.device == drive.name
        and not ((signature.label or "").split(":")[-1] == array_name and plain_uuid(signature.uuid) in arrays)
    ]
    try:
        superblocks = examine(members)
    except CommandError:
        # The node has no mdadm yet. No drive is taken for that reason: these drives hold something, and are refused.
        superblocks = {}
    for block in superblocks.values():
        uuid = plain_uuid(block.uuid)
        arrays[uuid] = Foreign(uuid, block.name, block.level, block.chunk_bytes, block.raid_disks, block.version)
    built = built_manifest()
    ours = built["array"]["uuid"] if built and groups_of(built) == ALL else None
    return tuple(array for array in arrays.values() if is_foreign(array, array_name, ours))


def cut_off_arrays(contents: Contents, array_name: str, level: str, count: int, unmade: str = "") -> dict[str, str]:
    """Arrays of ours whose creation was cut off, with what to say of each; see ``cut_off``."""
    carriers: dict[str, list[str]] = {}
    for name, signatures in contents.items():
        for signature in signatures:
            label = (signature.label or "").split(":")[-1]
            if signature.type == RAID_MEMBER and signature.device == name and label == array_name:
                carriers.setdefault(plain_uuid(signature.uuid), []).append(name)
    # Of each array apart: an old drive, whose array had the same name, need not be pulled.
    members = [name for names in carriers.values() if len(names) < count for name in names]
    if not array_name or not members:
        return {}
    try:
        superblocks = examine(members)
    except CommandError:
        return {}
    # Also of a manifest that is damaged: what it names was built. Not where a boot had begun to make it again.
    known = (read_text(MANIFEST_PATH) or "").replace(read_text(BEGUN_PATH) or "-", "")
    return cut_off(array_name, count, superblocks, read_arrays(), known, level, unmade=unmade)


def several_known(drives: list[Drive], contents: Contents, array: Mapping[str, Any]) -> dict[str, AnyVolume]:
    """Volumes that are there or were begun, by serial, where several are asked for."""
    if array["groups"] == ALL:
        return {}
    known = known_volumes(groups=array["groups"])
    if known or array["groups"] == DRIVE:
        return known
    serials = {drive.name: drive.serial for drive in drives}
    try:
        return found_volumes(examine(_labelled(contents)), serials, array["name"])
    except CommandError:
        return {}  # their drives hold something, and are refused


def _labelled(contents: Contents) -> list[str]:
    """The drives that carry the label of an array's member."""
    return [
        name
        for name, signatures in contents.items()
        for signature in signatures
        if signature.type == RAID_MEMBER and signature.device == name
    ]


def cut_off_volumes(drives: list[Drive], contents: Contents, known: Mapping[str, AnyVolume]) -> dict[str, str]:
    """As ``cut_off_arrays``, of the arrays of several volumes."""
    found = {}
    present = {drive.serial for drive in drives}
    for volume in in_order(known):
        if isinstance(volume, ArrayVolume):
            noted = begun(volume=volume.name)
            ours = noted is not None and not noted.made and plain_uuid(noted.uuid) == plain_uuid(volume.uuid)
            # One of which a drive is away may have been whole, and somebody's since.
            unmade = volume.uuid if ours and present.issuperset(volume.serials) else ""
            found.update(cut_off_arrays(contents, volume.array, volume.level, len(volume.serials), unmade))
    return found


def hashes_of(drives: list[Drive], contents: Contents, unreadable: dict[str, str]) -> dict[str, str]:
    """Hashes of the readable idle drives that hold something."""
    hashes = {}
    for drive in drives:
        if drive.claims or drive.name in unreadable or not (contents.get(drive.name) or drive.partitions):
            continue
        try:
            hashes[drive.name] = contents_hash(drive)
        except UnreadableDevice as error:
            unreadable[drive.name] = "cannot be read: %s" % error
    return hashes


def read_formats(drives: list[Drive]) -> dict[str, Formats]:
    """LBA formats by drive, read only if a message about blocks needs them."""
    if len({drive.lba_bytes for drive in drives}) < 2 and all(
        drive.size_bytes and not drive.metadata_bytes for drive in drives
    ):
        return {}
    by_drive = {drive.name: try_formats(drive.name) for drive in drives}
    return {name: formats for name, formats in by_drive.items() if formats}


def holds(selection: Selection, contents: Contents) -> dict[str, list[str]]:
    """Contents of each drive as text; for drives to be wiped, with the contents of the arrays over them."""
    contents_of = {}
    for row in selection.decisions:
        drive = row.drive
        contents_of[drive.name] = [
            str(signature) if signature.device == drive.name else "%s (on %s)" % (signature, signature.device)
            for signature in contents.get(drive.name, ())
        ]
    for drive in wipeable(selection.decisions):
        above = [name for name, kind in devices_of(drive).items() if kind.startswith("array")]
        contents_of[drive.name] += [
            "%s (in array %s)" % (signature, signature.device) for signature in read_signatures(above)
        ]
    return {name: list(dict.fromkeys(lines)) for name, lines in contents_of.items()}


def several_action(selection: Selection, several: Several) -> tuple[str, str]:
    """What raid_array would do where there are several volumes, and why."""
    if selection.problem:
        return "refuse", "%s. hint: %s" % (selection.problem, selection.hint)
    kept = sum(row.verdict == KEEP for row in selection.decisions)
    if several.problems:
        return "refuse", "; ".join(several.problems)
    if several.groups == NUMA:
        action = "keep" if kept == len(selection.selected) else "create"
        return action, "%s for each NUMA node; %s" % (RAID0, several.shown)
    new = len(selection.selected) - kept
    return ("create", "%s: %d new, %d kept" % (SINGLE, new, kept)) if new else ("keep", "%s is as asked" % SINGLE)


def array_action(selection: Selection, array_name: str, level: str, chunk: int, adopt: bool) -> tuple[str, str]:
    """What raid_array would do with the array, and why."""
    if selection.problem:
        return "refuse", "%s. hint: %s" % (selection.problem, selection.hint)
    verdicts = {row.verdict for row in selection.decisions}
    if not verdicts & {KEEP, ADOPT}:
        drives = selection.selected
        room = data_members(level, len(drives)) * drives[0].size_bytes
        kept = ", room %s" % shown_size(room) if LEVELS[level].redundant else ""
        return "create", "%s over %d drives%s" % (LEVELS[level], len(drives), kept)
    wanted = Wanted(array_name, level, LEVELS[level].chunk(chunk), tuple(drive.name for drive in selection.selected))
    action = "adopt" if ADOPT in verdicts else "keep"
    try:
        superblocks = examine(wanted.members)
    except CommandError as error:
        return (
            "refuse",
            "%s. hint: `mdadm --examine` must answer for the members: install it where it is missing" % error,
        )
    named = adopted(wanted, superblocks) if action == "adopt" else wanted
    step = decide(named, superblocks, read_arrays(), {drive.name: drive.serial for drive in selection.selected})
    if step.action in ("refuse", "create"):
        reasons = "; ".join(step.reasons) or "the members carry no array"
        return "refuse", "%s. hint: put back what is missing, or ask for what is there. %s" % (reasons, GIVE_UP)
    if action == "adopt" and not adopt:
        return "adopt", "array `%s` fits. hint: `raid_array_adopt: true` keeps it with its data" % named.name
    return action, "array `%s` is as asked" % named.name


def main() -> None:
    """Read, decide, report."""
    module = AnsibleModule(
        argument_spec={
            "array": {"type": "dict", "required": True, "options": ARRAY},
            "settings": {"type": "dict", "required": True, "options": DRIVES},
            "plan": {"type": "bool", "default": False},
            "wipes": WIPES,
            "mount_point": {"type": "path"},
            "wishes": WISHES,
        },
        supports_check_mode=True,
    )
    wanted = module.params
    array = wanted["array"]
    wanted["level"] = SINGLE.name if array["groups"] == DRIVE else canonical(array["level"])
    problems = drives_problems(wanted["count"], wanted["size"], wanted["serials"], wanted["level"])
    problems += [
        problem
        for problem in (name_problem(array["name"]), chunk_problem(array["chunk"]), groups_problem(array))
        if problem
    ]
    if problems:
        module.fail_json(msg=refusal(problems), changed=False)
    # Said before anything is made: what makes an array anew forgets the manifest, whatever was in it.
    look_at_earlier_manifest(module, "nothing in it is used, and a run that succeeds replaces it")
    with in_one_line(module, READING):
        report(module, criteria_of(wanted), parse_size(array["chunk"]))


def report(module: AnsibleModule, criteria: Criteria, chunk: int) -> None:
    """Read the node, select, and end the module."""
    wanted: dict[str, Any] = module.params
    groups, adopt = wanted["array"]["groups"], wanted["array"]["adopt"]
    # Of several volumes none is ours by the array's name.
    name = wanted["array"]["name"] if groups == ALL else ""
    drives = read_drives()
    formats = read_formats(drives)
    contents, unreadable = read_contents([drive for drive in drives if drive.size_bytes], deep=True)
    drives = [with_capacity(drive, formats.get(drive.name)) for drive in drives]
    allowed = {entry["serial"]: entry["hash"] for entry in wanted["wipes"]}
    known = several_known(drives, contents, wanted["array"])
    left = left_alone(known)
    if left:
        # Noted by the run that made another volume anew; the drives of the rest are known.
        known = standing(known)
        gone = sum(len(volume.serials) for volume in left)
        criteria = replace(criteria, serials=tuple(known), count=criteria.count - gone)
    consent = Consent(
        plan=wanted["plan"],
        wipes=allowed,
        hashes=hashes_of(drives, contents, unreadable) if wanted["plan"] or allowed else {},
        adopt=adopt,
        chunk_bytes=BUILT_LEVELS[wanted["level"]].chunk(chunk),
        level=wanted["level"],
        volumes=known,
        # Several volumes are never adopted.
        foreign=foreign_arrays(drives, contents, name) if groups == ALL else (),
        disks_under={array: frozenset(disks_under("/", array)) for drive in drives for array in drive.idle_arrays},
        mates=array_mates(contents),
        cut_off=cut_off_arrays(contents, name, wanted["level"], criteria.count)
        if groups == ALL
        else cut_off_volumes(drives, contents, known),
    )
    selection = select(drives, contents, criteria, name, unreadable, consent, formats)
    answer: dict[str, Any] = {
        "table": table(selection.decisions),
        "decisions": [
            {
                "name": row.drive.name,
                "serial": row.drive.serial,
                "model": row.drive.model,
                "size_bytes": row.drive.size_bytes,
                "verdict": row.verdict,
                "reason": row.reason,
            }
            for row in selection.decisions
        ],
    }
    built = built_manifest()
    unlike = layout_difference(built, wanted["array"]["groups"]) if built else None
    several = several_of(selection, wanted, known, chunk, left) if groups != ALL else Several(ALL)
    blockers = [str(unlike)] if unlike else [*several.problems, *build_obstacles(wanted, selection, chunk, several)]
    if wanted["plan"]:
        action, reason = (
            array_action(selection, name, wanted["level"], chunk, adopt)
            if groups == ALL
            else several_action(selection, several)
        )
        if blockers and action in ("create", "adopt"):
            action, reason = "refuse", "; ".join(blockers)
        answer["plan"] = host_part(selection, holds(selection, contents), consent.hashes, action, reason)
        answer["msg"] = "%s\narray: %s (%s)" % (answer["table"], action, reason)
        module.exit_json(changed=False, **answer)
    if unlike:
        drift = Drifted([unlike])
        module.fail_json(msg=str(drift), changed=False, differences=as_results(drift.differences), **answer)
    fail_over_drift(module, selection, chunk, answer)
    if selection.problem:
        blockers = ["%s. hint: %s" % (selection.problem, selection.hint), *blockers]
    torn = torn_array(selection.decisions, name) if groups == ALL and not selection.problem else None
    if torn:
        blockers = [torn, *blockers]
    if blockers:
        shown = "\n" + answer["table"] if selection.problem or torn else ""
        module.fail_json(msg=refusal(blockers) + shown, changed=False, **answer)
    # Of a built node raid_array reports what is away.
    if groups == NUMA and (any(part["new"] for part in several.parts) or (several.away and built is None)):
        module.warn(several.shown)
    module.exit_json(
        changed=False,
        boot_unit=bool(boot_unit.changes({})),
        health_check=health_units.installed(),
        job_scratch=scratch_units.installed(),
        gds={"gpus": bool(read_gpus()), "traces": gds_apply.traces()},
        tuned=anything_of_ours(),
        wipes=[{"serial": drive.serial, "hash": allowed[drive.serial]} for drive in wipeable(selection.decisions)],
        selected=[drive.member for drive in selection.selected],
        **answer,
    )


def build_obstacles(wanted: dict[str, Any], selection: Selection, chunk: int, several: Several) -> list[str]:
    """Everything else that would stop a node that is to be built, or whose build was interrupted."""
    kept = {row.drive.name for row in selection.decisions if row.verdict in (KEEP, ADOPT)}
    if kept and built_manifest() is not None:
        return []  # a built node: its differences are reported
    serials = [drive.serial for drive in selection.selected]
    if several.groups != ALL:
        wishes = dict(wanted["wishes"])
        if wishes.get("filesystem"):
            wishes["filesystem"] = dict(wishes["filesystem"], chunk_bytes=BUILT_LEVELS[wanted["level"]].chunk(chunk))
        point = wanted["mount_point"] or ""
        if several.problems:
            # Which volumes there would be, and so what is in their way, is not known.
            wishes, point = {**wishes, "filesystem": None}, ""
        return obstacles(point, wishes, serials, level=wanted["level"], volumes=several.parts)
    running = [array for array in read_arrays() if kept & set(array.members) and complete(array) and array.serves]
    array = running[0] if running else None
    wishes, mount_point = dict(wanted["wishes"]), wanted["mount_point"] or ""
    if kept and array is None:
        # What is in it, and so which line in fstab is its own, is known once it is assembled.
        wishes, mount_point = {**wishes, "filesystem": None}, ""
    if wishes.get("filesystem"):
        wishes["filesystem"] = dict(wishes["filesystem"], chunk_bytes=LEVELS[wanted["level"]].chunk(chunk))
    return obstacles(mount_point, wishes, serials, array, level=wanted["level"])


@dataclass(frozen=True)
class Several:
    """The volumes that the chosen drives have, or will have, where there are several."""

    groups: str
    parts: Sequence[Mapping[str, Any]] = ()
    """As M(tunetool.node.raid_array) returns them."""
    problems: Sequence[str] = ()
    shown: str = ""
    """How many drives each has, and which are away from its NUMA node, for people."""
    away: bool = False
    """Whether any drive is."""


def several_of(
    selection: Selection,
    wanted: dict[str, Any],
    known: Mapping[str, AnyVolume],
    chunk: int,
    left: Sequence[AnyVolume] = (),
) -> Several:
    """``known``: those that are there, or that were noted; ``left``: those that are broken, and are left alone."""
    groups, drives = wanted["array"]["groups"], {drive.serial: drive for drive in selection.selected}
    if selection.problem:
        return Several(groups)
    kept = {row.drive.serial for row in selection.decisions if row.verdict == KEEP}
    volumes: Sequence[AnyVolume]
    problems: list[str] = []
    shown, away = "", {}
    if groups == DRIVE:
        volumes = named(list(drives), known)
    else:
        of_nodes = grouped(selection.selected, known, kept, wanted["array"]["name"], chunk)
        volumes = of_nodes.volumes
        nodes = {serial: drive.numa_node for serial, drive in drives.items()}
        away = {each.name: difference.found for each in volumes for difference in moved([each], nodes)}
        shown = "; ".join(
            [str(of_nodes), *("away from the NUMA node of `%s`: %s" % of_it for of_it in sorted(away.items()))]
        )
        problems = [*of_nodes.problems]
        for each in of_nodes.volumes:
            torn = torn_array([row for row in selection.decisions if row.drive.serial in each.serials], each.array)
            problems += [torn] if torn else []
    parts = []
    for volume in [] if problems else volumes:
        new = not kept.issuperset(volume.serials)
        parts.append(volume.part([drives[serial] for serial in volume.serials], new, made=not new))
    parts += map(part_left_alone, left)
    return Several(groups, parts, problems, shown, bool(away))


def torn_array(rows: Sequence[Decision], array_name: str) -> str | None:
    """The refusal of an array of ours that some chosen drives carry and others do not."""
    serials: dict[str, list[str]] = {KEEP: [], TAKE: []}
    for row in rows:
        serials.setdefault(row.verdict, []).append("`%s`" % row.drive.serial)
    if not (serials[KEEP] and serials[TAKE]):
        return None
    return (
        "array `%s` is on %s and not on %s, which are blank. hint: put back what is missing; nothing was changed. %s"
        % (
            array_name,
            ", ".join(serials[KEEP]),
            ", ".join(serials[TAKE]),
            GIVE_UP,
        )
    )


def refusal(problems: list[str]) -> str:
    """Problems of a run that changed nothing. The first line has a hint, by which a refusal is known."""
    if len(problems) == 1:
        return problems[0] if "nothing was changed" in problems[0] else problems[0] + "; nothing was changed"
    return "%d obstacles. hint: each line below has its cure; nothing was changed\n%s" % (
        len(problems),
        "\n".join(problems),
    )


def fail_over_drift(module: AnsibleModule, selection: Selection, chunk: int, answer: dict[str, Any]) -> None:
    """Fail with every difference, on a built node that cannot be changed to what is asked."""
    wanted: dict[str, Any] = module.params
    verdicts = {row.verdict for row in selection.decisions}
    if WIPE in verdicts or not (selection.problem or verdicts & {KEEP, ADOPT}):
        return  # the built array is to be wiped, or gone
    members = tuple(drive.serial for drive in selection.selected)
    level, array = wanted["level"], wanted["array"]
    asked = Asked(array["name"], level, BUILT_LEVELS[level].chunk(chunk), members, wanted["count"], array["adopt"])
    differences = overview(asked, wanted["wishes"])
    if not differences or (not selection.problem and all(difference.mended for difference in differences)):
        return
    drift = Drifted(differences)
    before = "%s. hint: %s\n%s\n" % (selection.problem, selection.hint, answer["table"]) if selection.problem else ""
    module.fail_json(msg=before + str(drift), changed=False, differences=as_results(drift.differences), **answer)


if __name__ == "__main__":
    main()
