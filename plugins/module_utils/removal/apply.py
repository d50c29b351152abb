"""Removes the scratch volume step by step; a power cut may follow any step."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Mapping, Sequence

from ..array.create import begun_path, members_by_serial
from ..array.drive_volumes import note
from ..array.initramfs_check import mdadm_conf_path, renew
from ..array.mdadm_conf import conf_without_array
from ..common.commands import CommandError, run
from ..common.drift import Ledger, forget
from ..common.files import content, replace_file
from ..common.manifest import MANIFEST_PATH
from ..common.refusal import Refusal
from ..ephemeral import boot_unit
from ..health import health_units
from ..job_scratch import scratch_units
from ..job_scratch.program import jobs_of_node
from ..machine.device_users import users_of
from ..machine.drive_contents import claim_problem, read_signatures, use_problems
from ..machine.drives import disks_under, read_drives
from ..machine.file_system import BUILT
from ..machine.fstab import FSTAB, without_entry
from ..machine.held_drives import held, refuse, untouched
from ..machine.mounts import Mount, described, hidden_by, mount_at, read_mounts
from ..machine.volume_users import occupants
from ..plan.plan_file import TEARDOWN
from ..volume import late_mount
from ..volume.immutable_flag import Unsupported, set_immutable
from ..volume.mount_point import reload_systemd
from ..volume.unit_dropins import apply, changes
from . import erasure
from .decision import Place, Removal, Volume
from .facts import shown
from .wipe_drives import contents_text, refuse_unless_wipeable, wipe


def remove_remains(program: str, acting: bool) -> list[dict[str, str]]:
    """Remove what a teardown would, where no volume is left to remove. Returns the diff.

    With a manifest both stay: the health check checks the node against that, and jobs may use a volume of the owner's.
    Raises ``CommandError`` and ``OSError``.
    """
    if os.path.lexists(MANIFEST_PATH):
        return []
    return [*health_units.remove(program, acting), *scratch_units.converge(program, {}, "", acting)]


def names_of_remains() -> str:
    """What that is, for people."""
    present = [
        name
        for name, units in (("the health check", health_units), ("`tunetool-scratch`", scratch_units))
        if units.installed()
    ]
    return " and ".join(present) or "the health check"


class Job:
    """The steps in order; each notes in the ledger what it changes, and changes it if that acts."""

    def __init__(self, removal: Removal, volume: Volume, job: str, program: str, ledger: Ledger) -> None:
        self.removal = removal
        self.volume = volume
        self.teardown = job == TEARDOWN
        self.program = program
        self.ledger = ledger
        self.wiped: list[str] = []

    @property
    def places(self) -> Sequence[Place]:
        """Where what goes is mounted."""
        volume = self.volume
        whole = Place(volume.mount_point, volume.filesystem_uuid, self.removal.arrays, array_uuid=volume.uuid)
        return self.removal.places or [whole]

    @property
    def array_uuids(self) -> list[str]:
        """Of the arrays that go."""
        return [place.array_uuid for place in self.places if place.array_uuid]

    def occupants(self) -> list[str]:
        """What uses the volume, a line each."""
        point = self.volume.mount_point
        users = users_of([array.device for place in self.places for array in place.arrays])
        return [
            *(
                line
                for place in self.places
                for number, device in self._devices(place)
                for line in occupants(number, device, place.mount_point)
            ),
            *("`/dev/%s`: %s" % user for user in sorted(users.items())),
            # A job that runs need have nothing open just now.
            *(
                "job `%s` of %s has its directory there (`tunetool-scratch remove` if it is over)"
                % (each["job"], each["user"])
                for each in jobs_of_node(point)
            ),
        ]

    def _devices(self, place: Place) -> list[tuple[str, str]]:
        """Numbers and names of what the volume is on; where its drive is gone, the number that the mount still has."""
        known = [(array.device_number, array.device) for array in place.arrays]
        mount = mount_at(place.mount_point, read_mounts())
        return known or ([(mount.device_number, "")] if mount is not None and self._is_gone(place, mount) else [])

    def _is_gone(self, place: Place, mount: Mount) -> bool:
        """Whether what is mounted there is the volume of a drive that was pulled."""
        number = os.path.join("/sys/dev/block", mount.device_number)
        return bool(place.name) and mount.fs_type == BUILT.type and not os.path.exists(number)

    def refuse_if_busy(self) -> None:
        """Raises ``Refusal`` if anything uses the volume, or if another mount hides it: no path leads to it then."""
        for place in self.places:
            self._refuse_if_not_reached(place)
        # Its own write to the volume is no reason to refuse.
        health_units.wait_for_check()
        in_the_way = self.occupants()
        if in_the_way:
            point = self.volume.mount_point
            raise Refusal("`%s` is in use: %s. hint: nothing was changed; end that first" % (point, shown(in_the_way)))

    def _refuse_if_not_reached(self, place: Place) -> None:
        point = place.mount_point
        mounts = read_mounts()
        over = hidden_by(point, mounts)
        if over is not None:
            raise Refusal(
                "`%s` is hidden by %s at `%s`. hint: nothing was changed; unmount that first"
                % (point, described(over), over.mount_point)
            )
        mount = mount_at(point, mounts)
        numbers = [number for number, _ in self._devices(place)]
        if mount is not None and (mount.device_number not in numbers or mount.root != "/"):
            raise Refusal(
                "`%s` is %s, which is not this volume. hint: nothing was changed; unmount it first"
                % (point, described(mount))
            )

    def run(self, allowed: Mapping[str, str]) -> None:
        """Do every step, in an order that lets the next run finish an interrupted one.

        Of a volume that goes for good nothing is remembered before it is touched; one that is built anew keeps its
        line in fstab until it is gone, so that services go on waiting for it.
        """
        self.allowed = allowed
        if self.removal.incoming is not None:
            refuse_unless_wipeable([self.removal.incoming], allowed)
        if not self.teardown:
            self.unmount()
            self.wipe()
            self.forget()
            if self.removal.noted and self.ledger.acting:
                # Not before: where there is no manifest, only the former note says whose the drives are that are yet
                # to be wiped. The manifest goes last; without it the other volumes must still be known as ours.
                note(self.removal.noted)
                forget()
            return
        # A check of a volume that is gone would drain the node in Slurm: it ends before, and no boot starts it after.
        acting = self.ledger.acting
        with health_units.halted(acting) as checks, scratch_units.halted(acting) as sweeps:
            self.ledger.diff += [*checks, *sweeps]
            self.unmount()
        self.ledger.diff += health_units.remove(self.program, acting)
        self.ledger.diff += scratch_units.converge(self.program, {}, "", acting)
        self.forget()
        self.forget_services()
        self.wipe()
        self.rebuild_initramfs()
        self.remove_mount_point()
        self.remove_manifest()

    def unmount(self) -> None:
        """Unmount the volume; afterwards nothing else holds it. Of several all stay mounted where one has a user."""
        unmounted: list[str] = []
        for place in self.places:
            was_mounted = self.ledger.acting and mount_at(place.mount_point, read_mounts()) is not None
            try:
                self._unmount(place)
            except (Refusal, CommandError):
                for point in unmounted:
                    self._mounted_again(point)
                raise
            unmounted += [place.mount_point] if was_mounted else []
        self._stop_emptied()

    def _stop_emptied(self) -> None:
        """Stop arrays of which no drive is left: nothing else would, and a new one could not have their names."""
        for array in [array for place in self.places if place.array_uuid for array in place.arrays if array.empty]:
            if self.ledger.note("array %s" % array.name, "%s, without any of its drives\n" % array.device, ""):
                under = disks_under("/", array.device)
                if under:
                    raise Refusal(
                        "array `%s` has drives again: %s. hint: nothing was wiped; run it again"
                        % (array.device, ", ".join(sorted(under)))
                    )
                run(["mdadm", "--stop", array.path])

    def _unmount(self, place: Place) -> None:
        point = place.mount_point
        mount = mount_at(point, read_mounts())
        if mount is not None:
            self.ledger.note("mount " + point, "%s\n" % ",".join(mount.options), "")
        if not self.ledger.acting:
            return
        if mount is not None:
            run(["umount", point])
        for array in place.arrays:
            problem = self._claimed(array.path)
            if problem:
                again = mount is not None and self._mounted_again(point)
                state = "mounted again" if again else "unmounted: `mount %s`" % point
                raise Refusal(
                    "%s `%s` has a user that unmounting it does not end: %s. hint: nothing was wiped, and it is %s; "
                    "nobody is named where the kernel itself keeps a mount, as for an overlay: end the containers, or "
                    "reboot" % ("volume" if place.name else "array", place.name or self.volume.name, problem, state)
                )

    def _mounted_again(self, point: str) -> bool:
        try:
            run(["mount", point])
        except CommandError:
            return False
        self.ledger.diff = [entry for entry in self.ledger.diff if entry["before_header"] != "mount " + point]
        return True

    def _claimed(self, path: str) -> str | None:
        """Why the device is in use; waits up to three seconds, since udev opens a device briefly after every change."""
        for _ in range(30):
            problem = claim_problem(path)
            if problem is None:
                return None
            time.sleep(0.1)
        return problem

    def forget(self) -> None:
        """Remove the lines of this volume from fstab and mdadm.conf, and no others."""
        conf = mdadm_conf_path()
        before = after = content(FSTAB)
        for place in self.places:
            after = without_entry(after, place.filesystem_uuid) if place.filesystem_uuid else after
        if self.ledger.note(FSTAB, before, after):
            replace_file(FSTAB, after)
            reload_systemd()
        before = after = content(conf)
        for uuid in self.array_uuids:
            after = conf_without_array(after, uuid)
        if self.ledger.note(conf, before, after):
            replace_file(conf, after)

    def forget_services(self) -> None:
        """Remove the drop-ins of services that needed the volume, and the units that mount it late or make it again."""
        units = changes([], [self.volume.mount_point])
        units += [change for place in self.places for change in late_mount.changes({}, volume=place.name)]
        at_boot = boot_unit.changes({})
        for change in [*units, *at_boot]:
            if self.ledger.note(change.path, change.before, change.after):
                apply(change)
        if units and self.ledger.acting:
            reload_systemd()
        if at_boot and self.ledger.acting:
            boot_unit.take_effect(False)

    def wipe(self) -> None:
        """Wipe every label that the plan named: in the array, of the array, on the drives."""
        removal = self.removal
        doomed = [*removal.members] + ([removal.incoming] if removal.incoming else [])
        self.wiped = [drive.serial for drive in doomed]
        if not doomed:
            return
        before = "".join("array %s: %s\n" % (self.volume.name, what) for what in removal.holds)
        blank = "".join("%s: blank\n" % serial for serial in self.wiped)
        self.ledger.note("what lies on the drives", before + contents_text(doomed), blank)
        self.ledger.note("erasure", "", "".join("%s: %s\n" % (way.drive.serial, way) for way in removal.ways))
        if not self.ledger.acting:
            return
        # Read again: after the unmount, which may have taken minutes, the array can be stopped.
        drives = members_by_serial(self.wiped)
        # What the unmount made udev look at.
        run(["udevadm", "settle", "--timeout=60"], accept=(0, 1))
        with held(drives):
            hint = "nothing was wiped"
            with untouched(drives, hint):
                used = use_problems(drives)
                for drive in drives:
                    refuse(drive, used.get(drive.name), hint)
                if removal.incoming:
                    incoming = [drive for drive in drives if drive.serial == removal.incoming.serial]
                    refuse_unless_wipeable(incoming, self.allowed)
                # Other drives may have come with these names since.
                ways, problems = erasure.decide(drives, removal.erase, hint)
                if problems:
                    raise Refusal("; ".join(problems))
            wipe(drives, lambda: self.ledger.warnings.extend(erasure.erase(ways)))
        left = read_signatures([drive.name for drive in read_drives() if drive.serial in self.wiped])
        if left:
            raise CommandError("drives are not blank after all: %s" % ", ".join(map(str, left)))

    def rebuild_initramfs(self) -> None:
        """Rebuild the images if this run changed mdadm.conf, or if an image still has the array."""
        if not self.array_uuids:
            return
        conf = mdadm_conf_path()
        changed = any(entry["before_header"] == conf for entry in self.ledger.diff)
        renewed = renew(conf, changed, acting=self.ledger.acting, gone=self.array_uuids)
        self.ledger.note(
            "initramfs",
            "".join("%s\n" % image for image in renewed.stale),
            "".join("%s: rebuilt\n" % image.path for image in renewed.stale),
        )
        self.ledger.warnings += ["%s. hint: rebuild it by hand" % image for image in (*renewed.left, *renewed.unknown)]

    def remove_mount_point(self) -> None:
        """Remove the bare mount point, which was protected from writes; of several, also the directory around them."""
        around = [self.volume.mount_point] if self.removal.places else []
        for point in around if self.ledger.acting else ():
            with contextlib.suppress(Unsupported, FileNotFoundError):
                set_immutable(point, False)
        for point in [*(place.mount_point for place in self.places), *around]:
            self._remove_directory(point)

    def _remove_directory(self, point: str) -> None:
        mounted = mount_at(point, read_mounts()) is not None
        if os.path.islink(point) or not os.path.isdir(point):
            return
        entries = [] if mounted else os.listdir(point)
        if entries:
            self.ledger.warnings.append("`%s` stays: it holds %d entries" % (point, len(entries)))
            return
        if not self.ledger.note("mount point", point + "\n", "") or mounted:
            return
        with contextlib.suppress(Unsupported):
            set_immutable(point, False)
        os.rmdir(point)

    def remove_manifest(self) -> None:
        """Remove the manifest, last of all: until then the next run reads from it what to finish."""
        self.ledger.note(MANIFEST_PATH, content(MANIFEST_PATH), "")
        if self.removal.places and self.ledger.acting:
            note(())
            for place in self.removal.places:
                forget(begun_path(place.name))
        if not self.ledger.acting or not os.path.exists(MANIFEST_PATH):
            return
        os.unlink(MANIFEST_PATH)
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(MANIFEST_PATH))
