"""Checks whether the node is as its manifest says, whether its volume takes data, and whether its drives are healthy.

Reads /proc and /sys; as root asks the drives for their health log, writes a few KiB to the volume and reads two blocks
of each drive. The only processes are those that lock memory as an ordinary user, and the one that touches the volume:
this one never does, since a dead volume would hold it for ever.
"""

from __future__ import annotations

import os
from typing import Any, Mapping, Sequence

from ..array.initramfs_check import check_images
from ..array.md_arrays import DEAD_STATES, HALTED_STATES, Array, find, read_arrays
from ..common.check_result import FAIL, PASS, SKIP, UNKNOWN, Check
from ..common.raid_levels import LEVELS
from ..common.training_part import CHECK_ID as TRAINING
from ..common.training_part import check_training, training_of
from ..gds.facts import read_gds_facts
from ..gds.md_udev_override import outdated
from ..gds.path_choice import MODES, OFF, current
from ..machine.drive_health import Reader, judge_health, judge_links, read_health
from ..machine.drives import Drive, read_drives
from ..machine.file_system import BUILT
from ..machine.memory import (
    SHMEM_ENABLED,
    HugePages,
    memlock_limit,
    read_hugepages,
    shm_bytes,
    shm_huge,
    shm_mode,
    shm_read_only,
    tmpfs_policies,
)
from ..machine.mounts import Mount, hidden_by, hiding, mount_at, plain_path, read_mounts
from ..memory.memlock_checks import Locker, kinds, lock_checks, lock_memory
from ..tuning.checks import tuning_checks
from ..tuning.deepspeed_aio import CHECK_ID as TUNED
from ..tuning.deepspeed_aio import check_tuned
from ..units import format_size_binary
from ..volume.immutable_flag import Unsupported, is_immutable
from ..volume.late_mount import check_boot
from ..volume.mount_options import hurting, without
from ..volume.named_volume import CHECK_ID as MOUNTED
from ..volume.named_volume import check_volume, unknown_uuid, uuid_of
from ..volume.offload_check import check_offload
from ..volume.volume_answers import ANSWERS, ask_volume
from ..volume.write_read_probe import Answer, Asker, ask

__all__ = ["FAIL", "PASS", "SKIP", "UNKNOWN", "Check", "run_checks"]
_STATE_REMEDIES = {**DEAD_STATES, **HALTED_STATES, "unknown": "`md/array_state` cannot be read: see `dmesg`"}

_NO_JOB_WRITES = "%s: no job can write there"


def run_checks(
    manifest: Mapping[str, Any],
    root: str = "/",
    health: Reader | None = None,
    locker: Locker | None = None,
    asker: Asker | None = None,
    writes: bool = True,
) -> list[Check]:
    """Every configuration check, in an order in which later checks depend on earlier ones.

    ``health`` asks a controller for its health; by default this machine's drives are asked, a recorded one's are not.
    ``locker`` locks memory, and ``asker`` asks the volume; by default that is tried on this machine, and not for a
    recorded one. ``writes``: whether a file may be written to the volume, if root asks.
    """
    mount = mount_at(manifest["filesystem"]["mount_point"], read_mounts(root))
    if manifest["array"] is None:
        checks = [check_volume(manifest["filesystem"], mount, root)]
    else:
        checks = _volume_checks(manifest, mount, root, health)
    # Nothing is written to another file system, and none is looked at.
    mounted = next(check.status for check in checks if check.id == MOUNTED)
    mount = mount if mounted == PASS else None
    answer = None
    if mount is not None:
        answer, answers = ask_volume(manifest, mount, asker or (ask if root == "/" else None), writes, root)
        checks += answers
    checks += _memory_checks(manifest["memory"], root)
    checks += tuning_checks(manifest, root)
    tries = locker or (lock_memory if root == "/" else None)
    if tries and manifest["memory"]["memlock"] is not None:
        checks += lock_checks(manifest["memory"]["memlock"], kinds(os.geteuid() == 0, root), tries, root)
    checks.append(check_offload(manifest, mount, answer, root, mounted == UNKNOWN))
    checks += _on_the_volume(manifest, answer, root)
    pending = manifest["reboot_required"]
    checks.append(
        _check(
            "node.reboot",
            not pending,
            "no reboot pending",
            "something that was asked for waits for a reboot" if pending else "no reboot pending",
            "reboot the node, then run `tunetool provision` again; `host_memory_reboot_ok: true` lets it "
            "reboot by itself",
        )
    )
    return checks


def _volume_checks(manifest: Mapping[str, Any], mount: Mount | None, root: str, health: Reader | None) -> list[Check]:
    """Array, drives and file system, where they were built here."""
    drives = {drive.name: drive for drive in read_drives(root)}
    array = find(read_arrays(root), manifest["array"]["uuid"])
    serials = [member["serial"] for member in manifest["array"]["members"]]
    members = [drive for drive in drives.values() if drive.serial in serials]
    checks = [*_array_checks(manifest["array"], array, drives), check_images(manifest["array"], root)]
    reader = health or (read_health if root == "/" else None)
    checks += [*judge_health(members, reader), judge_links(members)]
    checks += _filesystem_checks(manifest["filesystem"], array, mount, root)
    return [*checks, check_boot(manifest["filesystem"], root)]


def _on_the_volume(manifest: Mapping[str, Any], answer: Answer | None, root: str) -> list[Check]:
    """The checks that look at the volume, or may: none of them does where it does not answer."""
    point, training = manifest["filesystem"]["mount_point"], training_of(manifest)
    silent = answer is not None and answer.hangs
    checks = []
    if silent and manifest["gds"]["mode"] != OFF:
        checks.append(_not_looked_at("gds.mode"))
    else:
        checks += _gds_checks(manifest, root)
    if manifest.get("aio"):
        checks.append(_not_looked_at(TUNED) if silent else check_tuned(manifest["aio"], point, root))
    lies_there = training is not None and any(
        plain_path(path).startswith(plain_path(point) + "/")
        for path in (training.python, training.directory, training.ops_directory)
    )
    checks.append(_not_looked_at(TRAINING) if silent and lies_there else check_training(manifest, root))
    return checks


def _not_looked_at(identity: str) -> Check:
    return Check(
        identity, UNKNOWN, "as it was built", "not looked at: the volume does not answer", "see `%s`" % ANSWERS
    )


def _check(identity: str, holds: bool, expected: str, found: str, remedy: str) -> Check:
    return Check(identity, PASS if holds else FAIL, expected, found, "" if holds else remedy)


def _array_checks(wanted: Mapping[str, Any], array: Array | None, drives: Mapping[str, Drive]) -> list[Check]:
    name = "array `%s`" % wanted["name"]
    if array is None:
        present = {drive.serial for drive in drives.values()}
        gone = [member["serial"] for member in wanted["members"] if member["serial"] not in present]
        # In what was found: a scheduler's reason and the metrics have no room for the remedy.
        missing = ", ".join("`%s`" % serial for serial in gone)
        found = "not assembled; missing %s" % missing if gone else "not assembled"
        remedy = "reseat or replace the missing drives" if gone else "run `tunetool provision`, which assembles it"
        return [Check("array.assembled", FAIL, "%s with UUID %s" % (name, wanted["uuid"]), found, remedy)]
    checks = [
        _check("array.assembled", True, "%s with UUID %s" % (name, wanted["uuid"]), "`%s`" % array.device, ""),
        _check(
            "array.state",
            array.state not in _STATE_REMEDIES,
            "an active array",
            "state `%s`" % array.state,
            _STATE_REMEDIES.get(array.state, ""),
        ),
        _check(
            "array.name",
            array.name == wanted["name"],
            wanted["name"],
            str(array.name),
            "rebuild the initramfs after mdadm.conf: run `tunetool provision`, then reboot",
        ),
        _check("array.level", array.level == wanted["level"], wanted["level"], array.level, "run `tunetool provision`"),
        _check(
            "array.chunk",
            array.chunk_bytes == wanted["chunk_bytes"],
            format_size_binary(wanted["chunk_bytes"]),
            format_size_binary(array.chunk_bytes),
            "the array was made again with another chunk: run `tunetool provision`",
        ),
    ]
    return checks + [_members_check(wanted, array, drives)]


def _members_check(wanted: Mapping[str, Any], array: Array, drives: Mapping[str, Drive]) -> Check:
    expected = [member["serial"] for member in wanted["members"]]
    present = [drives[name].serial for name in array.members if name is not None and name in drives]
    gone = [serial for serial in expected if serial not in present]
    strange = [serial for serial in present if serial not in expected]
    text = "%d of %d members" % (len(expected) - len(gone), len(expected))
    if gone:
        text += "; missing %s" % ", ".join("`%s`" % serial for serial in gone)
    if strange:
        text += "; unknown %s" % ", ".join("`%s`" % serial for serial in strange)
    return _check(
        "array.members",
        not gone and not strange,
        "%d members by serial" % len(expected),
        text,
        "reseat that drive and reboot, or replace it and run `ansible-playbook tunetool.node.replace_drive`; "
        + LEVELS[wanted["level"]].loss,
    )


def _filesystem_checks(wanted: Mapping[str, Any], array: Array | None, mount: Mount | None, root: str) -> list[Check]:
    point = wanted["mount_point"]
    expected = "UUID %s at `%s`" % (wanted["uuid"], point)
    if mount is None:
        over = hidden_by(point, read_mounts(root))
        found = "`%s` is not a mount point%s" % (point, _bare(point, root))
        remedy = "run `mount %s`; if it fails, look at the array first" % point
        if over is not None:
            found, remedy = hiding(over, point)
        return [Check(MOUNTED, FAIL, expected, found, remedy)]
    same = array is not None and mount.device_number == array.device_number
    uuid = uuid_of(mount, root) if same else ""
    found = "%s from `%s`" % (mount.fs_type, mount.source)
    remedy = "unmount what hides `%s`, then run `mount %s`" % (point, point)
    status, another = FAIL, False
    if not same or mount.fs_type != wanted["type"] or (uuid and uuid != wanted["uuid"]):
        another = True
        found += ", another file system"
    elif mount.root != "/":
        found += ", but only its directory `%s`" % mount.root
        remedy = "run `umount %s`" % point + ("" if _lies_beneath(mount, root) else ", then `mount %s`" % point)
    elif not uuid:
        why, remedy = unknown_uuid(mount, root)
        status, found = UNKNOWN, "%s; %s" % (found, why)
    else:
        status, remedy = PASS, ""
    checks = [Check(MOUNTED, status, expected, found, remedy)]
    if another:
        # What it is like says nothing of the volume, and a cure of it would be for another one.
        names = ("filesystem.options", "filesystem.geometry")
        return checks + [Check(name, SKIP, "as built", "another file system lies there") for name in names]
    checks.append(_options_check(wanted["mount_options"], mount, point))
    geometry = BUILT.mounted_stripe(mount.options)
    stripe = (wanted["data_su_bytes"], wanted["data_su_bytes"] * wanted["data_sw"])
    checks.append(
        _check(
            "filesystem.geometry",
            geometry == stripe,
            "stripe unit %s, width %s" % tuple(format_size_binary(value) for value in stripe),
            "stripe unit %s, width %s" % tuple(format_size_binary(value) for value in geometry)
            if geometry
            else "no stripe geometry",
            "the file system does not fit the array: its data must move, then rebuild the scratch",
        )
    )
    return checks


def _options_check(wanted: Sequence[str], mount: Mount, point: str) -> Check:
    missing = [option for option in wanted if option not in mount.options]
    added = hurting(wanted, mount.options)
    remedy = "unmount and mount `%s`" % point
    if missing:
        remedy = "run `tunetool provision`, or " + remedy
    elif without(added, point):
        remedy = "run `%s`" % without(added, point)
    wrong = [
        "%s %s" % (word, ", ".join("`%s`" % option for option in options))
        for word, options in (("missing", missing), ("added", added))
        if options
    ]
    found = "; ".join(wrong) or "all set"
    return _check("filesystem.options", not wrong, ",".join(wanted), found, remedy)


def _lies_beneath(mount: Mount, root: str) -> bool:
    """Whether the whole file system, of which ``mount`` shows a directory, is mounted at the same place beneath it."""
    return any(
        (each.device_number, each.root, plain_path(each.mount_point))
        == (mount.device_number, "/", plain_path(mount.mount_point))
        for each in read_mounts(root)
    )


def _bare(point: str, root: str) -> str:
    """Text: where a write to the bare mount point would go, if that is known."""
    try:
        if is_immutable(os.path.join(root, point.lstrip("/"))):
            return "; it is immutable, so nothing is written to the root file system in its place"
    except (OSError, Unsupported):
        pass
    return ": what is written there lands on the root file system"


def _memory_checks(wanted: Mapping[str, Any], root: str) -> list[Check]:
    checks = []
    for entry in wanted["hugepages"]:
        pool = HugePages(entry["size_kib"], entry["count"], entry["numa_node"])
        count = read_hugepages(pool, root)
        where = "" if pool.numa_node is None else " on NUMA node %d" % pool.numa_node
        checks.append(
            _check(
                "memory.hugepages",
                count is not None and count >= pool.count,
                "%d pages of %s%s" % (pool.count, format_size_binary(pool.size_kib * 1024), where),
                "%s pages" % count,
                "memory is fragmented or taken: reboot the node, then run `tunetool provision` again",
            )
        )
    if wanted["shm_bytes"] is not None:
        checks.append(_shm_check(wanted["shm_bytes"], root))
    if "shm_huge" in wanted:
        checks.append(_shm_huge_check(wanted["shm_huge"], root))
    if wanted["memlock"] is not None:
        checks.append(_memlock_check(wanted["memlock"], root))
    return checks


def _shm_check(wanted: int, root: str) -> Check:
    size, mode = shm_bytes(root), shm_mode(root)
    found = format_size_binary(size) if size is not None else "no tmpfs at /dev/shm"
    holds, remedy = size is not None and size >= wanted, "run `mount -o remount /dev/shm`"
    # That remount mends the size too.
    if size is not None and shm_read_only(root):
        holds, found, remedy = False, _NO_JOB_WRITES % "mounted read-only", "run `mount -o remount,rw /dev/shm`"
    elif holds and mode is not None and mode & 0o003 != 0o003:
        holds, found, remedy = False, _NO_JOB_WRITES % ("mode %04o" % mode), "run `chmod 1777 /dev/shm`"
    return _check("memory.shm", holds, format_size_binary(wanted), found, remedy)


def _shm_huge_check(wanted: str, root: str) -> Check:
    live, (_, override) = shm_huge(root), tmpfs_policies(root)
    denied = override == "deny" and wanted != "never"
    found = "no tmpfs at /dev/shm" if live is None else "huge=%s" % live
    return _check(
        "memory.shm_huge",
        live == wanted and not denied,
        "huge=%s" % wanted,
        found + (", and the kernel denies it" if denied else ""),
        "write `never` to `/%s`" % SHMEM_ENABLED if denied else "run `mount -o remount /dev/shm`",
    )


def _memlock_check(wanted: str, root: str) -> Check:
    limit = memlock_limit(root)
    expected = "unlimited" if wanted == "unlimited" else format_size_binary(int(wanted) * 1024)
    if limit is None:
        return Check("memory.memlock", UNKNOWN, expected, "no limit shown", "is /proc mounted?")
    enough = limit == "unlimited" or (wanted != "unlimited" and int(limit) >= int(wanted) * 1024)
    return _check(
        "memory.memlock",
        enough,
        expected,
        "unlimited" if limit == "unlimited" else format_size_binary(int(limit)),
        "log in again, or restart the service: limits reach new sessions only",
    )


def _gds_checks(manifest: Mapping[str, Any], root: str) -> list[Check]:
    """Compare the path that I/O takes now with the one that was set up."""
    mode = manifest["gds"]["mode"]
    if mode == OFF:
        return [Check("gds.mode", SKIP, "nothing was set up", "off")]
    now = current(read_gds_facts(root, manifest["filesystem"]["mount_point"]))
    blockers = now.path(mode).blockers
    state = now.mode
    if blockers:
        state += ": " + "; ".join("%s (`%s`)" % (blocker.found, blocker.id) for blocker in blockers)
    checks = [
        _check(
            "gds.mode",
            MODES.index(now.mode) <= MODES.index(mode),
            mode,
            state,
            "; ".join(dict.fromkeys(blocker.remedy for blocker in blockers)) or "run `tunetool provision`",
        )
    ]
    if outdated(root):
        checks.append(
            Check(
                "gds.md_rule",
                FAIL,
                "the udev rule for arrays made from the distribution's own",
                "the distribution has changed its rule since",
                "run `tunetool provision`",
            )
        )
    return checks
