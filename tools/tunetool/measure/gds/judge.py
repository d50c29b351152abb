"""Makes the check ``gds.path`` from cuFile's counters, or from its refusal. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tunetool.measure.direction import Direction
from tunetool.measure.evidence import LOWEST
from tunetool.measure.gds.counters import Counts
from tunetool.measure.gds.spec import Mode, Way
from tunetool.node.gds.path_choice import Decision
from tunetool.node.units import format_size
from tunetool.record import CheckResult, CheckStatus

CHECK_ID = "gds.path"
_EXPECTED = "bytes go between drives and GPU without the host's memory, by cuFile's own counters"
_SEE = "`tunetool inspect --gds` lists the blockers"


@dataclass(frozen=True)
class Moved:
    """What was asked of cuFile in one direction, and what it counted."""

    claimed_bytes: int
    counts: Counts


def way_of(moved: Mapping[Direction, Moved]) -> Way:
    """Which way the bytes went, by the counters alone."""
    direct = moved and all(each.counts.direct and not each.counts.posix for each in moved.values())
    return "direct" if direct else "compat"


def proven(mode: Mode, moved: Mapping[Direction, Moved], decision: Decision | None) -> CheckResult:
    """Whether cuFile's counters show that every byte went straight."""
    description = (
        "; ".join(describe(direction, each) for direction, each in sorted(moved.items())) or "nothing was moved"
    )
    if any(each.counts.posix for each in moved.values()):
        return answer(mode, "fail", description, remedies(decision) or _SEE)
    if moved and all(_straight(each) for each in moved.values()):
        return answer(mode, "pass", description)
    return answer(mode, "unknown", description, "cuFile's counters prove nothing here: see `dmesg | tail`")


def _straight(moved: Moved) -> bool:
    """All that was asked for, and nothing of it by another way."""
    counts = moved.counts
    whole = counts.bytes >= moved.claimed_bytes * LOWEST
    return whole and counts.direct == counts.requests > 0 and not counts.errors


def describe(direction: Direction, moved: Moved) -> str:
    """How many bytes went which way, in words."""
    counts = moved.counts
    line = f"{direction} {format_size(moved.claimed_bytes)}"
    if counts.bytes < moved.claimed_bytes * LOWEST:
        line += f", of which cuFile counted {format_size(counts.bytes)}"
    if counts.posix:
        line += f", {format_size(counts.bounced_bytes)} of it through bounce buffers in the host's memory"
    line += f" ({counts.nvidia_fs} requests by nvidia-fs, {counts.p2pdma} by P2PDMA, {counts.posix} by POSIX)"
    return line + (f"; {counts.errors} requests failed" if counts.errors else "")


def refused(mode: Mode, message: str, decision: Decision | None) -> CheckResult:
    """cuFile would not take the file: no byte can go straight, whatever is installed."""
    return answer(mode, "fail", f"cuFile refuses files here: {message}", remedies(decision) or _SEE)


def remedies(decision: Decision | None) -> str:
    """Each blocker of the best path with its remedy, in one line."""
    if decision is None:
        return ""
    first, *other_paths = decision.paths
    lines = [f"{each.found} (`{each.id}`): {each.remedy}" for each in first.blockers]
    ways = [f"{path.mode} by {len(path.blockers)}" for path in other_paths if path.blockers]
    if lines and ways:
        lines.append(f"these are those of {first.mode}; {', '.join(ways)}: `tunetool inspect --gds`")
    return "; ".join(lines)


def answer(mode: Mode, status: CheckStatus, found: str, remedy: str = "") -> CheckResult:
    """In mode auto, a missing GPUDirect is left out and does not affect the verdict."""
    if mode == "auto" and status in ("fail", "unknown"):
        status = "skip"
    return CheckResult(id=CHECK_ID, status=status, expected=_EXPECTED, found=found, remedy=remedy)
