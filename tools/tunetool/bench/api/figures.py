"""From the answers of the rows to checks, from the timed transfers to measurements, and the verdict. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tunetool.bench.api.catalogue import OLDEST, ROWS, VERSION, Row
from tunetool.bench.api.preflight import Plan
from tunetool.bench.api.samples import Answer, Gathered
from tunetool.measure import aio
from tunetool.measure.evidence import obstacles
from tunetool.node.units import format_count
from tunetool.record import CheckResult, CheckStatus, Measurement
from tunetool.verdict import Case

_REFUSED = ("raised", "died")
"""Endings by which a wrong use does no harm to data."""


def version_check(planned: Plan) -> CheckResult:
    """Whether DeepSpeed is there, and has the calls."""
    expected = f"deepspeed {'.'.join(map(str, OLDEST))} or newer, with its op `async_io`"
    installed = planned.installed
    if installed is None:
        return CheckResult(id=VERSION, status="skip", expected=expected, found=planned.missing, remedy=planned.remedy)
    text = f"deepspeed {installed.deepspeed}, torch {installed.torch}"
    return CheckResult(id=VERSION, status="pass", expected=expected, found=text)


def checks(planned: Plan, answers: Mapping[str, Answer], misuses: bool) -> list[CheckResult]:
    """The wrong uses, or all other rows; a row without an answer is a skip."""
    return [_check(planned, row, answers.get(row.id)) for row in ROWS if (row.group == "misuse") == misuses]


def _check(planned: Plan, row: Row, answer: Answer | None) -> CheckResult:
    status: CheckStatus
    if answer is None:
        status, found, remedy = "skip", planned.missing or "the run ended before it", planned.remedy
    else:
        status, found = _status(row, answer), answer.found
        if status == "skip" and answer.ending != "skip":
            found = f"GPUDirect Storage does not work here: {found}"
        remedy = row.remedy if status == "fail" else ""
    labels = {"subject": "api", "group": row.group, "call": row.name}
    return CheckResult(id=row.id, labels=labels, status=status, expected=row.expected, found=found, remedy=remedy)


def _status(row: Row, answer: Answer) -> CheckStatus:
    """A wrong use may end the process, a documented call may not."""
    if answer.ending in ("pass", "fail", "skip"):
        return answer.ending
    if row.group == "misuse":
        return "pass" if answer.ending in _REFUSED else "fail"
    # Whether GPUDirect Storage can work is another command's judgement.
    return "skip" if row.name == "gds" else "fail"


def measurements(planned: Plan, gathered: Gathered) -> list[Measurement]:
    """A bandwidth for each way and direction; a write's time includes its sync."""
    return [
        aio.figure(
            "api.{way}.{direction}",
            transfer.spec,
            planned.stack,
            transfer.outcome,
            direction,
            [sample.bandwidth for sample in samples],
            {"way": name},
        )
        for name, transfer in gathered.transfers.items()
        for direction, samples in sorted(transfer.outcome.samples.items())
        if samples
    ]


def case(planned: Plan, gathered: Gathered, doubts: Sequence[str]) -> Case:
    """The documented calls are judged. A wrong use that is not refused is the same on every node: it is noted."""
    return Case(
        measurements=measurements(planned, gathered),
        checks=[version_check(planned), *checks(planned, gathered.answers, misuses=False)],
        doubts=[*doubts, *_unproven(planned, gathered)],
        notes=list(_notes(planned, gathered)),
        judged="checks",
    )


def _unproven(planned: Plan, gathered: Gathered) -> Iterator[str]:
    if planned.installed is None:
        return
    yield from obstacles(planned.stack)
    for name, transfer in gathered.transfers.items():
        for reason in aio.unproven(transfer.spec, planned.stack, transfer.outcome).values():
            yield f"{name}: {reason}"


def _notes(planned: Plan, gathered: Gathered) -> Iterator[str]:
    misuses = [check for check in checks(planned, gathered.answers, misuses=True) if check.status != "skip"]
    taken = [check.labels["call"] for check in misuses if check.status == "fail"]
    if taken:
        count = format_count(len(misuses), "wrong use")
        yield f"{len(taken)} of {count} are not refused and do harm, by DeepSpeed on any node: {', '.join(taken)}"
