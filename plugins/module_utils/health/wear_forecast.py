"""When a drive's rated life or its spare blocks end, by what the drive itself counts, a sample a day.

`percentage_used` and `available_spare` are whole percents: they tell something only where they step. So the bytes that
were written from the first step that was seen to the last one say what a percent costs, and those of the last month how
fast it goes now. Each step lies somewhere between two samples, which gives the interval. The drive's own hours are the
clock: none of the node's can make them jump, and months are those for which the drive is on.

Layout: NVM Express Base Specification, SMART / Health Information log (02h).
"""

from __future__ import annotations

import math
import os
from dataclasses import astuple, dataclass, replace
from typing import Any, Callable, Mapping, Optional, Sequence

from ..common import documents
from ..common.check_result import PASS, Check
from ..machine.drive_health import SPARE, WEAR, Health
from .settings import WEAR_PATH

DAY = 24
"""Hours from one sample to the next, at least."""
KEPT = 366
"""Samples of a drive."""
SOON = 6.0
"""Months below which a drive is to be replaced."""
_RECENT, _LEAST = 30 * DAY, 7 * DAY
"""Hours over which the rate is taken, and what it must be known for."""
_FASTEST = 3600 * 20e9
"""Bytes an hour: more than any link carries."""
_LARGEST = 1 << 62
"""More than any counter reaches, and less than what a file of ours may hold."""
_MONTH = 365.25 / 12
_YEARS = 10


@dataclass(frozen=True)
class Sample:
    """What a drive said."""

    hours: int
    written: int
    """Bytes, in its whole life."""
    used: int
    spare: int
    threshold: int


@dataclass(frozen=True)
class Series:
    """Of one drive, by its serial; no counter goes back in it."""

    samples: Sequence[Sample] = ()
    doubted: Optional[Sample] = None
    """The last answer, if it did not follow."""


@dataclass(frozen=True)
class Forecast:
    """Months until the end, at this rate, and their interval; infinite where nothing is written."""

    months: float
    low: float
    high: float


def of_health(health: Health) -> Sample:
    """The sample in what a drive says of itself."""
    return Sample(
        health.power_on_hours,
        health.written_bytes,
        health.used_percent,
        health.spare_percent,
        health.spare_threshold_percent,
    )


def days_left(bytes_left: float, bytes_a_day: float) -> float:
    """How long a drive takes to write so much; for ever, if it writes nothing."""
    return max(0.0, bytes_left) / bytes_a_day if bytes_a_day > 0 else math.inf


def add(series: Series, sample: Sample) -> Series:
    """The series with a new answer, if a day has passed.

    One in which a counter goes back is not believed until a second one agrees with it: then the counters were reset, or
    those before were wrong, and what does not lead to it goes.
    """
    believed = tuple(series.samples)
    if sample.written > _LARGEST or sample.hours > _LARGEST:
        return series
    if believed and not _follows(believed[-1], sample):
        doubted = series.doubted
        if doubted is None or not _follows(doubted, sample):
            return replace(series, doubted=sample)
        kept = (each for each in believed if _follows(each, doubted) and doubted.hours - each.hours >= DAY)
        believed = (*kept, doubted)
    if not believed or sample.hours - believed[-1].hours >= DAY:
        believed = (*believed, sample)
    return Series(believed[-KEPT:])


def _follows(earlier: Sample, later: Sample) -> bool:
    hours = later.hours - earlier.hours
    return hours >= 0 and later.used >= earlier.used and 0 <= later.written - earlier.written <= (hours + 1) * _FASTEST


def of_wear(series: Series) -> Optional[Forecast]:
    """Until 100 % of its rated life are used; None: not yet known."""
    return _forecast(series.samples, lambda sample: sample.used, 100)


def of_spare(series: Series) -> Optional[Forecast]:
    """Until its spare blocks are at the drive's own threshold; None: not yet known."""
    if not series.samples:
        return None
    return _forecast(series.samples, lambda sample: 100 - sample.spare, 100 - series.samples[-1].threshold)


def _forecast(samples: Sequence[Sample], level: Callable[[Sample], int], limit: int) -> Optional[Forecast]:
    levels = [level(sample) for sample in samples]
    falls = [index for index in range(1, len(levels)) if levels[index] < levels[index - 1]]
    steps = [index for index in range(max(falls, default=0) + 1, len(levels)) if levels[index] > levels[index - 1]]
    a_day = _bytes_a_day(samples)
    if len(steps) < 2 or a_day is None:
        return None
    first, last, now = steps[0], steps[-1], samples[-1].written
    percents = levels[last] - levels[first]
    least = (samples[last - 1].written - samples[first].written) / percents
    most = (samples[last].written - samples[first - 1].written) / percents
    if least <= 0:
        return None
    to_go = max(0, limit - levels[last])

    def months(percent: float, stepped: float) -> float:
        # It has not stepped again, whatever the average says.
        left = max(to_go * percent - (now - stepped), (to_go - 1) * percent)
        return days_left(left, a_day) / _MONTH

    low, high = months(least, samples[last - 1].written), months(most, samples[last].written)
    middle = months((least + most) / 2, (samples[last - 1].written + samples[last].written) / 2)
    return Forecast(middle, low, high)


def _bytes_a_day(samples: Sequence[Sample]) -> Optional[float]:
    """Of the last month; None where that is not known for a week."""
    last = samples[-1] if samples else None
    first = next((each for each in samples if last and last.hours - each.hours <= _RECENT), None)
    if last is None or first is None or last.hours - first.hours < _LEAST:
        return None
    return (last.written - first.written) * DAY / (last.hours - first.hours)


def in_words(forecast: Forecast) -> str:
    """As `in 14 months`; with its interval where that is wide."""
    if forecast.low > 12 * _YEARS:
        return "in more than %d years" % _YEARS
    low, high = round(forecast.low), round(forecast.high)
    if high - low > max(1.0, forecast.months / 5):
        return "in %d to %d months" % (low, high)
    months = round(forecast.months)
    return "in %d month%s" % (months, "" if months == 1 else "s") if months else "within a month"


def foretold(checks: Sequence[Check], kept: Mapping[str, Series]) -> list[Check]:
    """The checks of the drives; what passes says how long it will."""
    ends = {WEAR: ("100 %", of_wear), SPARE: ("its spare is at the threshold", of_spare)}
    return [
        replace(check, found="; ".join([check.found, *_told(*ends[check.id], kept)]))
        if check.id in ends and check.status == PASS
        else check
        for check in checks
    ]


def _told(end: str, of: Callable[[Series], Optional[Forecast]], kept: Mapping[str, Series]) -> list[str]:
    known = {serial: forecast for serial, forecast in ((each, of(kept[each])) for each in sorted(kept)) if forecast}
    if not known:
        return ["how long that will last is not yet known"] if kept and of is of_wear else []
    soonest = min(known, key=lambda serial: known[serial].months)
    shown = [serial for serial in known if known[serial].months < SOON] or [soonest]
    return [
        "`%s`: at this rate %s %s%s" % (serial, end, in_words(known[serial]), _advice(known[serial]))
        for serial in shown
    ]


def _advice(forecast: Forecast) -> str:
    return ", below %d: plan to replace it" % SOON if forecast.months < SOON else ""


def restored(kept: Any) -> dict[str, Series]:
    """By serial, what a file has. What somebody edited is none."""
    found = {}
    series = kept.get("drives") if isinstance(kept, dict) else None
    for serial, rows in series.items() if isinstance(series, dict) else ():
        try:
            believed = [Sample(*map(int, row)) for row in rows["samples"]]
            doubted = Sample(*map(int, rows["doubted"])) if rows["doubted"] else None
        except (KeyError, TypeError, ValueError):
            continue
        if all(map(_follows, believed, believed[1:])):
            found[str(serial)] = Series(tuple(believed[-KEPT:]), doubted)
    return found


def as_kept(kept: Mapping[str, Series]) -> dict[str, Any]:
    """For a file."""
    return {
        serial: {
            "samples": [astuple(each) for each in series.samples],
            "doubted": series.doubted and astuple(series.doubted),
        }
        for serial, series in kept.items()
    }


def read(root: str = "/") -> dict[str, Series]:
    """What the health check of this node has kept; nothing where there is none, or it may not be read."""
    try:
        return restored(documents.read(os.path.join(root, WEAR_PATH.lstrip("/"))))
    except (OSError, ValueError):
        return {}
