"""Checks whether the I/O settings of the manifest still hold, and who may have changed them."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

from ..common.check_result import FAIL, PASS, UNKNOWN, Check
from ..common.io_settings import ARGUMENTS, DRIVE, ROWS, SETTINGS, Tuning
from .apply import fstrim_state, members_and_arrays, read_machine
from .conflicts import Rival, rivals
from .settings import FSTRIM, Machine, by_value, shown, wanted

PREFIX = "io_tuning."
CHECKS = tuple(PREFIX + setting for setting in ARGUMENTS)


def tuning_checks(manifest: Mapping[str, Any], root: str = "/") -> list[Check]:
    """One check for each setting in the manifest."""
    tuning: Tuning = manifest.get("tuning") or {}
    if not tuning:
        return []
    machine = read_machine(*members_and_arrays(manifest), root)
    checks = []
    for setting in SETTINGS:
        value = wanted(tuning, setting)
        if value is not None:
            checks.append(_check(setting, value, tuning, machine))
    if FSTRIM in tuning:
        state = fstrim_state(root)
        remedy = "run `tunetool provision`, or `systemctl enable --now fstrim.timer`"
        holds = state == tuning[FSTRIM]
        checks.append(
            Check(PREFIX + FSTRIM, PASS if holds else FAIL, str(tuning[FSTRIM]), state, "" if holds else remedy)
        )
    return checks


def _check(setting: str, value: str, tuning: Tuning, machine: Machine) -> Check:
    expected = shown(setting, value)
    targets = machine.targets(setting)
    values_now = {target: machine.read(setting, target) for target in targets}
    if not targets or None in values_now.values():
        return Check(PREFIX + setting, UNKNOWN, expected, "nothing to ask", "look at the drives and the array first")
    off = [target for target in targets if values_now[target] != value]
    if not off:
        where = " on %d drives" % len(targets) if len(targets) > 1 and ROWS[setting].target == DRIVE else ""
        return Check(PREFIX + setting, PASS, expected, expected + where)
    values = by_value(setting, {target: values_now[target] for target in off})
    devices = [*machine.drives.values(), *machine.arrays.values()]
    who = [rival for rival in rivals(tuning, devices, machine.root) if rival.setting == setting and rival.wins]
    return Check(PREFIX + setting, FAIL, expected, values, _remedy(who))


def _remedy(who: Sequence[Rival]) -> str:
    if not who:
        return "no known file overrules ours, so a person or a program changed it: run `tunetool provision`"
    lines = "; ".join(map(str, who))
    return "%s, after ours: remove that or change what the inventory asks for, then run `tunetool provision`" % lines
