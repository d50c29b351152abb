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
    - Where each drive has a volume, every one with its C(name), its C(array) as the manifest holds it, and C(new) where
      it is yet to be made; else empty.
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

from ..module_utils.array.build import ArrayRefusal, Facts, decide_build  # noqa: E402
from ..module_utils.array.create import (  # noqa: E402  (Ansible wants the documentation first)  # noqa: E402
    assemble,
    begin,
    create,
    members_by_serial,
    note_as_made,
    refuse_unless_blank,
    settled,
)
from ..module_utils.array.drift import Asked, array_differences, layout_difference  # noqa: E402
from ..module_utils.array.drive_decisions import ARRAY, by_serial, chunk_problem, name_problem  # noqa: E402
from ..module_utils.array.drive_volumes import ALL, DRIVE, kept_volumes, known_volumes, named, note  # noqa: E402
from ..module_utils.array.initramfs_check import Image, mdadm_conf_path, renew  # noqa: E402
from ..module_utils.array.md_arrays import Array, Step, Wanted, adopted, examine, read_arrays  # noqa: E402
from ..module_utils.array.mdadm_conf import conf_with_array  # noqa: E402
from ..module_utils.audit.before_changes import not_writable  # noqa: E402
from ..module_utils.common.commands import run  # noqa: E402
from ..module_utils.common.drift import Drifted, Ledger, as_results, built_manifest  # noqa: E402
from ..module_utils.common.files import content, replace_file  # noqa: E402
from ..module_utils.common.raid_levels import LEVELS, SINGLE, canonical, data_members  # noqa: E402
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
    work = converge if module.params["groups"] == ALL else converge_drives
    module.exit_json(**change(module, lambda: work(module), words))


def converge_drives(module: AnsibleModule) -> dict[str, object]:
    """Make sure that each drive may take its volume, and note the volumes, which M(tunetool.node.scratch_filesystem)
    makes. Returns the module's result."""
    hashes = {entry["serial"]: entry["hash"] for entry in module.params["wipes"]}
    members = members_by_serial(module.params["serials"])
    known, manifest = known_volumes(), built_manifest()
    unlike = layout_difference(manifest, DRIVE) if manifest else None
    if unlike is not None:
        raise Drifted([unlike])
    volumes = named([drive.serial for drive in members], known)
    signatures = read_signatures([drive.name for drive in members])
    kept = kept_volumes(volumes, {drive.name: drive.serial for drive in members}, signatures)
    new = [drive for drive in members if drive.serial not in kept]
    if manifest and new:
        # Looked at by nvme_drives, which names every difference; whatever happened since is not built over.
        raise Refusal(
            "%s carry no volume of this built node. hint: nothing was changed; run `tunetool provision` again"
            % by_serial([drive.name for drive in new], {drive.name: drive.serial for drive in new})
        )
    doomed = [drive for drive in new if drive.serial in hashes]
    before = contents_text(doomed)
    if module.check_mode:
        _refuse_unless_ready(doomed, [drive for drive in new if drive not in doomed], hashes)
    elif new:
        with held(new):
            _refuse_unless_ready(doomed, [drive for drive in new if drive not in doomed], hashes)
            module.change_begins()
            if not kept:
                # A manifest that is left is of no drive here: an owner's volume, or one that cannot be read.
                forget_volume()
            # First: after an interruption the file systems are ours by their UUIDs.
            note(volumes)
            if doomed:
                refuse_unless_wipeable(doomed, hashes)
                wipe(doomed)
            refuse_unless_blank(members_by_serial([drive.serial for drive in new]), deep=True)
    ledger = Ledger(None, not module.check_mode)
    ledger.note("drives that are wiped", before, "".join("%s: blank\n" % drive.serial for drive in doomed))
    drives = {drive.serial: drive for drive in members}
    parts = [each.part(drives[each.serial], each.serial not in kept) for each in volumes]
    added = ["%s: %s\n" % (each.name, each.serial) for each in volumes if each.serial not in kept]
    ledger.note("volumes", "", "".join(added))
    return {
        "changed": bool(ledger.diff),
        "differences": [],
        "action": "create" if new else "keep",
        "made": bool(new),
        "wiped": [drive.serial for drive in doomed],
        "initramfs_rebuilt": [],
        "array": {"uuid": None, "name": module.params["name"], "level": SINGLE.name, "chunk_bytes": 0},
        "volumes": parts,
        "data_members": 1,
        "diff": ledger.diff,
    }


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
    stale = remember(module, ledger, facts.wanted.name, uuid)
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
    # In check mode on a new node mdadm is not installed yet; wipefs shows before the end that the members are blank.
    missing = module.check_mode and module.get_bin_path("mdadm") is None
    superblocks = {} if missing else examine(wanted.members)
    wanted = adopted(wanted, superblocks) if asked["adopt"] else wanted
    arrays, serials = read_arrays(), _serials()
    doomed = tuple(drive for drive in members if drive.serial in hashes)
    manifest = None if doomed else built_manifest()
    differences = None
    if manifest is not None:
        expected = Asked(wanted.name, level.name, chunk, tuple(asked["serials"]), len(members), asked["adopt"])
        differences = array_differences(manifest, expected, arrays, superblocks, serials)
    held_there = contents_text(list(doomed))
    return Facts(wanted, tuple(members), doomed, superblocks, arrays, serials, differences, held_there)


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
    array = settled(step.uuid or facts.wanted.members[0])
    if array is None or array.uuid is None:
        raise ArrayRefusal("array `%s` did not appear. hint: see `dmesg | grep md`" % facts.wanted.name)
    refuse_unless_as_wanted(array, facts.wanted)
    if step.action == "create":
        clear_beginning_of(array, wiped=bool(facts.doomed))
        note_as_made(array.uuid, array.device)
    return array.uuid


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
        create(wanted.name, wanted.chunk_bytes, members, begin(), wanted.level)


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


def remember(module: AnsibleModule, ledger: Ledger, name: str, uuid: str) -> list[Image]:
    """Write the array into mdadm.conf, then rebuild the images that do not carry it. Returns these."""
    conf = mdadm_conf_path()
    before = content(conf)
    after = conf_with_array(before, name, uuid)
    if ledger.note(conf, before, after):
        replace_file(conf, after)
    renewed = renew(conf, before != after, acting=ledger.acting, ours=uuid, begins=module.change_begins)
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
