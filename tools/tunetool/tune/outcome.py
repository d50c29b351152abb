"""Makes the record of a search: figures, the chosen setting, and the checks."""

from __future__ import annotations

from dataclasses import dataclass, field

from tunetool.measure import session
from tunetool.measure.figure import What, computed
from tunetool.measure.figures import ceiling_figures
from tunetool.node.machine.block_stack import BlockStack
from tunetool.record import CheckResult, Measurement, Scalar, chosen
from tunetool.tune.pairs import Choice
from tunetool.tune.request import Request
from tunetool.tune.samples import Samples, block_of, figures
from tunetool.tune.search import Findings
from tunetool.verdict import Case, tester_limit

KIND = "tune"
GAIN = "gain"
"""The figure of a goal: the choice against the default."""
SEARCH, ACCEPTED = "tune.search", "tune.block"


@dataclass
class Work:
    """The results of a run, complete or not."""

    samples: Samples | None = None
    findings: Findings | None = None
    checks: list[CheckResult] = field(default_factory=list)


def conclude(request: Request, stack: BlockStack, work: Work) -> session.Findings:
    """The contents of the record, for a failed run too."""
    conditions: dict[str, Scalar] = {"medium": stack.medium, "device": request.device, "processes": request.processes}
    measurements: list[Measurement] = []
    if work.samples is not None:
        conditions["transfer_bytes"] = work.samples.driver.io_bytes
        conditions["samples_thrown_away"] = work.samples.thrown
        measurements = [*figures(work.samples, conditions), *ceiling_figures(stack)]
    checks = list(work.checks)
    notes: list[str] = []
    if work.findings is not None:
        notes = _limited_by_the_driver(work.findings, measurements, request)
        measurements += [_gain(choice, work, stack, request) for choice in work.findings.choices.values()]
        checks.insert(0, _search_check(request, work))
    case = Case(measurements=measurements, checks=checks, notes=notes, judged="work")
    return session.Findings(case, target=stack.directory, stack=stack)


def _limited_by_the_driver(findings: Findings, measurements: list[Measurement], request: Request) -> list[str]:
    """The figures of chosen settings that the storage may exceed."""
    notes: list[str] = []
    for settings, direction in findings.decided:
        figure = next(iter(chosen(measurements, "bandwidth", block=block_of(settings), direction=direction)), None)
        limit = tester_limit(figure) if figure is not None else None
        if limit is not None:
            notes.append(f"{direction} by `{settings}`: {limit}: the storage may be faster; {_MORE[request.driver]}")
    return notes


_MORE = {
    "deepspeed": "a job of as many processes gets no more from it; tune with more `--processes`, or free the cores",
    "fio": "DeepSpeed's handle may differ: tune without `--driver fio`, or free the cores",
}


def _gain(choice: Choice, work: Work, stack: BlockStack, request: Request) -> Measurement:
    assert work.samples is not None  # noqa: S101  (there are findings)
    parameters: dict[str, Scalar] = {
        "goal": choice.goal,
        "mix": str(request.mix),
        "significant": choice.significant,
        "probability": choice.gain.probability,
        "pairs": choice.pairs,
        "rate": choice.rate,
        "default_rate": choice.default_rate,
        **choice.settings.block(),
    }
    what = What(
        "tune.gain.{goal}",
        "ratio",
        work.samples.driver.engine,
        stack.medium,
        GAIN,
        {"goal": choice.goal},
        parameters=parameters,
    )
    return computed(what, choice.gain.ratio, choice.interval)


def _search_check(request: Request, work: Work) -> CheckResult:
    findings, samples = work.findings, work.samples
    assert findings is not None  # noqa: S101  (asked before)
    assert samples is not None  # noqa: S101  (there are findings)
    choice = findings.choices[request.mix.goals[-1]]
    taken = sum(len(measured) for sides in samples.kept.values() for measured in sides.values())
    result = (
        f"{choice.settings}: {choice.gain.ratio:.3f} of the default's speed, {choice.pairs} pairs"
        if choice.significant
        else "no significant difference from DeepSpeed's default, which is kept"
    )
    return CheckResult(
        id=SEARCH,
        status="pass",
        expected="the fastest setting, or DeepSpeed's default where nothing is significantly faster",
        found=f"{result}; {len(samples.kept)} of {len(request.space)} settings tried, {taken} samples",
    )
