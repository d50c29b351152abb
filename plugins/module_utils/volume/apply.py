"""Brings the file system on the array, its mount and its surroundings to what is asked; compares first."""

from __future__ import annotations

import os
from typing import Any, Mapping

from ..array.create import Begun, begun, begun_path, members_by_serial, note_formatting, refuse_unless_blank
from ..array.md_arrays import Array
from ..common.commands import CommandError, run
from ..common.drift import Ledger, built_manifest, forget
from ..common.files import content, replace_file
from ..common.manifest import MANIFEST_PATH, each_volume
from ..common.raid_levels import SINGLE
from ..common.refusal import Refusal
from ..machine.device_users import users_of
from ..machine.drive_contents import UnreadableDevice, plain_uuid, read_signatures
from ..machine.drives import Drive
from ..machine.file_system import BUILT, Geometry, wipe_half_made
from ..machine.fstab import FSTAB, FstabConflict, entries_at, with_entry, without_entry
from ..machine.held_drives import held
from ..machine.mounts import read_mounts
from ..machine.unlabelled import look, look_at_ends
from ..units import format_size_binary
from .mount_options import at_mount_only, like, shown_options, unwanted
from .mount_point import MountPoint, reload_systemd
from .volume_values import SETTINGS, options_of

OF_THE_ARRAY: dict[str, Any] = {
    "array": {"type": "str", "required": True},
    "array_uuid": {"type": "str", "default": ""},
    "chunk_bytes": {"type": "int", "required": True},
    "members": {"type": "int", "required": True},
    "adopt": {"type": "bool", "default": False},
    "new_array": {"type": "bool", "default": False},
    "project_quota": {"type": "bool", "default": False},
    "volumes": {"type": "list", "elements": "dict", "default": []},
}
WISHES = {**OF_THE_ARRAY, **SETTINGS}
ARGUMENTS = {**OF_THE_ARRAY, "settings": {"type": "dict", "required": True, "options": SETTINGS}}
"""Arguments of M(tunetool.node.scratch_filesystem)."""


class Volume(MountPoint):
    """The whole job: the steps in order, each comparing before it acts."""

    def __init__(self, wanted: Mapping[str, Any], ledger: Ledger, array: Array | None, root: str = "/") -> None:
        super().__init__(wanted, ledger, array, root)
        self.geometry: Geometry = BUILT.geometry(wanted["chunk_bytes"], wanted["members"])
        self.built: Mapping[str, Any] = (ledger.manifest or {}).get("filesystem") or {}
        self.of_one_drive = array is not None and array.level == SINGLE.name
        self.known: set[str] = set()
        """Present and former UUIDs of the volume: a line in fstab with one of them is ours."""

    def all(self) -> tuple[str | None, str | None]:
        """Make it, write fstab, mount it, make the directory. Returns the UUID (None: not made yet) and the
        directory."""
        bare = self.bare_mount_point()
        uuid = self.make()
        if bare is not None:
            self.protect(bare)
        self.remember(uuid)
        self.late(uuid)
        self.services()
        self.mount()
        self.label()
        return uuid, self.offload()

    def make(self) -> str | None:
        """UUID of the file system on the array, made now if the array held nothing; None if it would be made."""
        name = self.wanted["array"]
        if self.array is None and self.built:
            return str(self.built["uuid"])  # it is in an array that is not assembled yet
        if self.array is None:
            # On a blank node the array would be new, and so would all that follows.
            self.ledger.note("file system on %s" % name, "", BUILT.described(self.geometry))
            return None
        signatures = read_signatures([self.array.device])
        kinds = {signature.type for signature in signatures}
        if self.of_one_drive and kinds == {BUILT.type} and not self.built and signatures[0].uuid != self.array.uuid:
            kinds = {"%s that is not this volume's" % BUILT.type}
        half = (
            kinds == {BUILT.type}
            and self._mount() is None
            and BUILT.half_made(self._path(self.array.path), self.wanted["label"])
        )
        if (not signatures or half) and os.path.exists(self._path(MANIFEST_PATH)):
            hint = (
                "nothing is made over it: `%s` looks for what was there; to start again without it, "
                "`ansible-playbook tunetool.node.teardown`, then `tunetool provision`" % (BUILT.look % self.array.path)
            )
            expected = "%s UUID %s" % (BUILT.type, self.built.get("uuid", "of the manifest"))
            refusal = "%s of a built node holds nothing. hint: %s" % (self.what, hint)
            self.ledger.cannot("filesystem.type", expected, "nothing", hint, refusal)
            return self.built.get("uuid")
        if not signatures:
            self._refuse_unless_blank(self.array)
        if not signatures or half:
            before = "%s that mkfs did not finish\n" % BUILT.type if half else ""
            if not self.ledger.note("file system on %s" % name, before, BUILT.described(self.geometry)):
                return None
            if self._noted(self.array) is not None:
                note_formatting(str(self.array.uuid), self.root, self.volume)
            self._mkfs(self.array, half)
            forget(self._path(begun_path(self.volume)))
            signatures = read_signatures([self.array.device])
        elif kinds != {BUILT.type}:
            shown = ", ".join(str(signature) for signature in signatures)
            hint = "nothing was changed; move the data away first"
            refusal = "%s holds %s. hint: %s" % (self.what, shown, hint)
            self.ledger.cannot("filesystem.type", BUILT.type, shown, hint, refusal)
            return self.built.get("uuid")
        self._compare_geometry(self.array)
        if self.ledger.acting and self._noted(self.array) is not None:
            # Somebody made the file system, or a run was cut off after it had: no longer an array with nothing in it.
            forget(self._path(begun_path(self.volume)))
        return self._uuid(str(signatures[0].uuid))

    def _mkfs(self, array: Array, half: bool) -> None:
        if not self.of_one_drive:
            if half:
                wipe_half_made(array.path)
            BUILT.mkfs(array.path, self.geometry, self.wanted["label"])
            return
        drive = self._drive(array)
        # The name stays this drive's, and it was blank just now.
        with held([drive]):
            if half:
                wipe_half_made(drive.path)
            else:
                refuse_unless_blank([drive], deep=True)
            # By the UUID, which was noted, a drive is known as ours from the first byte on.
            BUILT.mkfs(drive.path, self.geometry, self.wanted["label"], array.uuid)

    def _drive(self, array: Array) -> Drive:
        (drive,) = members_by_serial([self.wanted["serial"]])
        if drive.name != array.device:
            raise Refusal(
                "drive `%s` is `%s` by now, and was `%s`. hint: nothing was made on it; run `tunetool provision` again"
                % (drive.serial, drive.name, array.device)
            )
        return drive

    def _refuse_unless_blank(self, array: Array) -> None:
        """Read all of the array, whoever made it. Only where it holds what it held when it was made here, there may be
        something: what the drives held that a plan or a teardown gave up, such as the groups of an old XFS. Where an
        mkfs of ours was cut off, only the ends tell. Raises ``Refusal``.
        """
        if self.of_one_drive:
            refuse_unless_blank([self._drive(array)], deep=True)
            return
        path = "/dev/" + array.device
        noted = self._noted(array)
        if self.wanted["adopt"] and not (noted or self.wanted["new_array"]):
            raise Refusal(
                "array `%s` was not made here, and holds no file system that libblkid knows. hint: nothing was made "
                "over it; make its %s yourself, or ask without `raid_array_adopt` for one on an array that is blank"
                % (self.wanted["array"], BUILT)
            )
        problem = piece = None
        try:
            if noted is not None and noted.lay:
                problem = noted.problem(array.device, self._path(path))
            elif noted is not None and noted.formatting:
                piece = look_at_ends(self._path(path))
            else:
                piece = look(self._path(path), deep=True)
        except OSError as error:
            raise UnreadableDevice("`%s` cannot be read: %s" % (path, error.strerror)) from error
        if problem is not None:
            raise Refusal(
                "array `%s` %s, before it had a file system. hint: nothing was made over it; save what is there, then "
                "`blkdiscard %s` makes it blank, and `rm %s` forgets what it held"
                % (self.wanted["array"], problem, array.path, begun_path(self.volume))
            )
        if piece is not None:
            raise Refusal(
                "array `%s` holds %s at %s. hint: nothing was made over it; save what is there, then "
                "`blkdiscard %s` makes it blank"
                % (self.wanted["array"], piece.kind, format_size_binary(piece.offset), array.path)
            )
        user = users_of([array.device]).get(array.device)
        if user is not None:
            raise Refusal(
                "array `%s` is in use: %s. hint: nothing was made over it; end its user" % (self.wanted["array"], user)
            )

    def _noted(self, array: Array) -> Begun | None:
        """What is noted of this array, if it was made here and got no file system yet."""
        noted = begun(self.root, self.volume)
        return noted if noted is not None and plain_uuid(noted.uuid) == plain_uuid(array.uuid) else None

    def _compare_geometry(self, array: Array) -> None:
        mount_points = [
            mount.mount_point for mount in read_mounts(self.root) if mount.device_number == array.device_number
        ]
        geometry = BUILT.read_geometry(mount_points[0] if mount_points else array.path)
        hint = (
            "geometry cannot be changed in place. Save the data, `ansible-playbook tunetool.node.teardown`, "
            "then `tunetool provision`; or ask for "
            "what is there"
        )
        wrong = self.geometry.apart(geometry)
        refusal = "the file system on `%s` does not fit the array: %s. hint: nothing was changed; %s" % (
            self.wanted["array"],
            "; ".join("%s: expected %s, found %s" % (name.replace("_", " "), *values) for name, *values in wrong),
            hint,
        )
        for name, expected, actual in wrong:
            self.ledger.cannot("filesystem." + name, expected, actual, hint, refusal)

    def _uuid(self, uuid: str) -> str:
        expected = str(self.built.get("uuid", uuid))
        self.known |= {expected, uuid}
        if expected == uuid:
            return uuid
        if self.wanted["adopt"]:
            self.ledger.differs("filesystem.uuid", expected, uuid, "file system", expected + "\n", uuid + "\n")
            return uuid
        self.ledger.cannot(
            "filesystem.uuid",
            expected,
            uuid,
            "somebody made it again. "
            + (
                "unmount it; `xfs_admin -U %s %s` gives it the UUID that is noted, and keeps what it holds"
                % (expected, self.array.path if self.array else "DEVICE")
                if self.volume
                else "`raid_array_adopt: true` takes it as it is, with what it holds"
            ),
            "",
        )
        return expected

    def remember(self, uuid: str | None) -> None:
        """Write the volume's line in /etc/fstab, by UUID."""
        # A node whose array is gone must still boot: nofail, and a bounded wait for the device.
        timeout = "x-systemd.device-timeout=" + self.wanted["device_timeout"]
        options = ",".join([*options_of(self.wanted), "nofail", timeout])
        before = content(self._path(FSTAB))
        ours = {"UUID=" + known for known in self.known | former_uuid(self.root)}
        specs = {entry.spec for entry in entries_at(before, self.point)}
        try:
            after = with_entry(
                before, "UUID=" + (uuid or "(new)"), self.point, BUILT.type, options, replace_any_spec=specs <= ours
            )
        except FstabConflict as error:
            hint = "remove the line that is not the volume's"
            refusal = "%s. hint: %s" % (error, hint)
            self.ledger.cannot("fstab[%s]" % self.point, "one line for it", str(error), hint, refusal)
            return
        if self.ledger.file_differs("fstab[%s]" % self.point, FSTAB, before, after):
            replace_file(self._path(FSTAB), after)
            reload_systemd()

    def mount(self) -> None:
        """Mount the volume at its mount point with its options."""
        asked = shown_options(options_of(self.wanted))
        mount = self._mount()
        if mount is None:
            if self.blocked:
                return
            what = "mount " + self.point
            if self.ledger.differs("mount", "`%s`" % self.point, "not mounted", what, "", ",".join(asked)):
                os.makedirs(self.point, mode=0o755, exist_ok=True)
                try:
                    run(["mount", self.point])
                except CommandError:
                    # The unit that mounts a late volume may have been first: this run assembled the array.
                    if self._mount() is None:
                        raise
                self._refuse_unless_set(asked)
            return
        missing = [option for option in asked if option not in mount.options]
        fixed = [option for option in missing if at_mount_only(option)]
        if fixed:
            hint = (
                "%s takes it only when it is mounted: stop what uses it, `umount %s`, run `tunetool provision` again"
                % (BUILT, self.point)
            )
            refusal = "`%s` is mounted without %s. hint: %s" % (
                self.point,
                ", ".join("`%s`" % option for option in fixed),
                hint,
            )
            self.ledger.cannot(
                "mount.options", ",".join(fixed), like(fixed, mount.options) or "none of them", hint, refusal
            )
        strange = unwanted(asked, mount.options)
        live = [option for option in missing if option not in fixed] + list(strange.values())
        if live:
            options_now = like(live, mount.options) or "none of them"
            if self.ledger.differs(
                "mount.options",
                ",".join(live),
                options_now,
                "mount " + self.point,
                ",".join(mount.options) + "\n",
                ",".join([option for option in mount.options if option not in options_now.split(",")] + live) + "\n",
            ):
                run(["mount", "-o", "remount," + ",".join(live), self.point])
                self._refuse_unless_set(asked)

    def _refuse_unless_set(self, asked: list[str]) -> None:
        mount = self._mount()
        missing = [option for option in asked if mount is None or option not in mount.options]
        if missing:
            raise Refusal(
                "`%s` is mounted without %s. hint: see `dmesg`; this kernel did not take them"
                % (self.point, ", ".join("`%s`" % option for option in missing))
            )

    def label(self) -> None:
        """Change the label while mounted. An adopted file system keeps its own: others may know it by that."""
        if self.array is None or self.wanted["adopt"]:
            return
        signatures = [signature for signature in read_signatures([self.array.device]) if signature.type == BUILT.type]
        if not signatures:
            return
        wanted, label = self.wanted["label"], signatures[0].label or ""
        if self.ledger.differs("filesystem.label", quoted(wanted), quoted(label), "label", label + "\n", wanted + "\n"):
            BUILT.set_label(self.point, wanted)
            now = read_signatures([self.array.device])[0].label or ""
            if now != wanted:
                raise Refusal("the label is `%s`, not `%s`. hint: see `dmesg`" % (now, wanted))


def former_uuid(root: str = "/") -> set[str]:
    """The UUIDs of the volumes that the manifest names. Their lines in fstab are ours."""
    manifest = built_manifest(root.rstrip("/") + MANIFEST_PATH)
    return {str(volume["filesystem"]["uuid"]) for _, volume in each_volume(manifest)} if manifest else set()


def forget_volume(root: str = "/") -> None:
    """Remove the manifest of a volume whose array is made again, and first its line in fstab: without the manifest
    nobody knows that the line is ours, and it would stop the new volume."""
    path = os.path.join(root, FSTAB.lstrip("/"))
    for uuid in former_uuid(root):
        before = content(path)
        after = without_entry(before, uuid)
        if before != after:
            replace_file(path, after)
    forget(root.rstrip("/") + MANIFEST_PATH)


def quoted(label: str) -> str:
    """A label for people, who cannot see an empty one."""
    return "`%s`" % label if label else "none"
