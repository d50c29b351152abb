"""Finds a slow member by the drives' own counters, since a stripe is as fast as its slowest member."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Literal

from tunetool.measure import Direction
from tunetool.measure.evidence import Counted
from tunetool.node.machine.block_stack import BlockStack
from tunetool.record import CheckResult

SLOW_FACTOR = 3.0
"""A member this many times slower than the median of the others is a fault, not a spread between drives."""
FEWEST_MEMBERS = 3
FEWEST_IOS = 16
CHECK_ID = "drives.balance"

_EXPECTED = f"no member over {SLOW_FACTOR:g}x slower than the median of the others"


def service_times(counted: Counted, direction: Direction) -> dict[str, float]:
    """Mean seconds of a request, by device, for the devices that served enough of them."""
    times = {}
    for name, counters in counted.devices.items():
        seconds = counters.service_seconds(direction)
        if seconds is not None and counters.ios(direction) >= FEWEST_IOS:
            times[name] = seconds
    return times


def slow_factors(times: Mapping[str, float]) -> dict[str, float]:
    """By device, its time over the median of the others'."""
    factors = {}
    for name, seconds in times.items():
        others_median = median([value for other, value in times.items() if other != name])
        # The counters count whole milliseconds: below a microsecond there is nothing to compare with.
        factors[name] = seconds / max(others_median, 1e-6)
    return factors


def balance(stack: BlockStack, samples: Mapping[Direction, Sequence[Counted]]) -> CheckResult:
    """The check ``drives.balance``: failed when a member is slow in most samples of a direction."""
    names = {leaf.name: leaf.label for leaf in stack.leaves}
    if len(names) < FEWEST_MEMBERS:
        return _result("skip", f"fewer than {FEWEST_MEMBERS} drives: nothing to compare")
    compared = False
    for direction, counted in samples.items():
        rounds = []
        for sample in counted:
            times = {name: value for name, value in service_times(sample, direction).items() if name in names}
            if len(times) >= FEWEST_MEMBERS:
                rounds.append(slow_factors(times))
        compared = compared or bool(rounds)
        slow = [name for name in names if sum(r.get(name, 0) > SLOW_FACTOR for r in rounds) * 2 > len(rounds)]
        if slow:
            return _slow(names, slow, rounds, direction)
    if not compared:
        return _result("skip", "no sample to compare")
    return _result("pass", f"{len(names)} members alike")


def _slow(
    names: Mapping[str, str], slow: Sequence[str], rounds: Sequence[Mapping[str, float]], direction: Direction
) -> CheckResult:
    comparisons = "; ".join(
        f"`{names[name]}` {median([r[name] for r in rounds if name in r]):.1f}x slower to {direction} "
        f"than the median of the other {len(names) - 1}"
        for name in slow
    )
    named = ", ".join(f"`/dev/{name}`" for name in slow)
    remedy = (
        f"look at {named}: `nvme smart-log` for wear, temperature and media errors, `lspci -vv` for its link; "
        "replace it if it stays slow"
    )
    return _result("fail", comparisons, remedy)


def _result(status: Literal["pass", "fail", "skip"], found: str, remedy: str = "") -> CheckResult:
    return CheckResult(id=CHECK_ID, status=status, expected=_EXPECTED, found=found, remedy=remedy)
