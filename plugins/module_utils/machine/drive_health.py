"""The health that NVMe drives report, and the state of their links.

The SMART / Health Information log and the controller's identity are asked by ioctl: no process, no I/O on the media,
a millisecond for a drive. Layouts: NVM Express Base Specification, Get Log Page (SMART / Health Information, 02h) and
Identify Controller data structure.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Callable, Mapping, Sequence

from ..common.check_result import FAIL, PASS, SKIP, UNKNOWN, Check
from ..common.files import read_text
from .drives import Drive, Link
from .nvme_admin import GET_LOG_PAGE, IDENTIFY, IDENTIFY_BYTES, NotOffered, Refused, Silent, ask, opened

LOG_BYTES = 512

_SMART_LOG, _ALL_NAMESPACES, _CONTROLLER = 0x02, 0xFFFFFFFF, 0x01

_KELVIN = 273
_UNIT = 512 * 1000
"""Bytes of a data unit."""

WARNINGS = (
    "the spare blocks run out",
    "a temperature is out of bounds",
    "the media have become unreliable",
    "the media are read-only",
    "the backup of its volatile memory failed",
    "its persistent memory is read-only",
)
"""Bits 0 to 5 of the critical warning, in words."""


@dataclass(frozen=True)
class Health:
    """One drive's log, and the thresholds of its own temperature. Temperatures in degrees Celsius."""

    critical_warning: int
    temperature: int
    spare_percent: int
    spare_threshold_percent: int
    used_percent: int
    media_errors: int
    warning_minutes: int
    """Minutes at or above its warning temperature, over the drive's whole life."""
    critical_minutes: int
    throttled_count: int
    """How often in its life it went slower to cool down (both levels of host controlled thermal management)."""
    warning_temperature: int | None = None
    """Degrees Celsius; None if the drive does not report it."""
    written_bytes: int = 0
    """By the host, over the drive's whole life."""
    power_on_hours: int = 0


def parse_health(log: bytes, identity: bytes = b"") -> Health:
    """The 512 bytes of the log, and as much of the 4096 of the identity as there is. Raises ``ValueError``."""
    if len(log) != LOG_BYTES:
        raise ValueError("a health log has %d bytes, not %d" % (LOG_BYTES, len(log)))
    warning, temperature, spare, threshold, used = struct.unpack_from("<BHBBB", log, 0)
    warning_minutes, critical_minutes = struct.unpack_from("<II", log, 192)
    light, heavy = struct.unpack_from("<II", log, 216)
    limit = struct.unpack_from("<H", identity, 266)[0] if len(identity) >= 268 else 0
    return Health(
        critical_warning=warning,
        temperature=temperature - _KELVIN,
        spare_percent=spare,
        spare_threshold_percent=threshold,
        used_percent=used,
        media_errors=int.from_bytes(log[160:176], "little"),
        warning_minutes=warning_minutes,
        critical_minutes=critical_minutes,
        throttled_count=light + heavy,
        warning_temperature=limit - _KELVIN if limit else None,
        written_bytes=int.from_bytes(log[48:64], "little") * _UNIT,
        power_on_hours=int.from_bytes(log[128:144], "little"),
    )


def health_log_dword10(length: int) -> int:
    """Log 02h, and the number of dwords less one."""
    return (length // 4 - 1) << 16 | _SMART_LOG


def read_health(controller: str) -> Health:
    """Read the log of ``/dev/nvmeX``. Raises ``Refused`` without root, ``NotOffered``, or ``Silent`` without an
    answer."""
    state = read_text("/sys/class/nvme/%s/state" % controller)
    if state not in (None, "live"):
        # A query to a controller in reset would wait as long as the reset does.
        raise Silent("controller state `%s`" % state)
    with opened("/dev/" + controller) as handle:
        log = ask(handle, GET_LOG_PAGE, _ALL_NAMESPACES, LOG_BYTES, health_log_dword10(LOG_BYTES))
        identity = ask(handle, IDENTIFY, 0, IDENTIFY_BYTES, _CONTROLLER)
    return parse_health(log, identity)


Reader = Callable[[str], Health]


@dataclass(frozen=True)
class _Answers:
    healthy: Mapping[str, Health]
    """Health by serial."""
    silent: Sequence[str] = ()
    without: Sequence[str] = ()
    """Drives without a log."""
    refused: str = ""


@dataclass(frozen=True)
class _Question:
    id: str
    expected: str
    remedy: str
    wrong: Callable[[Health], str]
    """The problem of a drive, or empty."""
    summary: Callable[[Mapping[str, Health]], str] = field(default=lambda drives: "%d drives" % len(drives))
    """The words for drives with nothing wrong."""
    grave: bool = False
    """Whether the drive itself fails."""


def warnings_of(bits: int) -> str:
    """The critical warning in words; bits that no specification names by their number."""
    words = [WARNINGS[bit] if bit < len(WARNINGS) else "bit %d" % bit for bit in range(8) if bits >> bit & 1]
    return ", ".join(words)


def _thermal(drive: Health) -> str:
    limit = drive.warning_temperature
    if limit is not None and drive.temperature >= limit:
        return "%d C, warning at %d C" % (drive.temperature, limit)
    return "%d C, and it warns" % drive.temperature if drive.critical_warning & 2 else ""


def _heat(drives: Mapping[str, Health]) -> str:
    text = "at most %d C" % max(drive.temperature for drive in drives.values())
    for serial, drive in drives.items():
        hot = drive.warning_minutes + drive.critical_minutes
        # Counted over a whole life and never reset: reported, but no reason to fail a node.
        if hot or drive.throttled_count:
            text += "; `%s` in its life: too hot for %d min, throttled %d times" % (serial, hot, drive.throttled_count)
    return text


WEAR, SPARE = "drives.wear", "drives.spare"
_QUESTIONS = (
    _Question(
        "drives.critical_warning",
        "no critical warning",
        "save what you need, then replace that drive; for a temperature, repair the cooling",
        lambda drive: warnings_of(drive.critical_warning),
        grave=True,
    ),
    _Question(
        "drives.media_errors",
        "no media or data integrity error",
        "replace that drive: it reported data that it could not read or that may be wrong",
        lambda drive: "%d errors" % drive.media_errors if drive.media_errors else "",
        grave=True,
    ),
    _Question(
        "drives.thermal",
        "below the warning temperature",
        "look at fans, filters and blanking plates; a drive that is too hot slows down, and the array with it",
        _thermal,
        _heat,
    ),
    _Question(
        WEAR,
        "under 100 % of its rated life",
        "plan to replace that drive: it has reached its rated life",
        lambda drive: "%d %% used" % drive.used_percent if drive.used_percent >= 100 else "",
        lambda drives: "at most %d %% used" % max(drive.used_percent for drive in drives.values()),
    ),
    _Question(
        SPARE,
        "spare blocks above the drive's own threshold",
        "replace that drive: it will soon be read-only",
        lambda drive: (
            "%d %% left, threshold %d %%" % (drive.spare_percent, drive.spare_threshold_percent)
            if drive.spare_percent < drive.spare_threshold_percent
            else ""
        ),
        grave=True,
    ),
)


LINK = "drives.link"

GRAVE_CHECKS = tuple(question.id for question in _QUESTIONS if question.grave)
HEALTH_CHECKS = tuple(question.id for question in _QUESTIONS) + (LINK,)
"""Checks of the drives' own state."""


def judge_health(members: Sequence[Drive], reader: Reader | None) -> list[Check]:
    """One result for each check of the drives ``members``; without a reader all are skipped."""
    if not members:
        return [Check(question.id, SKIP, question.expected, "no drive to ask") for question in _QUESTIONS]
    answers = _ask_all(members, reader) if reader else _Answers({}, refused="not asked")
    return [_answer(question, answers) for question in _QUESTIONS]


def _ask_all(members: Sequence[Drive], reader: Reader) -> _Answers:
    healthy, silent, without = {}, [], []
    for drive in members:
        try:
            healthy[drive.serial] = reader(drive.controller)
        except Refused as error:
            return _Answers({}, refused=str(error))
        except NotOffered:
            without.append("`%s`" % drive.serial)
        except (Silent, ValueError) as error:
            silent.append("`%s`: %s" % (drive.serial, error))
    return _Answers(healthy, silent, without)


def _answer(question: _Question, answers: _Answers) -> Check:
    if answers.refused:
        return Check(question.id, SKIP, question.expected, answers.refused)
    wrong = [
        "`%s`: %s" % (serial, question.wrong(drive))
        for serial, drive in answers.healthy.items()
        if question.wrong(drive)
    ]
    if wrong:
        return Check(question.id, FAIL, question.expected, "; ".join(wrong), question.remedy)
    if answers.silent:
        silence = "no answer from " + "; ".join(answers.silent)
        return Check(question.id, UNKNOWN, question.expected, silence, "look for the drive in the kernel's log")
    note = "no health log from " + ", ".join(answers.without) if answers.without else ""
    if not answers.healthy:
        return Check(question.id, SKIP, question.expected, note)
    healthy = question.summary(answers.healthy)
    return Check(question.id, PASS, question.expected, "; ".join(filter(None, (healthy, note))))


def judge_links(members: Sequence[Drive]) -> Check:
    """Whether each link runs as fast and as wide as drive and slot both allow."""
    expected = "each link as fast and as wide as drive and slot allow"
    wrong, known = [], 0
    for drive in members:
        link = drive.link
        speed, width = possible_link(link)
        if speed is None or width is None or link.current_speed_gts is None or link.current_width is None:
            continue
        known += 1
        if link.current_speed_gts < speed or link.current_width < width:
            runs = "%g GT/s x%d" % (link.current_speed_gts, link.current_width)
            wrong.append("`%s` at %s: %s of %g GT/s x%d" % (drive.serial, drive.pci_address, runs, speed, width))
    if wrong:
        remedy = "reseat the drive, then its cable or riser; the slot's speed may also be set in the firmware"
        return Check(LINK, FAIL, expected, "; ".join(wrong), remedy)
    if not known:
        return Check(LINK, SKIP, expected, "no link is visible")
    return Check(LINK, PASS, expected, "%d of %d links visible" % (known, len(members)))


def possible_link(link: Link) -> tuple[float | None, int | None]:
    """Speed in GT/s and width that drive and slot both allow."""
    width = _lower(link.max_width, link.slot_max_width)
    return _lower(link.max_speed_gts, link.slot_max_speed_gts), None if width is None else int(width)


def _lower(drive: float | None, slot: float | None) -> float | None:
    """The smaller of both; the drive's if the slot's is unknown."""
    if drive is None or slot is None:
        return drive
    return min(drive, slot)
