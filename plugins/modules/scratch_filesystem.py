#!/usr/bin/python
# Copyright: the tunetool authors
# Apache License 2.0 (see LICENSE)
"""Ansible module: XFS aligned to its array, mounted by UUID, with the directory that jobs write to."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: scratch_filesystem
short_description: XFS aligned to a RAID0 array, mounted by UUID, with a directory for offloading
version_added: "0.1.0"
description:
  - Makes XFS on an array that holds nothing, with the stripe geometry given explicitly and read back.
  - Keeps an XFS whose geometry is as asked. Refuses anything else; never passes C(-f) to mkfs.
  - Mounts it by UUID through /etc/fstab, so that a missing array neither blocks nor hangs a boot.
  - Makes the bare mount point immutable, so that nobody writes to the root file system when the volume is absent.
  - Keeps named services from starting without the volume.
options:
  array:
    description: Name of the md array, C(/dev/md/NAME).
    type: str
    required: true
  chunk_bytes:
    description: Chunk of the array in bytes; the data stripe unit.
    type: int
    required: true
  members:
    description: Number of members of the array; the stripe width.
    type: int
    required: true
  mount_point:
    description: Where it is mounted.
    type: path
    required: true
  mount_options:
    description: Mount options that the kernel knows.
    type: list
    elements: str
    default: [noatime, logbufs=8, logbsize=256k]
  device_timeout:
    description: How long a boot waits for the array before it goes on without it, as systemd.time(7) writes it.
    type: str
    default: 30s
  label:
    description: Label of the file system, at most 12 characters.
    type: str
    default: nvme_raid0
  offload_dir:
    description: Directory to make on it, absolute and under O(mount_point); empty for none.
    type: str
    default: ""
  offload_owner:
    description: Owner of that directory.
    type: str
    default: root
  offload_group:
    description: Group of that directory.
    type: str
    default: root
  offload_mode:
    description: Mode of that directory, octal digits.
    type: str
    default: "1777"
  protect_mount_point:
    description:
      - Whether the bare mount point is immutable (C(chattr +i)); V(false) takes the flag away.
      - A file system without that flag (tmpfs, overlay) gives a warning.
    type: bool
    default: true
  services:
    description:
      - Units of systemd that need the volume, such as V(slurmd.service). They start after it and not without it.
        Drop-ins of units that are no longer named are removed.
    type: list
    elements: str
    default: []
author:
  - The tunetool authors (@tunetool)
attributes:
  check_mode:
    description: Says what would be done without doing it.
    support: full
  diff_mode:
    description: Shows the file system, /etc/fstab, the mount, the directories and the drop-ins before and after.
    support: full
"""

EXAMPLES = r"""
- name: Put XFS on the array
  tunetool.node.scratch_filesystem:
    array: nvme_raid0
    chunk_bytes: 1048576
    members: 8
    mount_point: /mnt/nvme_raid0
    offload_dir: /mnt/nvme_raid0/deepspeed_offload
"""

RETURN = r"""
filesystem:
  description: The file system as the manifest holds it. C(uuid) is null where check mode predicts it.
  returned: success
  type: dict
offload_dir:
  description: The directory, or null.
  returned: success
  type: str
"""

import grp  # noqa: E402  (Ansible wants the documentation first)
import os  # noqa: E402
import pwd  # noqa: E402
import stat  # noqa: E402
from typing import Any  # noqa: E402

from ansible.module_utils.basic import AnsibleModule  # noqa: E402

from ..module_utils.arrays import Array, read_arrays  # noqa: E402
from ..module_utils.building import discard_half_made, half_made, make_xfs  # noqa: E402
from ..module_utils.checks import shown_options  # noqa: E402
from ..module_utils.commands import CommandError, run  # noqa: E402
from ..module_utils.contents import UnreadableDevice, read_signatures  # noqa: E402
from ..module_utils.dropins import ForeignDropIn, apply, changes, units_problem  # noqa: E402
from ..module_utils.files import content, replace_file  # noqa: E402
from ..module_utils.fstab import FstabConflict, with_entry  # noqa: E402
from ..module_utils.geometry import (  # noqa: E402
    LABEL_MAX,
    Geometry,
    differences,
    parse_xfs_info,
    wanted_geometry,
)
from ..module_utils.immutable import (  # noqa: E402
    Directory,
    Unsupported,
    look,
    look_beneath,
    set_immutable,
    set_immutable_beneath,
)
from ..module_utils.lock import Locked, only_one  # noqa: E402
from ..module_utils.mounts import mount_at, read_mounts  # noqa: E402
from ..module_utils.refusal import Refusal  # noqa: E402

FSTAB = "/etc/fstab"


class Job:
    """The steps in order, each comparing before it acts; collects the diff as it goes."""

    def __init__(self, module: AnsibleModule) -> None:
        self.wanted: dict[str, Any] = module.params
        self.check_mode: bool = module.check_mode
        self.geometry: Geometry = wanted_geometry(self.wanted["chunk_bytes"], self.wanted["members"])
        self.diff: list[dict[str, str]] = []
        self.warnings: list[str] = []

    def note(self, what: str, before: str, after: str) -> None:
        """Remember a difference; equal texts are none."""
        if before != after:
            self.diff.append({"before_header": what, "after_header": what, "before": before, "after": after})

    def make(self, array: Array) -> str:
        """UUID of the file system on the array, made now if the array held nothing. ``(new)`` in check mode."""
        signatures = read_signatures([array.device])
        kinds = {signature.type for signature in signatures}
        half = bool(signatures) and half_made(array.path, self.wanted["label"])
        if not signatures or half:
            before = "xfs that mkfs did not finish\n" if half else ""
            self.note("file system on %s" % self.wanted["array"], before, describe(self.geometry))
            if self.check_mode:
                return "(new)"
            if half:
                discard_half_made(array)
            make_xfs(array, self.geometry, self.wanted["label"])
            signatures = read_signatures([array.device])
        elif kinds != {"xfs"}:
            raise Refusal(
                "array `%s` holds %s. hint: nothing was changed; move the data away first"
                % (self.wanted["array"], ", ".join(str(signature) for signature in signatures))
            )
        # xfs_info reads a mounted file system through its mount point, an unmounted one through its device.
        found = parse_xfs_info(run(["xfs_info", self.mounted_from(array) or array.path]).stdout)
        wrong = differences(self.geometry, found)
        if wrong:
            raise Refusal(
                "the file system on `%s` does not fit the array: %s. hint: nothing was changed; geometry cannot be "
                "mended in place" % (self.wanted["array"], "; ".join(wrong))
            )
        return str(signatures[0].uuid)

    def refuse_if_elsewhere(self, array: Array) -> None:
        """An adopted array stays where its users know it: a second mount would be a second door to one volume."""
        point = self.wanted["mount_point"]
        places = [mount.mount_point for mount in read_mounts() if mount.device_number == array.device_number]
        if places and point not in places:
            raise Refusal(
                "array `%s` is mounted at `%s`, not at `%s`. hint: set `scratch_filesystem_mount_point: %s`, or "
                "unmount it first" % (self.wanted["array"], places[0], point, places[0])
            )

    def mounted_from(self, array: Array) -> str | None:
        """A mount point of the array, or None."""
        for mount in read_mounts():
            if mount.device_number == array.device_number:
                return mount.mount_point
        return None

    def remember(self, uuid: str) -> None:
        """The line in /etc/fstab, by UUID."""
        options = ",".join(self.fstab_options())
        before = content(FSTAB)
        after = with_entry(before, "UUID=" + uuid, self.wanted["mount_point"], "xfs", options)
        self.note(FSTAB, before, after)
        if before != after and not self.check_mode:
            replace_file(FSTAB, after)
            reload_systemd()

    def fstab_options(self) -> list[str]:
        """A node whose array is gone must still boot: nofail, and a bounded wait for the device."""
        timeout = "x-systemd.device-timeout=" + self.wanted["device_timeout"]
        return [*self.wanted["mount_options"], "nofail", timeout]

    def look_at_place(self, array: Array | None) -> Directory | None:
        """The bare mount point; None, with a warning, where its flag cannot be read. Refuses a place that is taken."""
        point = self.wanted["mount_point"]
        mount = mount_at(point, read_mounts())
        if mount is not None and (array is None or mount.device_number != array.device_number):
            raise Refusal("`%s` is already a mount of `%s`. hint: unmount it first" % (point, mount.source))
        if mount is None and os.path.lexists(point):
            if os.path.islink(point) or not os.path.isdir(point):
                raise Refusal("`%s` is not a directory. hint: name the directory itself" % point)
            entries = tuple(sorted(os.listdir(point)))
            if entries:
                raise Refusal(
                    "`%s` is not mounted and holds %s, which the mount would hide. hint: nothing was changed; move "
                    "that away first" % (point, named(entries))
                )
        try:
            bare = look(point) if mount is None else look_beneath(point)
        except Unsupported as error:
            self.unprotected(error)
            return None
        if mount is not None and bare.entries:
            self.warnings.append("the mount at `%s` hides %s" % (point, named(bare.entries)))
        return bare

    def unprotected(self, error: Unsupported) -> None:
        """Where there is no such flag, the owner must know; it is no reason to build nothing."""
        if self.wanted["protect_mount_point"]:
            self.warnings.append("the bare mount point cannot be protected: %s" % error)

    def protect(self, bare: Directory) -> None:
        """The bare mount point, before it is mounted over for the first time: immutable, if so wanted."""
        point, wanted = self.wanted["mount_point"], self.wanted["protect_mount_point"]

        def line(immutable: bool) -> str:
            return "%s, %s\n" % (point, "immutable" if immutable else "writable")

        before, after = line(bare.immutable) if bare.exists else "", line(wanted)
        if before != after and not self.check_mode:
            try:
                if mount_at(point, read_mounts()) is not None:
                    set_immutable_beneath(point, wanted)
                else:
                    os.makedirs(point, mode=0o755, exist_ok=True)
                    set_immutable(point, wanted)
            except Unsupported as error:
                self.unprotected(error)
                after = line(bare.immutable)
        self.note("bare mount point", before, after)

    def services(self) -> None:
        """The drop-ins of the services that need the volume."""
        found = changes(self.wanted["services"], self.wanted["mount_point"])
        for change in found:
            self.note(change.path, change.before, change.after)
            if not self.check_mode:
                apply(change)
        if found and not self.check_mode:
            reload_systemd()

    def mount(self) -> None:
        """Mounted at its place with its options, or a refusal."""
        point = self.wanted["mount_point"]
        mount = mount_at(point, read_mounts())
        options = shown_options(self.wanted["mount_options"])
        missing = [option for option in options if mount is None or option not in mount.options]
        if mount is not None and not missing:
            return
        self.note("mount " + point, ",".join(mount.options) if mount else "", ",".join(options))
        if self.check_mode:
            return
        if mount is None:
            os.makedirs(point, mode=0o755, exist_ok=True)
            run(["mount", point])
        else:
            run(["mount", "-o", "remount," + ",".join(options), point], accept=(0, 32))
        mount = mount_at(point, read_mounts())
        missing = [option for option in options if mount is None or option not in mount.options]
        if missing:
            raise Refusal(
                "`%s` is mounted without %s. hint: unmount it, then run this again; XFS takes these only when it is "
                "mounted" % (point, ", ".join("`%s`" % option for option in missing))
            )

    def offload(self) -> str | None:
        """The directory with its owner and mode."""
        path = self.wanted["offload_dir"]
        if not path:
            return None
        owner = pwd.getpwnam(self.wanted["offload_owner"])
        group = grp.getgrnam(self.wanted["offload_group"])
        mode = int(self.wanted["offload_mode"], 8)
        after = "%s %s:%s %04o\n" % (path, owner.pw_name, group.gr_name, mode)
        before = ""
        mounted = mount_at(self.wanted["mount_point"], read_mounts()) is not None
        if mounted and os.path.isdir(path):
            found = os.stat(path)
            before = "%s %s:%s %04o\n" % (path, name_of(found.st_uid), group_of(found.st_gid), found.st_mode & 0o7777)
        self.note("offload directory", before, after)
        if before != after and not self.check_mode:
            os.makedirs(path, exist_ok=True)
            if stat.S_ISLNK(os.lstat(path).st_mode):
                raise Refusal("`%s` is a symbolic link. hint: name the directory itself" % path)
            os.chown(path, owner.pw_uid, group.gr_gid)
            os.chmod(path, mode)
        return str(path)


def reload_systemd() -> None:
    """Let systemd read its files again, where it runs."""
    if os.path.isdir("/run/systemd/system"):
        run(["systemctl", "daemon-reload"])


def named(entries: tuple[str, ...]) -> str:
    """How many, and the first three by name."""
    shown = ", ".join("`%s`" % entry for entry in entries[:3])
    return "%d %s: %s%s" % (
        len(entries),
        "entry" if len(entries) == 1 else "entries",
        shown,
        " ..." if len(entries) > 3 else "",
    )


def name_of(uid: int) -> str:
    """Login name, or the number."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def group_of(gid: int) -> str:
    """Group name, or the number."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def describe(geometry: Geometry) -> str:
    """The geometry as a line, for the diff."""
    return "xfs su=%d sw=%d, log su=%d\n" % (geometry.data_su_bytes, geometry.data_sw, geometry.log_su_bytes)


def problem_with(wanted: dict[str, Any], log_su_bytes: int) -> str | None:
    """What is impossible about the arguments, before anything is looked at."""
    point = wanted["mount_point"]
    if not point.startswith("/") or os.path.normpath(point) in ("/", "/usr", "/etc", "/var", "/boot", "/home"):
        return "mount point `%s` is not a place for scratch. hint: use `/mnt/nvme_raid0`" % point
    if len(wanted["label"]) > LABEL_MAX:
        return "label `%s` is longer than %d characters. hint: shorten it" % (wanted["label"], LABEL_MAX)
    if wanted["offload_dir"] and not wanted["offload_dir"].startswith(os.path.normpath(point) + "/"):
        return "offload directory `%s` is not under `%s`. hint: put it there" % (wanted["offload_dir"], point)
    sizes = {"k": 1024, "": 1}
    for option in wanted["mount_options"]:
        if option in ("barrier", "nobarrier"):
            return "mount option `%s` left XFS with Linux 4.19. hint: drop it" % option
        if option.startswith("logbsize="):
            text = option.partition("=")[2]
            digits = text.rstrip("k")
            size = int(digits) * sizes[text[len(digits) :]] if digits.isdigit() and text[len(digits) :] in sizes else 0
            if size < log_su_bytes or size % log_su_bytes or size > 256 * 1024:
                return "`%s` does not mount with a log stripe unit of %d. hint: use `logbsize=256k`" % (
                    option,
                    log_su_bytes,
                )
    return None


def converge(job: Job) -> tuple[str, str | None]:
    """Find the array, then make, remember, mount and fill it in this order; returns UUID and offload directory."""
    name = job.wanted["array"]
    array = next((array for array in read_arrays() if array.name == name), None)
    if array is None and not job.check_mode:
        raise Refusal("array `%s` is not assembled. hint: run raid_array first" % name)
    bare = job.look_at_place(array)
    if array is not None:
        job.refuse_if_elsewhere(array)
        uuid = job.make(array)
    else:
        # On a blank node the array would be new, and so would all that follows.
        job.note("file system on %s" % name, "", describe(job.geometry))
        uuid = "(new)"
    if bare is not None:
        job.protect(bare)
    job.remember(uuid)
    job.services()
    job.mount()
    return uuid, job.offload()


def main() -> None:
    """Check the arguments, do the job, report."""
    module = AnsibleModule(
        argument_spec={
            "array": {"type": "str", "required": True},
            "chunk_bytes": {"type": "int", "required": True},
            "members": {"type": "int", "required": True},
            "mount_point": {"type": "path", "required": True},
            "mount_options": {
                "type": "list",
                "elements": "str",
                "default": ["noatime", "logbufs=8", "logbsize=256k"],
            },
            "device_timeout": {"type": "str", "default": "30s"},
            "label": {"type": "str", "default": "nvme_raid0"},
            "offload_dir": {"type": "str", "default": ""},
            "offload_owner": {"type": "str", "default": "root"},
            "offload_group": {"type": "str", "default": "root"},
            "offload_mode": {"type": "str", "default": "1777"},
            "protect_mount_point": {"type": "bool", "default": True},
            "services": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    job = Job(module)
    problem = problem_with(module.params, job.geometry.log_su_bytes) or units_problem(module.params["services"])
    if problem:
        module.fail_json(msg=problem)
    try:
        with only_one():
            uuid, offload_dir = converge(job)
    except (CommandError, UnreadableDevice, Refusal, FstabConflict, ForeignDropIn, Locked, ValueError) as error:
        module.fail_json(msg=str(error), diff=job.diff)
    except KeyError as error:
        module.fail_json(msg="offload directory: %s. hint: make the user or group first" % error.args[0])
    else:
        for warning in job.warnings:
            module.warn(warning)
        module.exit_json(
            changed=bool(job.diff),
            diff=job.diff,
            filesystem={
                "uuid": None if uuid == "(new)" else uuid,
                "type": "xfs",
                "mount_point": module.params["mount_point"],
                "data_su_bytes": job.geometry.data_su_bytes,
                "data_sw": job.geometry.data_sw,
                "log_su_bytes": job.geometry.log_su_bytes,
                "mount_options": shown_options(module.params["mount_options"]),
            },
            offload_dir=offload_dir,
        )


if __name__ == "__main__":
    main()
