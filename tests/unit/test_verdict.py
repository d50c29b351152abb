"""The verdict: only a judgement leads to a pass, and statuses have the precedence of contract 3."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import combinations
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import sampled
from tunetool.errors import ExitCode
from tunetool.measure.statistics import LOOKS
from tunetool.record import (
    CheckResult,
    Expectation,
    Ladder,
    Loss,
    Measurement,
    Rung,
    Status,
    Trend,
    Verdict,
)
from tunetool.verdict import (
    TESTER_CEILING,
    TESTER_CPU_SHARE,
    Case,
    Judged,
    code_of,
    exit_code,
    judge,
    judged_expectations,
)

RATES = st.floats(min_value=1.0, max_value=1e12)
STATUSES = st.sampled_from(get_args(Status))
CHECK_STATUSES = st.sampled_from(["pass", "fail", "skip", "unknown"])


def figure(*given_samples: float, name: str = "sequential.read", kind: str = "block", change: float = 0) -> Measurement:
    """Repeat a single sample as often as a judgement needs."""
    samples = given_samples * LOOKS[0][0] if len(given_samples) == 1 else given_samples
    return sampled(
        name,
        *samples,
        trend=Trend(slope_per_second=change, significant=bool(change), change=change),
        parameters={"direction": name.rsplit(".", maxsplit=1)[-1]},
        evidence={"kind": kind, "ratio": 1.0},
    )


def wanted(value: float, name: str = "sequential.read") -> Expectation:
    return Expectation(name=name, value=value, source="--expect")


def check(status: str, identity: str = "array.chunk") -> CheckResult:
    return CheckResult.model_validate(
        {
            "id": identity,
            "status": status,
            "expected": "1 MiB",
            "found": "512 KiB",
            "remedy": "run `tunetool provision`",
        }
    )


@given(st.lists(RATES, min_size=6, max_size=11), RATES, st.floats(0, 0.4))
def test_the_whole_interval_decides(samples: list[float], limit: float, tolerance: float) -> None:
    case = Case(measurements=[figure(*samples)], expectations=[wanted(limit)], tolerance=tolerance)
    status = judge(case).status
    assert (status == "pass") == (min(samples) >= limit * (1 - tolerance))
    assert (status == "fail") == (max(samples) < limit * (1 - tolerance))


@given(st.lists(RATES, min_size=2, max_size=5), RATES)
def test_too_few_samples_decide_nothing(samples: list[float], limit: float) -> None:
    verdict = judge(Case(measurements=[figure(*samples)], expectations=[wanted(limit)]))
    assert verdict.status == "unstable"
    assert "too few to judge by" in verdict.reasons[0]


def test_a_gibibyte_is_not_a_gigabyte() -> None:
    # 50 GiB/s are 53.7 GB/s: a node that reads 51 GB/s reaches 50 GB/s but not 50 GiB/s.
    assert judge(Case(measurements=[figure(51e9)], expectations=[wanted(50e9)])).status == "pass"
    assert judge(Case(measurements=[figure(51e9)], expectations=[wanted(50 * 2**30)])).status == "fail"


def test_a_fall_is_named_with_its_cause() -> None:
    samples = (60e9, 58e9, 55e9, 52e9, 49e9, 46e9)
    for name, cause in (("sequential.write", "write cache is exhausted"), ("sequential.read", "throttle")):
        case = Case(measurements=[figure(*samples, name=name, change=-0.26)], expectations=[wanted(50e9, name)])
        verdict = judge(case)
        assert verdict.status == "unstable"
        assert "it fell by 26%" in verdict.reasons[0]
        assert cause in verdict.reasons[0]


def test_what_is_forgiven_is_said() -> None:
    case = Case(measurements=[figure(40e9)], expectations=[wanted(50e9)], tolerance=0.02)
    assert "50 GB/s (46.57 GiB/s) less 0.02 of it" in judge(case).reasons[0]


@given(
    st.lists(RATES, max_size=3),
    st.lists(RATES, max_size=2),
    st.lists(CHECK_STATUSES, max_size=4),
    st.lists(st.just("reason"), max_size=1),
    st.lists(st.just("reason"), max_size=1),
    st.booleans(),
)
def test_a_pass_needs_something_judged_and_nothing_against_it(
    samples: list[float], limits: list[float], checks: list[str], doubts: list[str], errors: list[str], measured: bool
) -> None:
    names = ["sequential.read", "sequential.write"]
    case = Case(
        measurements=[figure(*samples, name=name) for name in names if samples],
        expectations=[wanted(limit, name) for limit, name in zip(limits, names, strict=False)],
        checks=[check(status) for status in checks],
        doubts=doubts,
        errors=errors,
        judged="speed" if measured else "checks",
    )
    verdict = judge(case)
    if verdict.status == "pass":
        assert not errors
        assert not {"fail", "unknown"} & set(checks)
        assert (limits and samples and not doubts) if measured else "pass" in checks
    else:
        assert verdict.reasons
    if "fail" in checks:
        assert verdict.status == "fail"
    judged = judged_expectations(case)
    assert len(judged) == len(limits)
    if verdict.status == "pass" and measured:
        assert {expectation.status for expectation in judged} == {"pass"}


@given(st.lists(STATUSES))
def test_precedence(statuses: list[Status]) -> None:
    code = exit_code(statuses)
    if "fail" in statuses:
        assert code is ExitCode.FALLS_SHORT
    elif statuses and set(statuses) == {"pass"}:
        assert code is ExitCode.OK
    else:
        assert code is ExitCode.NOT_JUDGED
    # A record over parts or hosts has the same precedence, in its status and in the order of its reasons.
    verdict = judge(
        Case(parts=[(str(n), Verdict(status=each, reasons=[])) for n, each in enumerate(statuses)], judged="parts")
    )
    assert code_of(verdict) is code
    statements = [reason.partition(": ")[2] for reason in verdict.reasons]
    if statuses:
        assert statements == sorted(statements, key=ORDER.index)
        assert len(statements) == len([each for each in statuses if each != "pass"])


ORDER = ("fail", "error", "unproven", "unstable")
HOLDS: Mapping[Judged, Case] = {
    "speed": Case([figure(60e9)], [wanted(50e9)]),
    "checks": Case(checks=[check("pass", "good")], judged="checks"),
    "parts": Case(parts=[("verify", Verdict(status="pass", reasons=[]))], judged="parts"),
    "work": Case(judged="work"),
}
"""One passing case of each kind of record."""
AGAINST: Mapping[str, tuple[Status, Callable[[Case], Case]]] = {
    "a failed check": ("fail", lambda case: replace(case, checks=[*case.checks, check("fail", "bad")])),
    "an error": ("error", lambda case: replace(case, errors=["the disk went away"])),
    "an engine that failed": (
        "error",
        lambda case: replace(case, checks=[*case.checks, check("unknown", "died")], failed={"died": "it died"}),
    ),
    "an unknown check": ("unproven", lambda case: replace(case, checks=[*case.checks, check("unknown", "open")])),
    "a doubt": ("unproven", lambda case: replace(case, doubts=["foreign code"])),
    "a failed part": (
        "fail",
        lambda case: replace(case, parts=[*case.parts, ("a", Verdict(status="fail", reasons=[]))]),
    ),
    "an unstable part": (
        "unstable",
        lambda case: replace(case, parts=[*case.parts, ("b", Verdict(status="unstable", reasons=[]))]),
    ),
}
"""Obstacles to a pass, and the status that each leads to."""


@pytest.mark.parametrize("kind", get_args(Judged))
@pytest.mark.parametrize("count", range(3))
def test_one_precedence_over_every_kind_of_record(kind: Judged, count: int) -> None:
    for chosen in combinations(AGAINST, count):
        case = HOLDS[kind]
        for name in chosen:
            case = AGAINST[name][1](case)
        verdict = judge(case)
        statuses = [AGAINST[name][0] for name in chosen]
        wanted_status = min(statuses, key=ORDER.index, default="pass")
        assert verdict.status == wanted_status, chosen
        assert code_of(verdict) is exit_code([wanted_status])
        assert len(verdict.reasons) == count, verdict.reasons


def test_what_judges_has_no_path_to_a_pass_without_a_judgement() -> None:
    assert judge(Case(judged="checks")).status == "unproven"
    assert judge(Case(checks=[check("skip")], judged="checks")).status == "unproven"
    assert judge(Case(judged="parts")).status == "error"
    assert judge(Case()).status == "unproven"
    assert code_of(None) is ExitCode.NOT_JUDGED


def test_a_check_may_be_put_in_other_words() -> None:
    verdict = judge(Case(checks=[check("fail", "a")], words={"a": ["`x` is gone", "`y` is gone"]}, judged="checks"))
    assert (verdict.status, verdict.reasons) == ("fail", ["`x` is gone", "`y` is gone"])


def test_exactly_the_expectation_is_enough() -> None:
    assert judge(Case(measurements=[figure(50e9)], expectations=[wanted(50e9)])).status == "pass"


def volume(name: str, drives: str, value: float) -> Measurement:
    own = figure(value)
    more = {"name": f"{own.name}.{name}", "labels": {**own.labels, "volume": name}, "parameters": {"drives": drives}}
    return own.model_copy(update=more)


def test_a_volume_of_drives_unknown_leaves_no_share_to_judge() -> None:
    """Of how many drives the other's are a part is not known then."""
    total = figure(10e9).model_copy(update={"parameters": {"drives": "S1, S2"}})
    case = Case([total, volume("numa0", "S1, S2", 5e9), volume("numa1", "", 5e9)], [wanted(9e9)])
    assert judge(case).status == "pass", judge(case).reasons
    known = Case([total, volume("numa0", "S1", 5e9), volume("numa1", "S2", 4e9)], [wanted(9e9)])
    assert judge(known).status == "fail"


def test_without_expectation_nothing_is_judged() -> None:
    verdict = judge(Case(measurements=[figure(50e9)], checks=[check("pass")]))
    assert verdict.status == "unproven"
    assert verdict.reasons[0].startswith("no expectation")


def test_a_failed_check_fails_a_fast_node_and_tells_the_remedy() -> None:
    verdict = judge(Case(measurements=[figure(60e9)], expectations=[wanted(50e9)], checks=[check("fail")]))
    assert verdict.status == "fail"
    assert verdict.reasons == ["array.chunk: 512 KiB, expected 1 MiB: run `tunetool provision`"]


def test_bytes_that_nothing_proves_are_neither_pass_nor_fail() -> None:
    for samples in ((60e9,), (1e9,)):
        for case in (
            Case(measurements=[figure(*samples)], expectations=[wanted(50e9)], unproven={"sequential.read": "why"}),
            Case(measurements=[figure(*samples, kind="memory")], expectations=[wanted(50e9)]),
            Case(measurements=[figure(*samples, kind="none")], expectations=[wanted(50e9)]),
            Case(measurements=[figure(*samples)], expectations=[wanted(50e9)], doubts=["tmpfs"]),
        ):
            assert judge(case).status == "unproven"


def test_a_shortfall_outranks_what_could_not_be_judged() -> None:
    case = Case(
        measurements=[figure(60e9), figure(1e9, name="sequential.write")],
        expectations=[wanted(50e9), wanted(25e9, "sequential.write")],
        unproven={"sequential.read": "other I/O"},
    )
    verdict = judge(case)
    assert verdict.status == "fail"
    assert len(verdict.reasons) == 2


def test_the_reason_names_the_ceiling_of_the_links() -> None:
    ceiling = figure(31.5e9, name="ceiling.link")
    verdict = judge(Case(measurements=[figure(30e9), ceiling], expectations=[wanted(50e9)]))
    assert "links carry 31.5 GB/s" in verdict.reasons[0]


def test_a_ceiling_that_was_exceeded_explains_nothing() -> None:
    ceiling = figure(2e9, name="ceiling.link")
    verdict = judge(Case(measurements=[figure(5e9), ceiling], expectations=[wanted(50e9)]))
    assert verdict.status == "fail"
    assert "links carry" not in verdict.reasons[0]


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({TESTER_CEILING: 9e9}, "without storage reaches 9 GB/s"),
        ({TESTER_CPU_SHARE: 0.96}, "kept 96% of the cores busy"),
    ],
    ids=["near the null target", "no core left"],
)
def test_a_slow_tester_is_no_slow_drive(parameters: dict[str, float], said: str) -> None:
    slow = figure(8e9)
    slow = slow.model_copy(update={"parameters": {**slow.parameters, **parameters}})
    case = Case(measurements=[slow], expectations=[wanted(50e9)])
    verdict = judge(case)
    assert verdict.status == "unproven"
    assert [each.status for each in judged_expectations(case)] == ["unproven"]
    assert len(verdict.reasons) == 1
    assert said in verdict.reasons[0]
    assert "the drives may be faster" in verdict.reasons[0]
    # What is fast enough is so whoever was the bottleneck, and a slow tester excuses nothing else.
    assert judge(replace(case, expectations=[wanted(8e9)])).status == "pass"
    assert judge(replace(case, checks=[check("fail")])).status == "fail"
    assert judge(replace(case, unproven={"sequential.read": "the counters disagree"})).reasons == [
        "sequential read: the counters disagree"
    ]


@pytest.mark.parametrize("parameters", [{TESTER_CEILING: 80e9}, {TESTER_CPU_SHARE: 0.3}, {}])
def test_a_tester_that_was_free_to_go_faster_excuses_nothing(parameters: dict[str, float]) -> None:
    slow = figure(8e9)
    slow = slow.model_copy(update={"parameters": {**slow.parameters, **parameters}})
    verdict = judge(Case(measurements=[slow], expectations=[wanted(50e9)]))
    assert verdict.status == "fail"
    assert "tester" not in verdict.reasons[0]


def test_the_reason_points_to_the_check_that_explains_it() -> None:
    checks = [check("fail", "drives.balance")]
    verdict = judge(Case(measurements=[figure(8e9)], expectations=[wanted(50e9)], checks=checks))
    assert any("see drives.balance" in reason for reason in verdict.reasons)


def test_a_spread_over_the_expectation_is_unstable() -> None:
    verdict = judge(Case(measurements=[figure(49e9, 51e9, 52e9)], expectations=[wanted(50e9)]))
    assert verdict.status == "unstable"
    assert "49 to 52" in verdict.reasons[0]


def test_configuration_alone() -> None:
    assert judge(Case(checks=[check("pass"), check("skip")], judged="checks")).status == "pass"
    assert judge(Case(checks=[check("pass"), check("unknown")], judged="checks")).status == "unproven"
    assert judge(Case(checks=[check("skip")], judged="checks")).status == "unproven"
    assert judge(Case(judged="checks")).status == "unproven"


def test_what_was_not_measured_is_an_error() -> None:
    verdict = judge(Case(expectations=[wanted(50e9)]))
    assert (verdict.status, verdict.reasons) == ("error", ["sequential read was not measured"])
    assert judge(Case(expectations=[wanted(50e9)], errors=["`fio` is not on PATH"])).reasons == ["`fio` is not on PATH"]


@pytest.mark.parametrize(
    ("lost", "name", "explained"),
    [
        ("drive.read", "sequential.read", True),
        ("drive.read", "sequential.write", True),
        ("sequential.read", "sequential.read", True),
        ("sequential.read", "sequential.write", False),
        ("checkpoint.save", "sequential.write", False),
        ("sustained.write", "random.read.4k", False),
    ],
)
def test_the_reason_is_the_rung_below_that_loses(lost: str, name: str, explained: bool) -> None:
    kinds = {
        "drive.read": "alone",
        "sequential.read": "filesystem",
        "sequential.write": "none",
        "sustained.write": "sustained",
        "random.read.4k": "random-4k",
        "checkpoint.save": "checkpoint",
    }
    ladder = Ladder(
        rungs=[Rung(name=each, title=f"title of {each}", kind=kind) for each, kind in kinds.items()],
        loss=Loss(rung=f"title of {lost}", cause="slow-drive", found="`SER5` is slow", remedy="replace it"),
    )
    measured = [figure(*[4.0] * 6, name=each) for each in kinds]
    reasons = judge(Case(measured, [wanted(5.0, name)], ladder=ladder)).reasons
    assert ("`SER5` is slow; replace it" in reasons[0]) == explained
