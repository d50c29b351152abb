#!/usr/bin/python
# Copyright: the tunetool authors
# Apache License 2.0 (see LICENSE)
"""Ansible module: one RAID0 array over named drives, in mdadm.conf and the initramfs."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: raid_array
short_description: Make, assemble or keep one md RAID0 array over drives named by serial
version_added: "0.1.0"
description:
  - Creates the array when every member is blank, assembles it when every member already belongs to it, keeps it
    when it runs as asked. Refuses everything between, and names each difference; never rebuilds anything.
  - Looks for signatures on the members again in the same step in which it creates the array.
  - Drives in O(wipes) lose what they hold, directly before the array is created over them, if their contents still
    have the hash given there and nothing uses them. If one drive fails this test, none is touched.
  - On a built node it reports every difference. One that cannot be mended without risk to the data fails the module
    before anything is changed. A node whose array is made again loses its manifest and the volume's line in
    /etc/fstab first.
  - Then writes the array into mdadm.conf by UUID and rebuilds the initramfs when that file was changed or when an
    image does not carry the arrays of that file, in this order, so that the array has its name after a reboot.
options:
  name:
    description: Name of the array, C(/dev/md/NAME).
    type: str
    required: true
  chunk:
    description: Chunk size, such as V(1MiB).
    type: str
    default: 1MiB
  serials:
    description: Serial numbers of the members, in slot order.
    type: list
    elements: str
    required: true
  adopt:
    description:
      - Keep an array of another name under that name, with its data, when its level, chunk and members are as asked.
    type: bool
    default: false
extends_documentation_fragment: [tunetool.node.changes, tunetool.node.level, tunetool.node.wipes]
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
    name: nvme_raid0
    chunk: 1MiB
    serials: "{{ nvme_drives_result.selected | map(attribute='serial') }}"
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
array:
  description: The array as the manifest holds it, without its members. C(uuid) is null where check mode predicts it.
  returned: success
  type: dict
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

from typing import Mapping  # noqa: E402  (Ansible wants the documentation first)

from ..module_utils.array.begun import begin, note_as_made  # noqa: E402
from ..module_utils.array.create import assemble, create, members_by_serial, refuse_unless_blank, settled  # noqa: E402
from ..module_utils.array.drift import GIVE_UP, Asked, array_differences  # noqa: E402
from ..module_utils.array.drive_decisions import (  # noqa: E402
    by_serial,
    chunk_problem,
    name_problem,
)
from ..module_utils.array.drive_selection import LEVEL  # noqa: E402
from ..module_utils.array.initramfs_check import Image, mdadm_conf_path, renew  # noqa: E402
from ..module_utils.array.md_arrays import Array, Step, Superblock, Wanted, adopted, decide, examine, read_arrays  # noqa: E402
from ..module_utils.array.mdadm_conf import conf_with_array  # noqa: E402
from ..module_utils.audit.before_changes import not_writable  # noqa: E402
from ..module_utils.common.change_lock import Locked, only_one  # noqa: E402
from ..module_utils.common.commands import CommandError, run  # noqa: E402
from ..module_utils.common.drift import Difference, Drifted, as_results, built_manifest  # noqa: E402
from ..module_utils.common.files import content, replace_file  # noqa: E402
from ..module_utils.common.raid_levels import LEVELS, data_members  # noqa: E402
from ..module_utils.common.refusal import Refusal  # noqa: E402
from ..module_utils.machine.drive_contents import UnreadableDevice, read_signatures  # noqa: E402
from ..module_utils.machine.drives import Drive, read_drives  # noqa: E402
from ..module_utils.machine.held_drives import held  # noqa: E402
from ..module_utils.machine.unlabelled import clear_ends  # noqa: E402
from ..module_utils.machine.writable import failed_write  # noqa: E402
from ..module_utils.play.ansible_module import AnsibleModule  # noqa: E402
from ..module_utils.removal.wipe_drives import WIPES, contents_text, refuse_unless_wipeable, wipe, written  # noqa: E402
from ..module_utils.units import parse_size  # noqa: E402
from ..module_utils.volume.apply import forget_volume  # noqa: E402


def apply(module: AnsibleModule, wanted: Wanted, step: Step, members: list[Drive], doomed: list[Drive]) -> Array:
    """Carry out a step and read back the array. ``doomed`` are the members that a plan lets us wipe."""
    if step.action == "create":
        # From here to md's own hold the names are those of the drives that are looked at, also while they are wiped.
        with held(members):
            refuse_unless_blank([drive for drive in members if drive not in doomed], deep=True)
            module.change_begins()
            # After an interruption here the node counts as not built: the next run continues from its present state.
            forget_volume()
            if doomed:
                # Reading the other drives took its time, and what opens a drive need not claim it.
                refuse_unless_wipeable(doomed, {entry["serial"]: entry["hash"] for entry in module.params["wipes"]})
                wipe(doomed)
                members = members_by_serial([drive.serial for drive in members])
            refuse_unless_blank(members, deep=True)
            create(wanted.name, wanted.chunk_bytes, members, begin(), wanted.level)
    elif step.action == "assemble":
        module.change_begins()
        assemble(wanted.name, str(step.uuid), members)
    array = settled(step.uuid or wanted.members[0])
    if array is None or array.uuid is None:
        module.fail_json(msg="array `%s` did not appear. hint: see `dmesg | grep md`" % wanted.name)
        raise AssertionError  # fail_json does not return
    made = (array.level, array.chunk_bytes, set(array.members))
    if made != (wanted.level, wanted.chunk_bytes, set(wanted.members)):
        module.fail_json(
            msg="array `%s` was made as %s, chunk %d, members %s. hint: look at `mdadm --detail %s`"
            % (wanted.name, array.level, array.chunk_bytes, by_serial(array.members, _serials()), array.path)
        )
    return array


def main() -> None:
    """Entry point: compare, act in order, report."""
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            **LEVEL,
            "chunk": {"type": "str", "default": "1MiB"},
            "serials": {"type": "list", "elements": "str", "required": True},
            "wipes": WIPES,
            "adopt": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    name = module.params["name"]
    problems = [problem for problem in (name_problem(name), chunk_problem(module.params["chunk"])) if problem]
    if problems:
        module.fail_json(msg="; ".join(problems))
    chunk = parse_size(module.params["chunk"])
    try:
        with only_one():
            # Read under the lock: the node may have changed while we waited for it.
            members = members_by_serial(module.params["serials"])
            level = LEVELS[module.params["level"]]
            wanted = Wanted(name, level.name, level.chunk(chunk), tuple(drive.name for drive in members))
            result = converge(module, wanted, members)
    except Drifted as error:
        module.fail_json(msg=str(error), changed=False, differences=as_results(error.differences))
    except (CommandError, UnreadableDevice, Refusal, Locked) as error:
        module.fail_json(msg="array `%s`: %s" % (name, error))
    except OSError as error:
        module.fail_json(msg="array `%s`: %s" % (name, failed_write(error)))
    else:
        module.exit_json(**result)


def converge(module: AnsibleModule, wanted: Wanted, members: list[Drive]) -> dict[str, object]:
    """Do the whole job. Returns the module's result."""
    # In check mode on a new node mdadm is not installed yet; wipefs shows below that the members are blank.
    missing = module.check_mode and module.get_bin_path("mdadm") is None
    superblocks = {} if missing else examine(wanted.members)
    hashes = {entry["serial"]: entry["hash"] for entry in module.params["wipes"]}
    doomed = [drive for drive in members if drive.serial in hashes]
    if module.params["adopt"]:
        wanted = adopted(wanted, superblocks)
    # A plan's drives count as blank here; they are checked before the first one is touched.
    doomed_names = {drive.name for drive in doomed}
    stopped = {array for drive in doomed for array in drive.idle_arrays}
    arrays = read_arrays()
    step = decide(
        wanted,
        {name: block for name, block in superblocks.items() if name not in doomed_names},
        [array for array in arrays if array.device not in stopped],
        _serials(),
    )
    differences: list[Difference] = []
    if step.action != "create" and not doomed:
        differences = drift(module, wanted, step, superblocks, arrays)
    if step.action == "refuse" or (doomed and step.action != "create"):
        module.fail_json(
            msg="array `%s` is not as asked: %s. hint: nothing was changed; put back what is missing, or ask for what "
            "is there%s. %s"
            % (
                wanted.name,
                "; ".join(step.reasons) or "a plan cannot wipe members of an array that stays",
                ", with `raid_array_adopt: true` under its own name" if only_name(step) else "",
                GIVE_UP,
            ),
            changed=False,
        )
    if step.action == "create":
        # Once more, right before the drives are written: the packages came since nvme_drives looked.
        closed = not_writable()
        if closed:
            raise Refusal("; ".join(closed))
    if doomed:
        refuse_unless_wipeable(doomed, hashes)
    lost = contents_text(doomed)
    if not module.check_mode:
        array = apply(module, wanted, step, members, doomed)
        uuid = str(array.uuid)
        if step.action == "create":
            clear_beginning_of(array, wiped=bool(doomed))
            note_as_made(uuid, array.device)
    else:
        if step.action == "create":
            refuse_unless_blank([drive for drive in members if drive not in doomed], deep=True)
        uuid = step.uuid or "(new)"
    conf = mdadm_conf_path()
    before = content(conf)
    after = conf_with_array(before, wanted.name, uuid)
    if after != before and not module.check_mode:
        module.change_begins()
        replace_file(conf, after)
    stale = renew_initramfs(module, conf, uuid, after != before)
    return {
        "changed": step.action != "keep" or after != before or bool(stale),
        "differences": as_results(differences),
        "action": step.action,
        "wiped": [drive.serial for drive in doomed],
        "initramfs_rebuilt": [image.path for image in stale],
        "array": {
            "uuid": None if uuid == "(new)" else uuid,
            "name": wanted.name,
            "level": wanted.level,
            "chunk_bytes": wanted.chunk_bytes,
        },
        "data_members": data_members(wanted.level, len(wanted.members)),
        "diff": [
            {
                "before_header": "drives that are wiped",
                "after_header": "drives that are wiped",
                "before": lost,
                "after": "".join("%s: blank\n" % drive.serial for drive in doomed),
            },
            {
                "before_header": "array %s" % wanted.name,
                "after_header": "array %s" % wanted.name,
                "before": "" if step.action == "create" else describe(wanted, members),
                "after": describe(wanted, members),
            },
            {"before_header": conf, "after_header": conf, "before": before, "after": after},
            {
                "before_header": "initramfs",
                "after_header": "initramfs",
                "before": "".join("%s\n" % image for image in stale),
                "after": "".join("%s: rebuilt\n" % image.path for image in stale),
            },
        ],
    }


def clear_beginning_of(array: Array, wiped: bool) -> None:
    """Old contents of the drives may be where the new array begins, and M(tunetool.node.scratch_filesystem) would take
    them for data of the array. A label on drives that counted as blank is left for it to refuse."""
    if wiped:
        run(["wipefs", "--all", "--quiet", array.path])
    if wiped or not read_signatures([array.device]):
        written(clear_ends, array.path)


def renew_initramfs(module: AnsibleModule, conf: str, uuid: str, changed: bool) -> list[Image]:
    """The images that do not carry the arrays of ``conf``, rebuilt unless in check mode. ``uuid`` is our array's."""
    renewed = renew(conf, changed, acting=not module.check_mode, ours=uuid, begins=module.change_begins)
    if renewed.left:
        module.fail_json(
            msg="the initramfs does not carry `%s` after it was rebuilt: %s. hint: rebuild it by hand"
            % (conf, "; ".join(map(str, renewed.left)))
        )
    for image in renewed.unknown:
        module.warn("whether the initramfs carries `%s` is not known: %s" % (conf, image))
    return list(renewed.stale)


def drift(
    module: AnsibleModule, wanted: Wanted, step: Step, superblocks: Mapping[str, Superblock], arrays: list[Array]
) -> list[Difference]:
    """Every difference on a built node. Raises ``Drifted`` when one cannot be mended: nothing was changed then."""
    manifest = built_manifest()
    if manifest is None:
        return []
    members = tuple(module.params["serials"])
    asked = Asked(wanted.name, wanted.level, wanted.chunk_bytes, members, len(members), module.params["adopt"])
    differences = array_differences(manifest, asked, arrays, superblocks, _serials())
    if step.action == "refuse" and all(difference.mended for difference in differences):
        reasons = "; ".join(step.reasons)
        differences.append(Difference("array", "as asked", reasons, mended=False, hint="look at `mdadm --examine`"))
    if not all(difference.mended for difference in differences):
        raise Drifted(differences)
    return differences


def _serials() -> dict[str, str]:
    """The drives' serials by kernel name."""
    return {drive.name: drive.serial for drive in read_drives()}


def only_name(step: Step) -> bool:
    """Whether an array is refused only for its name."""
    return len(step.reasons) == 1 and step.reasons[0].startswith("name:")


def describe(wanted: Wanted, members: list[Drive]) -> str:
    """The array as lines, for the diff."""
    lines = ["level %s, chunk %d bytes" % (wanted.level, wanted.chunk_bytes)]
    lines += ["slot %d: %s %s" % (slot, drive.serial, drive.model) for slot, drive in enumerate(members)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
