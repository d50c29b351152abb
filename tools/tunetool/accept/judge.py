"""Whether a goal is held: by the interval of a figure over the rounds, or of its ratio to another of the same rounds.

Pure. This is the one judge of goals: of acceptance, of ``--expect`` of a benchmark, and of the programs in perf/.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from statistics import median
from typing import Final, NamedTuple

from tunetool.accept.goal import Goal, Pick
from tunetool.measure.statistics import ENOUGH, Estimate, coverage, estimate
from tunetool.node.units import format_count, format_figure
from tunetool.record import (
    CheckResult,
    Confidence,
    Expectation,
    GoalResult,
    GoalVerdict,
    Measurement,
    Record,
    Status,
    Verdict,
)
from tunetool.verdict import NO_EXPECTATION, WORST_FIRST, shares, tester_limit

HELD: Final = "held"
MISSED: Final = "missed"
OPEN: Final = "not decided"
SKIPPED: Final = "skipped"
GOALS_WORST_FIRST: tuple[GoalVerdict, ...] = (MISSED, OPEN, SKIPPED, HELD)
_STATUS: dict[GoalVerdict, Status] = {MISSED: "fail", OPEN: "unstable", HELD: "pass"}


def verdict(low: float, high: float, goal: float, at_least: bool) -> GoalVerdict:
    """Whether the whole interval is on the goal's side (held), on the other (missed), or on both."""
    if not at_least:
        low, high, goal = -high, -low, -goal
    return HELD if low >= goal else MISSED if high < goal else OPEN


def verdict_of(values: Sequence[float], goal: float, at_least: bool = True) -> GoalVerdict:
    """The verdict over the values of rounds: not decided before there are ``ENOUGH``."""
    if len(values) < ENOUGH:
        return OPEN
    interval = estimate(values)
    return verdict(interval.low, interval.high, goal, at_least)


class _Undecided(Exception):
    """Why there is nothing to judge by."""


class _Figure(NamedTuple):
    value: float
    confidence: Confidence | None
    rounds: int
    measured: Sequence[Measurement]


def judged(goal: Goal, records: Sequence[Record]) -> GoalResult:
    """The goal by all rounds of ``records``, which are of the same command on the same machine."""
    records = list({each.id: each for each in records}.values())  # a record that is named twice was measured once
    result = _blank(goal, OPEN).model_copy(update={"record_ids": [each.id for each in records]})
    try:
        figure = _figure(goal, records)
    except _Undecided as why:
        return result.model_copy(update={"reason": str(why)})
    more: dict[str, object] = {
        "value": figure.value,
        "confidence": figure.confidence,
        "rounds": figure.rounds,
        "evidence": [each.evidence for each in figure.measured if each.evidence is not None],
        "medium": figure.measured[0].medium,
        "program": figure.measured[0].engine,
    }
    interval = figure.confidence
    if interval is None or figure.rounds < ENOUGH or (interval.level or 0.0) < coverage(ENOUGH, 0):
        return result.model_copy(
            update={**more, "reason": f"{format_count(figure.rounds, 'round')}: fewer than {ENOUGH} decide nothing"}
        )
    word = verdict(interval.low, interval.high, goal.bound, goal.sense == "at least")
    reason = _doubt(goal, records, figure.measured, word)
    if reason:
        word = OPEN
    elif word == OPEN:
        reason = f"its interval over {figure.rounds} rounds has the bound in it"
    elif word == HELD:
        word, reason = _of_volumes(goal, records, figure.measured[0])
    return result.model_copy(update={**more, "verdict": word, "reason": reason})


def skipped(goal: Goal, lacks: str) -> GoalResult:
    """The goal on a machine that lacks what it needs."""
    return _blank(goal, SKIPPED).model_copy(update={"reason": lacks})


def not_run(goal: Goal, why: str) -> GoalResult:
    """The goal whose run left no record."""
    return _blank(goal, OPEN).model_copy(update={"reason": why})


def _blank(goal: Goal, word: GoalVerdict) -> GoalResult:
    of = {"figure": goal.of.figure, **goal.of.labels} if goal.of is not None else None
    return GoalResult(
        name=goal.name,
        run=shlex.join(goal.run),
        figure=goal.pick.figure,
        labels=dict(goal.pick.labels),
        of=of,
        sense=goal.sense,
        bound=goal.bound,
        unit=goal.unit,
        why=goal.why,
        verdict=word,
    )


def _figure(goal: Goal, records: Sequence[Record]) -> _Figure:
    """Over all records. Raises ``_Undecided``."""
    ours = [_only(goal.pick, each) for each in records]
    other = next((each.unit for each in ours if each.unit != goal.unit), None) if goal.of is None else None
    if other is not None:
        raise _Undecided(f"the figure is in {other}, and the goal in {goal.unit}")
    if len({(each.node.host, each.node.speed_hash) for each in records}) > 1:
        raise _Undecided("its records are of several machines, or of one that was changed: judge each by itself")
    if len({each.target for each in records}) > 1:
        raise _Undecided("its records are of several targets: judge each by itself")
    if len({each.medium for each in ours}) > 1:
        raise _Undecided("its runs were on different media")
    if goal.of is None:
        values = [sample for each in ours for sample in each.samples or []]
        if not values:
            # Computed from pairs of rounds: a record has its interval alone, and rounds of others cannot join them.
            most = max(ours, key=_pairs)
            return _Figure(most.value, most.confidence, _pairs(most), [most])
    else:
        theirs = [_only(goal.of, each) for each in records]
        values = [ratio for pair in zip(ours, theirs, strict=True) for ratio in _ratios(*pair)]
        ours = [*ours, *theirs]
    made = estimate(values)
    return _Figure(made.value, _confidence(made), len(values), ours)


def _of_volumes(goal: Goal, records: Sequence[Record], total: Measurement) -> tuple[GoalVerdict, str]:
    """Whether each of several volumes gives its share of what all together must reach, and the one that is worst."""
    if goal.of is not None or goal.sense != "at least" or total.unit != "B/s":
        return HELD, ""
    wanted = Expectation(name=total.name, value=goal.bound, source="goal")
    found: list[tuple[GoalVerdict, str]] = [(HELD, "")]
    for share in shares(records[0].measurements, [wanted]):
        own = Pick(share.figure.figure, {key: each for key, each in share.figure.labels.items() if key != "subject"})
        try:
            values = [sample for record in records for sample in _only(own, record).samples or []]
        except _Undecided as why:
            found.append((OPEN, str(why)))
            continue
        word = verdict_of(values, share.value)
        # One program measures all volumes: its limit shows in their sum.
        slow = tester_limit(total) if word == MISSED else None
        if slow:
            found.append((OPEN, f"{share.named}: {slow}"))
        elif word != HELD:
            middle = format_figure(median(values), total.unit) if values else "not measured"
            said = "is below" if word == MISSED else f"lies over {format_count(len(values), 'round')} on both sides of"
            found.append((word, f"{share.named}: {middle} {said} {share}"))
    return min(found, key=lambda each: GOALS_WORST_FIRST.index(each[0]))


def _pairs(figure: Measurement) -> int:
    pairs = figure.parameters.get("pairs")
    return pairs if isinstance(pairs, int) else 0


def _confidence(made: Estimate) -> Confidence | None:
    return Confidence(level=made.level, low=made.low, high=made.high, method=made.method) if made.level else None


def _only(pick: Pick, record: Record) -> Measurement:
    fitting = pick.of(record.measurements)
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        more = ", ".join(each.name for each in fitting[:4])
        raise _Undecided(f"`{pick.words()}` fits {len(fitting)} figures ({more}): add labels")
    reasons = record.verdict.reasons if record.verdict is not None else []
    raise _Undecided(f"`{pick.words()}` was not measured" + (f": {reasons[0]}" if reasons else ""))


def _ratios(ours: Measurement, theirs: Measurement) -> list[float]:
    above, below = ours.samples or [], theirs.samples or []
    if not above or len(above) != len(below):
        raise _Undecided(f"the rounds of {ours.name} and {theirs.name} make no pairs")
    if ours.unit != theirs.unit:
        raise _Undecided(f"{ours.name} is in {ours.unit}, and {theirs.name} in {theirs.unit}")
    if not all(each > 0 for each in below):
        raise _Undecided(f"{theirs.name} is 0 in a round, or less")
    ratios = [value / base for value, base in zip(above, below, strict=True)]
    if not all(map(math.isfinite, ratios)):
        raise _Undecided(f"{theirs.name} is next to 0 in a round")
    return ratios


def _doubt(goal: Goal, records: Sequence[Record], measured: Sequence[Measurement], word: GoalVerdict) -> str:
    """Why the figure proves nothing; empty where nothing is against it."""
    for record in records:
        for check in record.checks:
            if check.status in ("fail", "unknown") and _is_about(check, measured):
                return f"{check.id}: {check.found}, expected {check.expected}"
        own = record.verdict
        reasons, kinds = (own.reasons, own.kinds) if own is not None else ([], None)
        if kinds is None and own is not None and own.status == "unproven":  # before reasons had kinds
            return f"unproven: {next(iter(reasons), 'its run does not say why')}"
        for reason, kind in zip(reasons, kinds or [], strict=False):
            if kind == "unproven":
                return f"unproven: {reason}"
        for part in record.parts or []:
            doubts = [each for each in part.reasons if each != NO_EXPECTATION]
            if part.status == "unproven" and doubts:
                return f"unproven: {part.name}: {doubts[0]}"
    for each in measured:
        if each.evidence is not None and each.evidence.kind == "block" and each.evidence.worst_ratio is not None:
            return f"unproven: the drives counted {each.evidence.worst_ratio:.4f} of a round's bytes of {each.name}"
    # A program that is the bottleneck itself says nothing against the drives.
    slow = tester_limit(measured[0]) if word == MISSED and goal.of is None else None
    return slow or ""


def _is_about(check: CheckResult, measured: Sequence[Measurement]) -> bool:
    """Whether it is of an engine among these figures, or of the bytes of a whole benchmark."""
    engine = check.labels.get("engine")
    return engine is not None and engine in [each.labels.get("engine") for each in measured]


def further_rounds(goal: Goal, records: Sequence[Record], looks: Sequence[int]) -> int | None:
    """How many rounds more may decide it; None where it is decided, or where none can."""
    result = judged(goal, records)
    if result.verdict != OPEN or not result.rounds or result.rounds >= looks[-1]:
        return None
    figure = _figure(goal, records)
    if not all(each.samples for each in figure.measured) or _doubt(goal, records, figure.measured, OPEN):
        return None
    return next(look for look in looks if look > result.rounds) - result.rounds


def verdict_over(goals: Sequence[GoalResult], records: Sequence[tuple[str, Verdict | None]] = ()) -> Verdict:
    """One verdict over goals, and over the runs behind them: a run that found a fault, such as wrong bytes, falls
    short, whatever its goals say, and one that could not do all of its work is no pass. Skipped goals count for
    nothing; without any other there is nothing to judge."""
    found: list[tuple[Status, str]] = []
    for name, of_run in records:
        # What else was expected of a run's speed, by its manifest or another call, is no goal of this file.
        if of_run is not None and of_run.status == "fail" and next(iter(of_run.kinds or []), None) != "expectation":
            found.append(("fail", f"{name}: {next(iter(of_run.reasons), 'fail')}"))
        elif of_run is not None and of_run.status == "error":
            found.append(("error", f"{name}: {next(iter(of_run.reasons), 'error')}"))
    for each in goals:
        if each.verdict == SKIPPED:
            found.append(("pass", f"{title(each)}: skipped, {each.reason}"))
        elif each.verdict != HELD:
            status: Status = "error" if each.verdict == OPEN and each.value is None else _STATUS[each.verdict]
            status = "unproven" if each.reason.startswith("unproven") else status
            found.append((status, f"{title(each)}: {each.verdict}" + (f", {each.reason}" if each.reason else "")))
    if all(each.verdict == SKIPPED for each in goals):
        found.append(("unproven", "no goal could be judged: there is nothing to accept"))
    ranked = sorted(dict.fromkeys(found), key=lambda each: WORST_FIRST.index(each[0]))
    status = ranked[0][0] if ranked else "pass"
    kinds = ["expectation" if status != "pass" else "note" for status, _ in ranked]
    return Verdict.model_validate({"status": status, "reasons": [line for _, line in ranked], "kinds": kinds or None})


def title(goal: GoalResult) -> str:
    """Its name, else its figure."""
    words = goal.name or figure_of(goal)
    return f"{goal.host}: {words}" if goal.host else words


def figure_of(goal: GoalResult) -> str:
    """The figure as a reader finds it: ``durable engine=direct``."""
    words = Pick(goal.figure, goal.labels).words()
    if goal.of:
        words += (
            " of " + Pick(goal.of["figure"], {key: each for key, each in goal.of.items() if key != "figure"}).words()
        )
    return words
