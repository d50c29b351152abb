"""Once a day asks the node's drives what they have counted, and keeps that for the forecast of their wear."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from typing import Any

from tunetool.health import results
from tunetool.node.audit.manifest_checks import PATIENCE
from tunetool.node.common.check_result import FAIL, PASS, Check
from tunetool.node.common.file_lock import ForeignLock
from tunetool.node.common.manifest import built_members
from tunetool.node.common.outlived import Say, in_a_child
from tunetool.node.health import wear_forecast
from tunetool.node.health.wear_forecast import Sample, Series, of_spare, of_wear
from tunetool.node.machine.drive_health import WEAR, read_health
from tunetool.node.machine.drives import read_drives
from tunetool.node.machine.nvme_admin import NotOffered, Refused, Silent

DAY = 86400.0


def keep(
    files: results.Files, manifest: Mapping[str, Any] | None, checks: Sequence[Check], now: float
) -> Mapping[str, Series]:
    """What is kept of the manifest's drives, with today's answers. A drive that was replaced goes."""
    document = results.read_document(files.wear)
    serials = {str(member["serial"]) for member in built_members(manifest)} if manifest is not None else set()
    kept = {serial: series for serial, series in wear_forecast.restored(document).items() if serial in serials}
    status, asked = {check.id: check.status for check in checks}.get(WEAR), document.get("asked")
    # Drives that did not answer that check are not asked again. A clock that was set back only asks sooner.
    if status not in (PASS, FAIL) or (isinstance(asked, int | float) and 0 <= now - asked < DAY):
        return kept
    for serial, sample in _answers(str(files.root), serials).items():
        kept[serial] = wear_forecast.add(kept.get(serial, Series()), sample)
    results.write_document(files.wear, {"asked": now, "drives": wear_forecast.as_kept(kept)}, sync=True)
    return kept


def _answers(root: str, serials: set[str]) -> Mapping[str, Sample]:
    def look(say: Say) -> None:
        for drive in read_drives(root):
            if drive.serial in serials:
                # What it is silent about, tomorrow's answer tells.
                with contextlib.suppress(NotOffered, Refused, Silent, ValueError):
                    say(serial=drive.serial, sample=astuple(wear_forecast.of_health(read_health(drive.controller))))

    try:
        messages = in_a_child(look, "wear", PATIENCE).messages
    except (ForeignLock, OSError):
        return {}
    return {str(each["serial"]): Sample(*each["sample"]) for each in messages}


def figures(kept: Mapping[str, Series]) -> Iterator[tuple[str, str, Mapping[str, str], float]]:
    """For the metrics."""
    for serial, series in sorted(kept.items()):
        yield "drive_samples", "Days whose counters of the drive are kept", {"drive": serial}, len(series.samples)
        for end, forecast in (("wear", of_wear(series)), ("spare", of_spare(series))):
            if forecast is None or math.isinf(forecast.months):
                continue
            labels = {"drive": serial, "end": end}
            yield "drive_months_left", "Months until its end, at this rate", labels, round(forecast.months, 2)
            yield "drive_months_left_low", "Lower end of their interval", labels, round(forecast.low, 2)
            yield "drive_months_left_high", "Upper end of their interval", labels, round(forecast.high, 2)
