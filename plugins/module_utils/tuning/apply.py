"""Brings I/O settings to what is asked: compares first, changes what differs, resets what is no longer asked for."""

from __future__ import annotations

import contextlib
import os
from typing import Any, Mapping, Sequence

from ..array.md_arrays import find, read_arrays
from ..common.commands import run
from ..common.drift import Job, Ledger
from ..common.files import content, replace_file
from ..common.io_settings import ARGUMENTS, ARRAY, ROWS, SETTINGS, of_target
from ..common.manifest import built_members, each_volume
from ..common.raid_levels import SINGLE
from ..common.refusal import Refusal
from ..machine.drives import read_drives
from .conflicts import active_profile, rivals
from .persistent_files import (
    HEADER,
    STATE_PATH,
    SYSCTL_PATH,
    TMPFILES_PATH,
    TUNED_PROFILE,
    UDEV_PATH,
    sysctl,
    tmpfiles,
    tuned_profile,
    udev_rules,
)
from .previous_values import State, key_of, split_key
from .settings import (
    DRIVE_SETTINGS,
    FSTRIM,
    Machine,
    by_value,
    done_here,
    impossible,
    normal_form,
    read_cpus,
    shown,
    skipped,
    wanted,
)

NEW_ARRAY = "(new)"
MASKED = (
    "`io_tuning_fstrim_timer`: somebody has masked `fstrim.timer`, so it is skipped. hint: `systemctl unmask "
    "fstrim.timer`, if that was not meant"
)
_WANTS = "etc/systemd/system/timers.target.wants/fstrim.timer"


def members_and_arrays(manifest: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The serials of a node's members, and the UUIDs of its arrays: none where its drives have no md over them."""
    arrays = [volume["array"] for _, volume in each_volume(manifest)]
    uuids = [array["uuid"] for array in arrays if array is not None and array["level"] != SINGLE.name]
    return [member["serial"] for member in built_members(manifest)], uuids


def read_machine(serials: Sequence[str], array_uuids: Sequence[str], root: str = "/") -> Machine:
    """The drives and the arrays by names that do not change over reboots. Without an array, what is set of arrays is
    set of the drives, on which the file systems lie then."""
    running = read_arrays(root)
    found = {uuid: find(running, uuid) for uuid in array_uuids}
    drives = {drive.serial: drive.name for drive in read_drives(root) if drive.serial in serials}
    return Machine(
        drives=drives,
        arrays={uuid: array.device for uuid, array in found.items() if array} if array_uuids else drives,
        cpus=read_cpus(root),
        root=root,
    )


def fstrim_state(root: str = "/") -> str:
    """``enabled``, ``disabled``, ``masked`` or ``absent``, from systemd's links: no process."""
    mask = os.path.join(root, "etc/systemd/system/fstrim.timer")
    if os.path.islink(mask) and os.readlink(mask) == "/dev/null":
        return "masked"
    if os.path.lexists(os.path.join(root, _WANTS)):
        return "enabled"
    units = [os.path.join(root, library, "systemd/system/fstrim.timer") for library in ("lib", "usr/lib", "etc")]
    return "disabled" if any(os.path.exists(unit) for unit in units) else "absent"


class TuningJob(Job):
    """All settings of a machine under ``root``."""

    def __init__(self, asked: Mapping[str, Any], ledger: Ledger, root: str = "/") -> None:
        super().__init__(ledger, root)
        self.tuning = normal_form({name: str(asked[name] or "") for name in ARGUMENTS})
        self.serials: Sequence[str] = asked["serials"]
        # One that is broken and left alone has nothing that could be set.
        volumes = [each for each in asked.get("volumes") or () if not each.get("left")]
        arrays = [each["array"] for each in volumes] or [{"uuid": asked["array_uuid"], "level": ""}]
        uuids = [str(array["uuid"] or NEW_ARRAY) for array in arrays if array["level"] != SINGLE.name]
        self.array_uuids: Sequence[str] = list(dict.fromkeys(uuids))
        """Empty where the volumes are on the drives themselves."""
        if ledger.manifest and not self.serials and not volumes and not asked["array_uuid"]:
            # Run alone, the role has no answer of those that chose the drives and made the array.
            self.serials, self.array_uuids = members_and_arrays(ledger.manifest)
        self.machine = read_machine(self.serials, self.array_uuids, root)
        self.state = State.load(self._path(STATE_PATH))

    def all(self) -> dict[str, Any]:
        """Apply every setting; returns the tuning that holds from now on, in the manifest's form."""
        self._refuse_impossible()
        self.ledger.warnings += skipped(self.tuning, self.machine)
        if self.tuning.get(FSTRIM) == "enabled" and fstrim_state(self.root) == "masked":
            self.ledger.warnings.append(MASKED)
            del self.tuning[FSTRIM]
        # The tuned profile names the one beneath it: that must be known before ours is in force.
        self._tuned()
        self._files()
        for key in list(self.state.changes):
            if key in self.state.changes:
                self._give_back(key)
        for setting in SETTINGS:
            value = wanted(self.tuning, setting)
            if value is not None:
                self._set(setting, value)
        self._fstrim()
        if self.ledger.note(STATE_PATH, self.state.text_before, self.state.text()):
            self.state.save()
        devices = [*self.machine.drives.values(), *self.machine.arrays.values()]
        winners = [rival for rival in rivals(self.tuning, devices, self.root) if rival.wins]
        self.ledger.warnings += ["`io_tuning_%s` will not last: %s" % (rival.setting, rival) for rival in winners]
        return done_here(self.tuning, self.machine)

    def _refuse_impossible(self) -> None:
        asked_of_drives = [name for name in DRIVE_SETTINGS if wanted(self.tuning, name) is not None]
        gone = [serial for serial in self.serials if serial not in self.machine.drives]
        if asked_of_drives and (gone or not self.serials):
            what = ", ".join("`%s`" % serial for serial in gone) or "no drive is known"
            raise Refusal("%s cannot be set: %s. hint: run `tunetool provision`" % (", ".join(asked_of_drives), what))
        asked_of_array = [name.replace("_", "-") for name in of_target(ARRAY) if wanted(self.tuning, name) is not None]
        still = [uuid for uuid in self.array_uuids if uuid not in (NEW_ARRAY, *self.machine.arrays)]
        if asked_of_array and (still or not (self.array_uuids or self.machine.arrays)):
            raise Refusal(
                "%s cannot be set: array %s does not run. hint: run `tunetool provision`"
                % (", ".join(asked_of_array), ", ".join(still))
            )
        if self.tuning.get(FSTRIM) and fstrim_state(self.root) == "absent":
            raise Refusal("there is no `fstrim.timer` here. hint: it is part of util-linux")
        problems = impossible(self.tuning, self.machine)
        if problems:
            raise Refusal(*problems)

    def _files(self) -> None:
        tuned = active_profile(self.root) is not None
        rules = udev_rules(self.tuning, self.serials, self.array_uuids)
        if self._put("io_tuning.udev", UDEV_PATH, rules) and os.path.exists("/run/udev/control"):
            run(["udevadm", "control", "--reload"])
        self._put("io_tuning.tmpfiles", TMPFILES_PATH, tmpfiles(done_here(self.tuning, self.machine), tuned))
        self._put("io_tuning.sysctl", SYSCTL_PATH, sysctl(self.tuning))

    def _put(self, name: str, path: str, text: str) -> bool:
        """Bring a file to exactly this text, or remove it. Returns whether it was changed."""
        before = content(self._path(path))
        if before and not before.startswith(HEADER):
            raise Refusal("`%s` is not tunetool's. hint: move it to another name" % path)
        if not self.ledger.file_differs(name, path, before, text):
            return False
        if text:
            replace_file(self._path(path), text)
        else:
            os.unlink(self._path(path))
        return True

    def _set(self, setting: str, value: str) -> None:
        targets = self.machine.targets(setting)
        if ROWS[setting].target == ARRAY and not targets:
            self.ledger.note("%s of the new array" % setting, "", "%s\n" % shown(setting, value))
            return
        values_now = {target: self.machine.read(setting, target) for target in targets}
        off = [target for target in targets if values_now[target] != value]
        values = by_value(setting, {target: values_now[target] for target in off})
        before = "".join("%s %s\n" % (target or setting, values_now[target]) for target in off)
        after = "".join("%s %s\n" % (target or setting, value) for target in off)
        name = "io_tuning." + setting
        must = self.ledger.differs(name, shown(setting, value), values, name, before, after)
        for target in off:
            self._forget_reset(setting, target)
            self.state.remember(key_of(setting, target), str(values_now[target]), value)
        if must:
            self.state.save()
            for target in off:
                self._write(setting, target, value)

    def _write(self, setting: str, target: str, value: str) -> None:
        where = "/%s" % self.machine.file(setting, target)
        try:
            self.machine.write(setting, target, value)
        except OSError as error:
            raise Refusal(
                "`%s` does not take `%s`: %s. hint: see `dmesg | tail`" % (where, value, error.strerror)
            ) from None
        value_now = self.machine.read(setting, target)
        if value_now != value:
            raise Refusal(
                "`%s` was set to `%s` and reads back as `%s`. hint: choose that value" % (where, value, value_now)
            )

    def _forget_reset(self, setting: str, target: str) -> None:
        """Other settings have another value now by the kernel itself: there is none of before to give back."""
        for name in ROWS[setting].resets:
            self.state.forget(key_of(name, target))

    def _give_back(self, key: str) -> None:
        """Restore what an earlier run set and nobody asks for now, unless it was changed since."""
        setting, target = split_key(key)
        change = self.state.changes[key]
        if setting in (FSTRIM, "tuned"):
            return
        known = setting in ROWS
        asked = known and wanted(self.tuning, setting) is not None
        if asked and (target == "" or target in self.machine.targets(setting)):
            return
        value_now = self.machine.read(setting, target) if known else None
        if value_now == change.set:
            name = "io_tuning." + setting
            expected, now = shown(setting, change.before), shown(setting, value_now)
            if self.ledger.differs(name, expected, now, key, "%s\n" % value_now, "%s\n" % change.before):
                self._write(setting, target, change.before)
            self._forget_reset(setting, target)
        self.state.forget(key)

    def _fstrim(self) -> None:
        asked, state = self.tuning.get(FSTRIM), fstrim_state(self.root)
        ours = self.state.changes.get(FSTRIM)
        if asked is None and ours is not None:
            asked = ours.before if state == ours.set else None
            self.state.forget(FSTRIM)
        if asked in (None, state) or (asked, state) == ("disabled", "masked"):
            return
        must = self.ledger.differs("io_tuning." + FSTRIM, asked, state, "fstrim.timer", state + "\n", asked + "\n")
        if FSTRIM in self.tuning:
            self.state.remember(FSTRIM, state, asked)
        if must:
            self.state.save()
            now = ["--now"] if os.path.isdir("/run/systemd/system") else []
            run(["systemctl", "enable" if asked == "enabled" else "disable", *now, "fstrim.timer"])

    def _tuned(self) -> None:
        """Activate a tuned profile on top of the owner's while it is needed; otherwise the owner's again."""
        active = active_profile(self.root)
        ours = self.state.changes.get("tuned")
        base = ours.before if ours and active == TUNED_PROFILE else active
        if active is None or base is None or base == TUNED_PROFILE:
            return
        directory = "/etc/tuned/profiles" if os.path.isdir(self._path("/etc/tuned/profiles")) else "/etc/tuned"
        path = "%s/%s/tuned.conf" % (directory, TUNED_PROFILE)
        text = tuned_profile(done_here(self.tuning, self.machine), base)
        written = bool(text) and self._put("io_tuning.tuned", path, text)
        if text and (written or active != TUNED_PROFILE):
            self.state.remember("tuned", base, TUNED_PROFILE)
            if self.ledger.note("tuned profile", active + "\n", TUNED_PROFILE + "\n") or written:
                self.state.save()
                run(["tuned-adm", "profile", TUNED_PROFILE])
        elif not text and active == TUNED_PROFILE:
            if self.ledger.note("tuned profile", active + "\n", base + "\n"):
                run(["tuned-adm", "profile", base])
            self._put("io_tuning.tuned", path, "")
            self.state.forget("tuned")
            if self.ledger.acting:
                with contextlib.suppress(OSError):
                    os.rmdir(os.path.dirname(self._path(path)))


def follow_members(manifest: Mapping[str, Any], root: str = "/") -> None:
    """Bring the udev rules, the members of the manifest and the previous values to what a run of role io_tuning leaves.

    Nothing where that role set nothing. Raises ``OSError`` where a drive does not take a value, ``Refusal`` where the
    previous values cannot be read.
    """
    tuning = manifest.get("tuning") or {}
    path = os.path.join(root, UDEV_PATH.lstrip("/"))
    before = content(path)
    if not tuning or not before.startswith(HEADER):
        return
    serials = [member["serial"] for member in manifest["array"]["members"]]
    uuid = manifest["array"]["uuid"]
    rules = udev_rules(tuning, serials, [uuid])
    if rules != before:
        replace_file(path, rules)
        if os.path.exists(os.path.join(root, "run/udev/control")):
            run(["udevadm", "control", "--reload"])
    state = State.load(os.path.join(root, STATE_PATH.lstrip("/")))
    for key in list(state.changes):
        setting, target = split_key(key)
        if setting in DRIVE_SETTINGS and target not in serials:
            state.forget(key)
    machine = read_machine(serials, [uuid], root)
    for setting in DRIVE_SETTINGS:
        value = wanted(tuning, setting)
        for serial in machine.targets(setting) if value is not None else ():
            present = machine.read(setting, serial)
            if present != value:
                state.remember(key_of(setting, serial), str(present), str(value))
                state.save()
                machine.write(setting, serial, str(value))
    state.save()
