"""I/O settings follow the array's members: local drives that came back blank may have other serials."""

from __future__ import annotations

import os
from typing import Any, Mapping

from ..common.commands import run
from ..common.files import content, replace_file
from .apply import read_machine
from .persistent_files import HEADER, STATE_PATH, UDEV_PATH, udev_rules
from .previous_values import State, key_of, split_key
from .settings import DRIVE_SETTINGS, wanted


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
    rules = udev_rules(tuning, serials, uuid)
    if rules != before:
        replace_file(path, rules)
        if os.path.exists(os.path.join(root, "run/udev/control")):
            run(["udevadm", "control", "--reload"])
    state = State.load(os.path.join(root, STATE_PATH.lstrip("/")))
    for key in list(state.changes):
        setting, target = split_key(key)
        if setting in DRIVE_SETTINGS and target not in serials:
            state.forget(key)
    machine = read_machine(serials, uuid, root)
    for setting in DRIVE_SETTINGS:
        value = wanted(tuning, setting)
        for serial in machine.targets(setting) if value is not None else ():
            present = machine.read(setting, serial)
            if present != value:
                state.remember(key_of(setting, serial), str(present), str(value))
                state.save()
                machine.write(setting, serial, str(value))
    state.save()
