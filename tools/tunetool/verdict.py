"""Judging, pure: measurements, expectations and checks in; status, reasons and exit code out. For every kind of record.

A command that judges has one way to a pass: something was judged, and everything that was asked for holds. Reasons are
in the order of their weight: what falls short, what could not be done, what is unproven, what is unstable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from statistics import median
from typing import Literal, NamedTuple

from tunetool.errors import ExitCode
from tunetool.node.units import format_bandwidth, format_count, format_figure, format_rate
from tunetool.record import (
    CheckResult,
    Expectation,
    FleetHost,
    Ladder,
    Measurement,
    ReasonKind,
    Status,
    Verdict,
    chosen,
)

CEILING = "ceiling.link"

TESTER_CEILING = "tester_ceiling"
"""Parameter of a figure: what its program reaches by the same requests where no storage answers them, in its unit."""
TESTER_CPU_SHARE = "tester_cpu_share"
"""Parameter of a figure: share of the cores open to its program that the program kept busy."""
NEAR_TESTER, BUSY_TESTER = 0.8, 0.9
"""Share of that ceiling, and of those cores, from which on the program may be the bottleneck and not the drives."""

NO_EXPECTATION = "no expectation to compare with: pass `--expect 50GBps`"

DRIVES, DIRECTORY = "drives", "directory"
"""Parameters of figures of several volumes, of all and of each: the serials of the drives, and where it is mounted."""
SHARE_KEPT = 0.9
"""Part of its share of an expectation of all volumes that each must reach. They are measured at once and take from one
another what they have in common (cores, a PCIe switch), and drives of one model differ by less than a tenth."""

LEVEL = 0.95
"""Confidence with which a figure is judged. Below it there is neither a pass nor a failure."""

LEAST_FALL = 0.02
"""A significant fall below this fraction is not reported."""

Judged = Literal["speed", "checks", "parts", "work"]
"""Basis of a verdict: figures compared with expectations; only checks; the verdicts of parts; or, for a command that
judges nothing, that its work was done."""

WORST_FIRST: tuple[Status, ...] = ("fail", "error", "unproven", "unstable", "pass")
_CODES: Mapping[Status, ExitCode] = {
    "fail": ExitCode.FALLS_SHORT,
    "error": ExitCode.NOT_JUDGED,
    "unproven": ExitCode.NOT_JUDGED,
    "unstable": ExitCode.NOT_JUDGED,
    "pass": ExitCode.OK,
}


class _Finding(NamedTuple):
    """A reason before it has its place among the others."""

    status: Status
    reason: str
    kind: ReasonKind


@dataclass(frozen=True)
class Case:
    """The case for a verdict: everything that it depends on."""

    measurements: Sequence[Measurement] = ()
    expectations: Sequence[Expectation] = ()
    checks: Sequence[CheckResult] = ()
    failed: Mapping[str, str] = field(default_factory=dict)
    """By check, the error for which it could not be made; an unknown check without an error is unproven."""
    words: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """By check, a text instead of its own line."""
    parts: Sequence[tuple[str, Verdict]] = ()
    """Names and verdicts of the parts of a chain or the hosts of a fleet."""
    unproven: Mapping[str, str] = field(default_factory=dict)
    """By measurement name, why it proves nothing."""
    doubts: Sequence[str] = ()
    """Why no measurement proves anything."""
    errors: Sequence[str] = ()
    """Work that could not be done, with the reason."""
    tolerance: float = 0.0
    """Fraction of an expectation that may be missing. Nothing, unless the caller says so."""
    notes: Sequence[str] = ()
    """What a reader must know of figures that nothing is wrong with. They change no status."""
    ladder: Ladder | None = None
    """The first loss of the ladder, which explains figures that fall short."""
    judged: Judged = "speed"
    """Expectations count only for ``speed``."""


def exit_code(statuses: Iterable[Status]) -> ExitCode:
    """Contract 3's precedence over statuses: 1, then 3, then 0. Nothing judged is 3."""
    codes = {_CODES[status] for status in statuses}
    for code in (ExitCode.FALLS_SHORT, ExitCode.NOT_JUDGED, ExitCode.OK):
        if code in codes:
            return code
    return ExitCode.NOT_JUDGED


def code_of(verdict: Verdict | None) -> ExitCode:
    """The exit code for this verdict."""
    return exit_code([verdict.status] if verdict is not None else [])


def judge(case: Case) -> Verdict:
    """The verdict of a record of any kind."""
    findings = _judge_checks(case)
    findings += [_Finding("error", reason, "error") for reason in case.errors]
    findings += _judge_parts(case.parts)
    findings += [_Finding("unproven", reason, "unproven") for reason in case.doubts]
    if case.judged == "speed":
        findings += _judge_expectations(case)
    else:
        unproven = [f"{_human(name)}: {reason}" for name, reason in case.unproven.items()]
        findings += [_Finding("unproven", reason, "unproven") for reason in unproven]
    if case.judged == "parts" and not case.parts and not case.errors:
        findings.append(_Finding("error", "no part was run: there is nothing to judge", "part"))
    if case.judged == "checks" and not findings and not any(check.status == "pass" for check in case.checks):
        findings.append(_Finding("unproven", "no check could be made: there is nothing to judge", "check"))
    findings += [_Finding("pass", note, "note") for note in case.notes]
    ranked = sorted(dict.fromkeys(findings), key=lambda finding: WORST_FIRST.index(finding.status))
    return Verdict(
        status=ranked[0].status if ranked else "pass",
        reasons=[finding.reason for finding in ranked],
        kinds=[finding.kind for finding in ranked] or None,
    )


def first_problem(judged: Verdict | FleetHost) -> str | None:
    """The first reason that is about more than how figures compare with expectations, and no note; that of no kind is,
    too."""
    pairs = zip_longest(judged.reasons, judged.kinds or [])
    return next((each for each, kind in pairs if kind not in ("expectation", "note")), None)


def status_of(measurement: Measurement, expectation: Expectation, tolerance: float = 0.0) -> Status:
    """A proven figure against its expectation: the whole interval decides, not its middle."""
    interval = measurement.confidence
    if interval is None or (interval.level or 0.0) < LEVEL:
        return "unstable"
    if measurement.better == "lower":
        low, high, limit = -interval.high, -interval.low, -expectation.value * (1 + tolerance)
    else:
        low, high, limit = interval.low, interval.high, limit_of(expectation.value, tolerance)
    if low >= limit:
        return "pass"
    return "fail" if high < limit else "unstable"


def tester_limit(measurement: Measurement) -> str | None:
    """Why the program that measured may be the bottleneck of this figure; None where it was free to go faster."""
    ceiling, share = (measurement.parameters.get(name) for name in (TESTER_CEILING, TESTER_CPU_SHARE))
    shown = format_figure(measurement.value, measurement.unit)
    if isinstance(ceiling, int | float) and measurement.value >= NEAR_TESTER * ceiling:
        alone = format_figure(ceiling, measurement.unit)
        return f"{shown} is near the tester's limit: {measurement.engine} without storage reaches {alone}"
    if isinstance(share, int | float) and share >= BUSY_TESTER:
        return f"{shown} is near the tester's limit: {measurement.engine} kept {share:.0%} of the cores busy"
    return None


def limit_of(expected: float, tolerance: float) -> float:
    """What a figure must reach."""
    return expected * (1 - tolerance)


@dataclass(frozen=True)
class Share:
    """What one of several volumes has to give where something is expected of all of them together."""

    total: Measurement
    figure: Measurement
    """The volume's own, measured at the same time."""
    wanted: Expectation
    """Of all."""
    of_drives: int
    """The number of drives of all."""

    @property
    def drives(self) -> Sequence[str]:
        """Serials of the volume's drives."""
        return serials_of(self.figure)

    @property
    def named(self) -> str:
        """The volume and its drives."""
        many = "s" if len(self.drives) > 1 else ""
        return f"volume `{self.figure.labels['volume']}` (drive{many} `{'`, `'.join(self.drives)}`)"

    @property
    def value(self) -> float:
        """What it must reach, in the unit of what is wanted."""
        return self.wanted.value * part_of_limit(len(self.drives), self.of_drives)

    @property
    def expectation(self) -> Expectation:
        """What the volume is judged by."""
        return self.wanted.model_copy(update={"name": self.figure.name, "value": self.value})

    def __str__(self) -> str:
        own = f"{format_count(len(self.drives), 'drive')} of {self.of_drives}"
        limit = format_figure(self.value, self.wanted.unit)
        return f"{limit}, {SHARE_KEPT:.0%} of its share ({own}) of {format_figure(self.wanted.value, self.wanted.unit)}"


def serials_of(figure: Measurement) -> Sequence[str]:
    """The drives of one of several volumes, or of all of them; none where the record does not say."""
    return [each for each in str(figure.parameters.get(DRIVES, "")).split(", ") if each]


def shares(measurements: Sequence[Measurement], expectations: Sequence[Expectation]) -> list[Share]:
    """What is expected of each of several volumes; nothing where there is one, or where drives of one are not known."""
    by_name = {measurement.name: measurement for measurement in measurements}
    found = []
    for wanted in expectations:
        total = by_name.get(wanted.name)
        volumes = volumes_of(measurements, total) if total is not None else []
        if total is not None and all(map(serials_of, [total, *volumes])):
            found += [Share(total, each, wanted, len(serials_of(total))) for each in volumes]
    return found


def part_of_limit(drives: int, of_drives: int) -> float:
    """The part of a limit of all volumes that one of so many drives is judged against."""
    return SHARE_KEPT * drives / of_drives


def volumes_of(measurements: Sequence[Measurement], total: Measurement) -> list[Measurement]:
    """What each of several volumes gave to a figure of all together."""
    if "volume" in total.labels:
        return []
    return [each for each in measurements if each.labels == {**total.labels, "volume": each.labels.get("volume", "")}]


def _wanted(case: Case) -> list[Expectation]:
    """What is expected, of each of several volumes too."""
    return [*case.expectations, *(share.expectation for share in shares(case.measurements, case.expectations))]


def status_by_name(case: Case) -> dict[str, Status]:
    """The status of each expectation, of each of several volumes too."""
    by_name = {measurement.name: measurement for measurement in case.measurements}
    totals = {share.figure.name: share.total for share in shares(case.measurements, case.expectations)}
    statuses: dict[str, Status] = {}
    for expectation in _wanted(case):
        measurement = by_name.get(expectation.name)
        if measurement is None:
            statuses[expectation.name] = "error"
        elif case.doubts or expectation.name in case.unproven or not _has_proof(measurement):
            statuses[expectation.name] = "unproven"
        else:
            status = status_of(measurement, expectation, case.tolerance)
            # One program measures all volumes: its limit shows in their sum.
            slow_tester = status == "fail" and _tester_limit(measurement, totals) is not None
            statuses[expectation.name] = "unproven" if slow_tester else status
    return statuses


def _tester_limit(measurement: Measurement, totals: Mapping[str, Measurement]) -> str | None:
    """Also of one of several volumes; ``totals``: by its name, the figure of all."""
    return tester_limit(totals.get(measurement.name, measurement))


def judged_expectations(case: Case) -> list[Expectation]:
    """The expectations, and those of each of several volumes, with their results; unchanged if nothing was to be
    measured."""
    if case.judged != "speed":
        return list(case.expectations)
    statuses = status_by_name(case)
    return [wanted.model_copy(update={"status": statuses[wanted.name]}) for wanted in _wanted(case)]


def _has_proof(measurement: Measurement) -> bool:
    return measurement.evidence is not None and measurement.evidence.kind == "block"


def _judge_checks(case: Case) -> list[_Finding]:
    findings: list[_Finding] = []
    for check in case.checks:
        if check.id in case.failed:
            findings.append(_Finding("error", case.failed[check.id], "error"))
        if check.status not in ("fail", "unknown") or (check.status == "unknown" and check.id in case.failed):
            continue
        remedy = f": {check.remedy}" if check.remedy else ""
        lines = case.words.get(check.id) or [f"{check.id}: {check.found}, expected {check.expected}{remedy}"]
        status: Status = "fail" if check.status == "fail" else "unproven"
        findings += [_Finding(status, line, "check") for line in lines]
    return findings


def _judge_parts(parts: Sequence[tuple[str, Verdict]]) -> list[_Finding]:
    """The first, most important reason of each part without a pass."""
    return [
        _Finding(verdict.status, f"{name}: {next(iter(verdict.reasons), verdict.status)}", "part")
        for name, verdict in parts
        if verdict.status != "pass"
    ]


def _judge_expectations(case: Case) -> list[_Finding]:
    if not case.expectations:
        unproven = [f"{_human(name)}: {reason}" for name, reason in case.unproven.items()]
        findings = [_Finding("unproven", reason, "unproven") for reason in unproven]
        return [_Finding("unproven", NO_EXPECTATION, "expectation"), *findings]
    by_name = {measurement.name: measurement for measurement in case.measurements}
    wanted = {expectation.name: expectation for expectation in case.expectations}
    of_volumes = {share.figure.name: share for share in shares(case.measurements, case.expectations)}
    totals = {name: share.total for name, share in of_volumes.items()}
    statuses = status_by_name(case)
    findings = []
    for name, status in statuses.items():
        if status == "pass" or _is_said_of_all(name, statuses, of_volumes):
            continue
        if status == "error":
            # The error itself was said already, unless there was none.
            if not case.errors:
                findings.append(_Finding("error", f"{_human(name)} was not measured", "expectation"))
        elif status == "unproven":
            reason = case.unproven.get(name)
            if not reason and not case.doubts and _has_proof(by_name[name]):
                slow_tester = _tester_limit(by_name[name], totals)
                reason = slow_tester and f"{slow_tester}, so the drives may be faster: {_FREE_CORES}"
            if reason:
                findings.append(_Finding("unproven", f"{_human(name)}: {reason}", "unproven"))
            elif not case.doubts:
                findings.append(_Finding("unproven", f"{_human(name)}: nothing proves its bytes", "unproven"))
        else:
            share = of_volumes.get(name)
            short = _short(by_name[name], share or wanted[name], status, case)
            findings.append(_Finding(status, short, "expectation"))
    return findings


_FREE_CORES = (
    "end what uses the cores (see `top`), lift a limit on them, set the governor to `performance`, verify again"
)


def _is_said_of_all(name: str, statuses: Mapping[str, Status], of_volumes: Mapping[str, Share]) -> bool:
    """Whether what there is to say of one of several volumes is true of each and of their sum, which says it once."""
    if name not in of_volumes:
        return False
    total = of_volumes[name].total.name
    return {statuses[total], *(statuses[each] for each, share in of_volumes.items() if share.total.name == total)} == {
        statuses[name]
    }


def _short(measurement: Measurement, expected: Expectation | Share, status: Status, case: Case) -> str:
    interval = measurement.confidence
    if isinstance(expected, Share):
        name, limit = f"{expected.named}: {_human(expected.total.name)}", str(expected)
    else:
        name, limit = _human(measurement.name), format_figure(expected.value, expected.unit)
    what = f"{name} {format_figure(measurement.value, measurement.unit)}{_spread(measurement)}"
    if case.tolerance:
        limit += f" less {case.tolerance:.4g} of it"
    if status == "unstable":
        count = len(measurement.samples or [])
        if interval is None or (interval.level or 0.0) < LEVEL:
            return f"{what}: {count} samples are too few to judge by: verify again, without interrupting it"
        steady = _drifting(measurement) or "the speed varies: look for other load, then take a longer `--duration`"
        return f"{what} lies on both sides of {limit} after {count} samples: {steady}"
    if isinstance(expected, Share):
        where = measurement.parameters.get(DIRECTORY)
        alone = f"by `tunetool verify --level full --target {where}`" if where else "by `--level full`"
        return f"{what} is below {limit}: {_drifting(measurement) or f'measure it alone {alone}'}"
    slowest = slowest_volume(case.measurements, measurement)
    cause = _drifting(measurement) or _cause(measurement, expected, case)
    return f"{what} is below {limit}: {f'{slowest}; ' if slowest else ''}{cause}"


def slowest_volume(measurements: Sequence[Measurement], total: Measurement) -> str | None:
    """Text: which of several volumes gave least to a figure of all together; None where there is one."""
    volumes = volumes_of(measurements, total)
    if len(volumes) < 2:
        return None
    least = min(volumes, key=lambda each: each.value)
    middle = format_figure(median(each.value for each in volumes), least.unit)
    return f"volume `{least.labels['volume']}` gave least, {format_figure(least.value, least.unit)} (median {middle})"


def _spread(measurement: Measurement) -> str:
    interval = measurement.confidence
    if interval is None:
        return ""
    if measurement.unit == "1/s":
        return f" [{format_rate(interval.low)} to {format_rate(interval.high)}]"
    return f" [{interval.low / 1e9:.4g} to {interval.high / 1e9:.4g}]"


def _drifting(measurement: Measurement) -> str | None:
    """Text: what a falling slope means; None without one."""
    trend = measurement.trend
    if trend is None or not trend.significant or (trend.change or 0.0) > -LEAST_FALL:
        return None
    fell = f"it fell by {-(trend.change or 0.0):.0%} while it was measured"
    if measurement.parameters.get("direction") == "write":
        return f"{fell}: the drives' write cache is exhausted, or they throttle (`nvme smart-log`: temperature)"
    return f"{fell}: the drives throttle (`nvme smart-log`: temperature), or other load grows"


def _cause(measurement: Measurement, expectation: Expectation, case: Case) -> str:
    ceiling = next((each.value for each in chosen(case.measurements, "ceiling")), None)
    # Virtual drives state links that nothing goes through: a ceiling that was exceeded explains nothing.
    if ceiling is not None and measurement.value <= ceiling < expectation.value:
        return (
            f"the drives' links carry {format_bandwidth(ceiling)} at most; use more or faster drives, "
            "look for links below their maximum, or expect less"
        )
    loss = case.ladder.loss if case.ladder and _stands_on_the_loss(case.ladder, measurement, case) else None
    if loss is not None:
        return f"{loss.found}; {loss.remedy}"
    failed = [check.id for check in case.checks if check.status == "fail"]
    if failed:
        return f"see {', '.join(failed)}, then verify again"
    if any(check.status == "pass" for check in case.checks):
        return "no check explains it; look at `dmesg`, drive temperatures and other load"
    return "no manifest says how it was built, so no check explains it; compare `fio` on each drive"


def _stands_on_the_loss(ladder: Ladder, measurement: Measurement, case: Case) -> bool:
    """Whether the rung that loses is below the figure: among the drives, or on the way of the same direction."""
    names = [rung.name for rung in ladder.rungs]
    lost = next((rung for rung in ladder.rungs if ladder.loss and rung.title == ladder.loss.rung), None)
    if lost is None or measurement.name not in names or names.index(lost.name) > names.index(measurement.name):
        return False
    direction = measurement.labels.get("direction")
    same_way = {each.name for each in case.measurements if each.labels.get("direction") == direction}
    return lost.kind in ("alone", "together", "array") or lost.name in same_way


def _human(name: str) -> str:
    return name.replace(".", " ")


@dataclass(frozen=True)
class ComparedEngine:
    """The check of one engine, with the verdict's sentence where its bytes differ or it could not be measured."""

    check: CheckResult
    differs: str | None = None
    failed: str | None = None


@dataclass(frozen=True)
class ComparedEngines:
    """All engines on one medium, or in one state of the files."""

    measurements: Sequence[Measurement]
    engines: Sequence[ComparedEngine]
    doubts: Sequence[str]
    """Why its figures prove nothing."""
    errors: Sequence[str] = ()


def case_of_engines(parts: Sequence[ComparedEngines], doubts: Sequence[str]) -> Case:
    """The case for the verdict; ``doubts`` are those of every part."""
    engines = [engine for part in parts for engine in part.engines]
    return Case(
        measurements=[measurement for part in parts for measurement in part.measurements],
        checks=[engine.check for engine in engines],
        words={engine.check.id: [engine.differs] for engine in engines if engine.differs},
        failed={engine.check.id: engine.failed for engine in engines if engine.failed},
        errors=[error for part in parts for error in part.errors],
        doubts=[*doubts, *(line for part in parts for line in part.doubts)],
        judged="checks",
    )
