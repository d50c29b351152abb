#!/usr/bin/python
# Copyright: the tunetool authors
# Apache License 2.0 (see LICENSE)
"""Ansible module: one array over named drives, in mdadm.conf and the initramfs."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: raid_array
short_description: Make, assemble or keep one md array over drives named by serial
version_added: "0.1.0"
description:
  - Creates the array when every member is blank, assembles it when every member already belongs to it, keeps it
    when it runs as asked. Refuses everything between, and names each difference; never rebuilds anything.
  - With C(groups=drive) there is no array. It makes sure that each drive is blank, or carries the volume that was made
    on it, and notes which volumes there are in C(/etc/tunetool/drives.json).
  - With C(groups=numa) there is one array over the drives of each NUMA node, as sysfs names it when the array is made,
    and each is made, assembled and kept as if it were alone. Which drives are whose is noted in that file, too. A drive
    whose node is not known is refused.
  - Looks for signatures on the members again in the same step in which it creates the array.
  - Drives in O(wipes) lose what they hold, directly before the array is created over them, if their contents still
    have the hash given there and nothing uses them. If one drive fails this test, none is touched.
  - On a built node it reports every difference. One that cannot be mended without risk to the data fails the module
    before anything is changed. A node whose array is made again loses its manifest and the volume's line in
    /etc/fstab first.
  - Then writes the array into mdadm.conf by UUID and rebuilds the initramfs when that file was changed or when an
    image does not carry the arrays of that file, in this order, so that the array has its name after a reboot.
options:
  serials:
    description: Serial numbers of the members, in slot order.
    type: list
    elements: str
    required: true
  settings:
    description:
      - The variables of the role P(tunetool.node.raid_array#role) without its name; C(name) is required.
    type: dict
    required: true
extends_documentation_fragment: [tunetool.node.changes, tunetool.node.wipes]
author:
  - The tunetool authors (@tunetool)
attributes:
  diff_mode:
    description: Shows the array, mdadm.conf and the initramfs before and after.
    support: full
"""

EXAMPLES = r"""
- name: Stripe the chosen drives
  tunetool.node.raid_array:
    serials: "{{ nvme_drives_result.selected | map(attribute='serial') }}"
    settings:
      name: nvme_raid0
      chunk: 1MiB
"""

RETURN = r"""
differences:
  description:
    - On a built node, what is not as asked. C(mended) is false for what was left, with a C(hint).
  returned: always
  type: list
  elements: dict
action:
  description: What was done about the array (keep, assemble, create).
  returned: success
  type: str
made:
  description: Whether the array became the node's by this task, made or adopted. One that was merely stopped did not.
  returned: success
  type: bool
array:
  description: The array as the manifest holds it, without its members. C(uuid) is null where check mode predicts it.
  returned: success
  type: dict
volumes:
  description:
    - Where there are several, every one with its C(name), its C(array) as the manifest holds it, and C(new) where
      it is yet to be made; else empty. One with C(left) is broken, and is left alone.
  returned: success
  type: list
  elements: dict
data_members:
  description: The members that hold distinct data, over which the file system is aligned.
  returned: success
  type: int
wiped:
  description: Serial numbers of the drives that lost (or would lose) what they held.
  returned: success
  type: list
  elements: str
initramfs_rebuilt:
  description: Images that were (or would be) rebuilt.
  returned: success
  type: list
  elements: str
"""

from dataclasses import replace  # noqa: E402  (Ansible wants the documentation first)
from typing import Any, Mapping, Sequence  # noqa: E402

from ..module_utils.array.build import ArrayRefusal, Facts, decide_build  # noqa: E402
from ..module_utils.array.create import (  # noqa: E402
    assemble,
    begin,
    create,
    drawn_uuid,
    members_by_serial,
    note_as_made,
    refuse_unless_blank,
    settled,
)
from ..module_utils.array.drift import Asked, array_differences, layout_difference, of_volume  # noqa: E402
from ..module_utils.array.drive_decisions import ARRAY, by_serial, chunk_problem, name_problem  # noqa: E402
from ..module_utils.array.drive_volumes import (  # noqa: E402
    ALL,
    NUMA,
    AnyVolume,
    ArrayVolume,
    in_order,
    kept_volumes,
    known_volumes,
    left_alone,
    named,
    note,
    part_left_alone,
    standing,
)
from ..module_utils.array.initramfs_check import Image, mdadm_conf_path, renew  # noqa: E402
from ..module_utils.array.md_arrays import Array, Step, Superblock, Wanted, adopted, examine, read_arrays  # noqa: E402
from ..module_utils.array.mdadm_conf import conf_with_array  # noqa: E402
from ..module_utils.array.numa_volumes import array_name, found_volumes, grouped, moved  # noqa: E402
from ..module_utils.audit.before_changes import not_writable  # noqa: E402
from ..module_utils.common.commands import run  # noqa: E402
from ..module_utils.common.drift import Difference, Drifted, Ledger, as_results, built_manifest  # noqa: E402
from ..module_utils.common.files import content, replace_file  # noqa: E402
from ..module_utils.common.manifest import each_volume  # noqa: E402
from ..module_utils.common.raid_levels import DEFAULT, LEVELS, canonical, data_members  # noqa: E402
from ..module_utils.common.refusal import Expected, Refusal  # noqa: E402
from ..module_utils.machine.drive_contents import read_signatures  # noqa: E402
from ..module_utils.machine.drives import Drive, read_drives  # noqa: E402
from ..module_utils.machine.held_drives import held  # noqa: E402
from ..module_utils.machine.unlabelled import clear_ends  # noqa: E402
from ..module_utils.play.convergence import AnsibleModule, Words, change, line_of  # noqa: E402
from ..module_utils.removal.wipe_drives import WIPES, contents_text, refuse_unless_wipeable, wipe, written  # noqa: E402
from ..module_utils.units import parse_size  # noqa: E402
from ..module_utils.volume.apply import forget_volume  # noqa: E402


def main() -> None:
    """Entry point: check the arguments, do the job, report."""
    module = AnsibleModule(
        argument_spec={
            "serials": {"type": "list", "elements": "str", "required": True},
            "wipes": WIPES,
            "settings": {"type": "dict", "required": True, "options": ARRAY},
        },
        supports_check_mode=True,
    )
    name = module.params["name"]
    problems = [problem for problem in (name_problem(name), chunk_problem(module.params["chunk"])) if problem]
    if problems:
        module.fail_json(msg="; ".join(problems))
    words: Words = {
        Drifted: line_of,
        ArrayRefusal: line_of,
        Expected: lambda error: "array `%s`: %s" % (name, error),
        OSError: lambda error: "array `%s`: %s" % (name, line_of(error)),
    }
    work = converge if module.params["groups"] == ALL else converge_several
    module.exit_json(**change(module, lambda: work(module), words))


def converge_several(module: AnsibleModule) -> dict[str, object]:
    """Make sure that each drive may take its volume, note the volumes, and make the arrays of those that have one.
    M(tunetool.node.scratch_filesystem) makes what is on them. Returns the module's result."""
    groups = module.params["groups"]
    hashes = {entry["serial"]: entry["hash"] for entry in module.params["wipes"]}
    members, manifest = members_by_serial(module.params["serials"]), built_manifest()
    unlike = layout_difference(manifest, groups) if manifest else None
    if unlike is not None:
        raise Drifted([unlike])
    serials = {drive.name: drive.serial for drive in members}
    signatures = read_signatures(list(serials))
    known = known_volumes(groups=groups)
    left, known = left_alone(known), standing(known)
    if groups == NUMA and not known:
        known = found_volumes(_examined(module, list(serials)), serials, module.params["name"])
    # What the plan gives up is kept by nobody, whoever made it.
    kept = kept_volumes(in_order(known), serials, signatures) - set(hashes)
    volumes = named(list(serials.values()), known)
    if groups == NUMA:
        of_nodes = grouped(members, known, kept, module.params["name"], parse_size(module.params["chunk"]))
        if of_nodes.problems:
            raise Refusal("; ".join(of_nodes.problems))
        volumes = [*of_nodes.volumes]
    new = [drive for drive in members if drive.serial not in kept]
    if manifest and new:
        # Looked at by nvme_drives, which names every difference; whatever happened since is not built over.
        raise Refusal(
            "%s carry no volume of this built node. hint: nothing was changed; run `tunetool provision` again"
            % by_serial([drive.name for drive in new], serials)
        )
    arrays = [_planned(module, each, members, hashes, manifest) for each in volumes if isinstance(each, ArrayVolume)]
    doomed = [drive for drive in new if drive.serial in hashes]
    before = contents_text(doomed)
    if module.check_mode:
        _refuse_unless_ready(doomed, [drive for drive in new if drive not in doomed], hashes)
    elif new:
        _begin_several(module, volumes, left, kept, new, hashes)
    if not module.check_mode:
        for on_array, facts, step, _ in arrays:
            _settle(module, facts, step, on_array)
    ledger = Ledger(None, not module.check_mode, module.change_begins)
    ledger.note("drives that are wiped", before, "".join("%s: blank\n" % drive.serial for drive in doomed))
    drives = {drive.serial: drive for drive in members}
    parts = []
    for each in volumes:
        is_new = not kept.issuperset(each.serials)
        made = not (is_new and module.check_mode)
        parts.append(each.part([drives[serial] for serial in each.serials], is_new, made))
    added = ["%s: %s\n" % (each["name"], _shown(each)) for each in parts if each["new"]]
    ledger.note("volumes", "", "".join(added))
    assembled = ["%s\n" % each.name for each, _, step, _ in arrays if step.action == "assemble"]
    ledger.note("arrays that are assembled", "", "".join(assembled))
    named_arrays = [(each["array"]["name"], each["array"]["uuid"] or "(new)") for each in parts]
    stale = remember(module, ledger, named_arrays) if arrays else []
    differences = [difference for *_, of_it in arrays for difference in of_it]
    if manifest and groups == NUMA:
        differences += moved(in_order(known), {drive.serial: drive.numa_node for drive in members})
    return {
        "changed": bool(ledger.diff),
        "differences": as_results(differences),
        "action": "create" if new else "assemble" if assembled else "keep",
        "made": bool(new),
        "wiped": [drive.serial for drive in doomed],
        "initramfs_rebuilt": [image.path for image in stale],
        "array": {
            "uuid": None,
            "name": module.params["name"],
            "level": parts[0]["array"]["level"],
            "chunk_bytes": parts[0]["array"]["chunk_bytes"],
        },
        "volumes": sorted([*parts, *map(part_left_alone, left)], key=lambda each: (len(each["name"]), each["name"])),
        "data_members": len(parts[0]["array"]["members"]),
        "diff": ledger.diff,
    }


def _begin_several(
    module: AnsibleModule,
    volumes: Sequence[AnyVolume],
    left: Sequence[AnyVolume],
    kept: set[str],
    new: list[Drive],
    hashes: dict[str, str],
) -> None:
    """Note the volumes, wipe what the plan names, and create the arrays over the ``new`` drives. ``left``: broken ones,
    which stay noted."""
    doomed = [drive for drive in new if drive.serial in hashes]
    with held(new):
        _refuse_unless_ready(doomed, [drive for drive in new if drive not in doomed], hashes)
        module.change_begins()
        if not kept:
            # A manifest that is left is of no drive here: an owner's volume, or one that cannot be read.
            forget_volume()
        # First: after an interruption the file systems and the arrays are ours by their UUIDs.
        note([*volumes, *left])
        if doomed:
            refuse_unless_wipeable(doomed, hashes)
            wipe(doomed)
        refuse_unless_blank(members_by_serial([drive.serial for drive in new]), deep=True)
        for each in volumes:
            if isinstance(each, ArrayVolume) and kept.isdisjoint(each.serials):
                drives = members_by_serial(list(each.serials))
                # The array before it took its time.
                refuse_unless_blank(drives, deep=True)
                create(each.array, each.chunk_bytes, drives, begin(each.uuid, each.name), each.level)
                wanted = Wanted(each.array, each.level, each.chunk_bytes, tuple(drive.name for drive in drives))
                array = _there(each.uuid, wanted)
                clear_beginning_of(array, wiped=bool(set(each.serials) & set(hashes)))
                note_as_made(each.uuid, array.device, volume=each.name)


def _planned(
    module: AnsibleModule,
    volume: ArrayVolume,
    members: Sequence[Drive],
    hashes: dict[str, str],
    manifest: Mapping[str, Any] | None,
) -> tuple[ArrayVolume, Facts, Step, list[Difference]]:
    """What is to be done about the array of one of several volumes. Raises as ``decide_build``; changes nothing."""
    drives = {drive.serial: drive for drive in members}
    mine = [drives[serial] for serial in volume.serials]
    asked = module.params
    wanted = Wanted(
        array_name(asked["name"], volume.name), DEFAULT, parse_size(asked["chunk"]), tuple(drive.name for drive in mine)
    )
    own = dict(each_volume(manifest)).get(volume.name) if manifest else None
    facts = _facts(module, wanted, mine, hashes, own, volume=volume.name)
    if facts.differences is not None:
        facts = replace(facts, differences=of_volume(facts.differences, volume.name))
    return (volume, facts, *decide_build(facts))


def _settle(module: AnsibleModule, facts: Facts, step: Step, volume: ArrayVolume) -> None:
    """Assemble an array that is whole and does not run, and see that each is as wanted."""
    if step.action == "assemble":
        module.change_begins()
        assemble(facts.wanted.name, str(step.uuid), list(facts.members))
    if step.action != "create":
        _there(volume.uuid, facts.wanted)


def _shown(part: Mapping[str, Any]) -> str:
    return ", ".join(member["serial"] for member in part["array"]["members"])


def _refuse_unless_ready(doomed: list[Drive], spared: list[Drive], hashes: dict[str, str]) -> None:
    closed = not_writable()
    if closed:
        raise Refusal("; ".join(closed))
    if doomed:
        refuse_unless_wipeable(doomed, hashes)
    refuse_unless_blank(spared, deep=True)


def converge(module: AnsibleModule) -> dict[str, object]:
    """Read, decide, act, report. Returns the module's result."""
    hashes = {entry["serial"]: entry["hash"] for entry in module.params["wipes"]}
    manifest = built_manifest()
    unlike = layout_difference(manifest, ALL) if manifest else None
    if unlike is not None:
        raise Drifted([unlike])
    facts = read(module, hashes)
    step, differences = decide_build(facts)
    if module.check_mode:
        if step.action == "create":
            refuse_unless_ready(facts, hashes)
        uuid = step.uuid or "(new)"
    else:
        uuid = act(module, facts, step, hashes)
    ledger = Ledger(None, not module.check_mode, module.change_begins)
    described = describe(facts)
    ledger.note("drives that are wiped", facts.held, "".join("%s: blank\n" % drive.serial for drive in facts.doomed))
    ledger.note("array %s" % facts.wanted.name, "" if step.action == "create" else described, described)
    stale = remember(module, ledger, [(facts.wanted.name, uuid)])
    changed = step.action != "keep" or bool(ledger.diff)
    return {
        "changed": changed,
        "made": changed and (step.action == "create" or facts.differences is None),
        "differences": as_results(differences),
        "action": step.action,
        "wiped": [drive.serial for drive in facts.doomed],
        "initramfs_rebuilt": [image.path for image in stale],
        "array": {
            "uuid": None if uuid == "(new)" else uuid,
            "name": facts.wanted.name,
            "level": facts.wanted.level,
            "chunk_bytes": facts.wanted.chunk_bytes,
        },
        "volumes": [],
        "data_members": data_members(facts.wanted.level, len(facts.members)),
        "diff": ledger.diff,
    }


def read(module: AnsibleModule, hashes: dict[str, str]) -> Facts:
    """What is asked for, and what is there now."""
    asked = module.params
    level = LEVELS[canonical(asked["level"])]
    members = members_by_serial(asked["serials"])
    chunk = level.chunk(parse_size(asked["chunk"]))
    wanted = Wanted(asked["name"], level.name, chunk, tuple(drive.name for drive in members))
    return _facts(module, wanted, members, hashes, built_manifest(), asked["adopt"])


def _facts(
    module: AnsibleModule,
    wanted: Wanted,
    members: list[Drive],
    hashes: dict[str, str],
    manifest: Mapping[str, Any] | None,
    adopt: bool = False,
    volume: str = "",
) -> Facts:
    """``manifest``: of a node that has this array alone."""
    superblocks = _examined(module, list(wanted.members))
    wanted = adopted(wanted, superblocks) if adopt else wanted
    arrays, known = read_arrays(), _serials()
    doomed = tuple(drive for drive in members if drive.serial in hashes)
    differences = None
    if manifest is not None and not doomed:
        serials = tuple(drive.serial for drive in members)
        expected = Asked(wanted.name, wanted.level, wanted.chunk_bytes, serials, len(members), adopt, volume)
        differences = array_differences(manifest, expected, arrays, superblocks, known)
    held_there = contents_text(list(doomed))
    return Facts(wanted, tuple(members), doomed, superblocks, arrays, known, differences, held_there, volume)


def _examined(module: AnsibleModule, names: Sequence[str]) -> dict[str, Superblock]:
    # In check mode on a new node mdadm is not installed yet; wipefs shows before the end that the members are blank.
    missing = module.check_mode and module.get_bin_path("mdadm") is None
    return {} if missing else examine(names)


def refuse_unless_ready(facts: Facts, hashes: dict[str, str]) -> None:
    """Every condition of a new array, before the first byte is written. Raises ``Refusal``."""
    # Once more, right before the drives are written: the packages came since nvme_drives looked.
    _refuse_unless_ready(list(facts.doomed), list(facts.spared), hashes)


def act(module: AnsibleModule, facts: Facts, step: Step, hashes: dict[str, str]) -> str:
    """Carry out the step and read back the array. Returns its UUID."""
    if step.action == "create":
        make(module, facts, hashes)
    elif step.action == "assemble":
        module.change_begins()
        assemble(facts.wanted.name, str(step.uuid), list(facts.members))
    array = _there(step.uuid or facts.wanted.members[0], facts.wanted)
    if step.action == "create":
        clear_beginning_of(array, wiped=bool(facts.doomed))
        note_as_made(str(array.uuid), array.device)
    return str(array.uuid)


def _there(uuid_or_member: str, wanted: Wanted) -> Array:
    """The array that runs now, as wanted. Raises ``ArrayRefusal``."""
    array = settled(uuid_or_member)
    if array is None or array.uuid is None:
        raise ArrayRefusal("array `%s` did not appear. hint: see `dmesg | grep md`" % wanted.name)
    refuse_unless_as_wanted(array, wanted)
    return array


def make(module: AnsibleModule, facts: Facts, hashes: dict[str, str]) -> None:
    """Wipe what the plan names and create the array, if every drive is still what was looked at."""
    members, wanted = list(facts.members), facts.wanted
    # From here to md's own hold the names are those of the drives that are looked at, also while they are wiped.
    with held(members):
        refuse_unless_ready(facts, hashes)
        module.change_begins()
        # After an interruption here the node counts as not built: the next run continues from its present state.
        forget_volume()
        note(())
        if facts.doomed:
            # Reading the other drives took its time, and what opens a drive need not claim it.
            refuse_unless_wipeable(list(facts.doomed), hashes)
            wipe(list(facts.doomed))
            members = members_by_serial([drive.serial for drive in members])
        refuse_unless_blank(members, deep=True)
        create(wanted.name, wanted.chunk_bytes, members, begin(drawn_uuid()), wanted.level)


def refuse_unless_as_wanted(array: Array, wanted: Wanted) -> None:
    """Raises ``ArrayRefusal`` where md made something else, or another array came under these names."""
    if (array.level, array.chunk_bytes, set(array.members)) != (wanted.level, wanted.chunk_bytes, set(wanted.members)):
        raise ArrayRefusal(
            "array `%s` was made as %s, chunk %d, members %s. hint: look at `mdadm --detail %s`"
            % (wanted.name, array.level, array.chunk_bytes, by_serial(array.members, _serials()), array.path)
        )


def clear_beginning_of(array: Array, wiped: bool) -> None:
    """Old contents of the drives may be where the new array begins, and M(tunetool.node.scratch_filesystem) would take
    them for data of the array. A label on drives that counted as blank is left for it to refuse."""
    if wiped:
        run(["wipefs", "--all", "--quiet", array.path])
    if wiped or not read_signatures([array.device]):
        written(clear_ends, array.path)


def remember(module: AnsibleModule, ledger: Ledger, arrays: Sequence[tuple[str, str]]) -> list[Image]:
    """Write the arrays, by name and UUID, into mdadm.conf, then rebuild the images that do not carry them. Returns
    these."""
    conf = mdadm_conf_path()
    before = after = content(conf)
    for name, uuid in arrays:
        after = conf_with_array(after, name, uuid)
    if ledger.note(conf, before, after):
        replace_file(conf, after)
    ours = [uuid for _, uuid in arrays]
    renewed = renew(conf, before != after, acting=ledger.acting, ours=ours, begins=module.change_begins)
    if renewed.left:
        raise ArrayRefusal(
            "the initramfs does not carry `%s` after it was rebuilt: %s. hint: rebuild it by hand"
            % (conf, "; ".join(map(str, renewed.left)))
        )
    for image in renewed.unknown:
        module.warn("whether the initramfs carries `%s` is not known: %s" % (conf, image))
    rebuilt = "".join("%s: rebuilt\n" % image.path for image in renewed.stale)
    ledger.note("initramfs", "".join("%s\n" % image for image in renewed.stale), rebuilt)
    return list(renewed.stale)


def describe(facts: Facts) -> str:
    """The array as lines, for the diff."""
    lines = ["level %s, chunk %d bytes" % (facts.wanted.level, facts.wanted.chunk_bytes)]
    lines += ["slot %d: %s %s" % (slot, drive.serial, drive.model) for slot, drive in enumerate(facts.members)]
    return "\n".join(lines) + "\n"


def _serials() -> dict[str, str]:
    """The drives' serials by kernel name."""
    return {drive.name: drive.serial for drive in read_drives()}


if __name__ == "__main__":
    main()
