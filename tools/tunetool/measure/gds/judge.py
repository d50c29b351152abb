"""From what cuFile counted, or why it would not, to the check ``gds.path``. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tunetool.measure.evidence import LOWEST
from tunetool.measure.fio import Direction
from tunetool.measure.gds.counters import Counts
from tunetool.measure.gds.spec import Mode, Way
from tunetool.node.gds import Decision
from tunetool.node.units import format_size
from tunetool.record import CheckResult, CheckStatus

CHECK_ID = "gds.path"
_EXPECTED = "bytes go between drives and GPU without the host's memory, by cuFile's own counters"
_BOUNCED = "`tunetool inspect --gds` names what stands in the way"


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
    lines = [told(direction, each) for direction, each in sorted(moved.items())]
    faults = [fault for each in moved.values() for fault in _faults(each)]
    if not moved:
        return answer(mode, "unknown", "nothing was moved")
    if not faults:
        return answer(mode, "pass", "; ".join(lines))
    if any(each.counts.bytes < each.claimed_bytes * LOWEST for each in moved.values()):
        return answer(mode, "unknown", "; ".join([*faults, *lines]), "its counters prove nothing: see `dmesg | tail`")
    return answer(mode, "fail", "; ".join([*faults, *lines]), remedies(decision) or _BOUNCED)


def _faults(moved: Moved) -> list[str]:
    counts = moved.counts
    found = []
    if counts.bytes < moved.claimed_bytes * LOWEST:
        found.append(f"cuFile counted {format_size(counts.bytes)} of {format_size(moved.claimed_bytes)}")
    elif counts.posix or not counts.direct:
        found.append(f"bounce buffers in the host's memory took {format_size(counts.bounced_bytes)}")
    if counts.errors:
        found.append(f"{counts.errors} requests failed")
    return found


def told(direction: Direction, moved: Moved) -> str:
    """How many bytes went which way."""
    counts = moved.counts
    return (
        f"{direction} {format_size(counts.bytes)} in {counts.requests} requests: "
        f"{counts.nvidia_fs} by nvidia-fs, {counts.p2pdma} by P2PDMA, {counts.posix} by POSIX"
    )


def refused(mode: Mode, message: str, decision: Decision | None) -> CheckResult:
    """cuFile would not take the file: no byte can go straight, whatever is installed."""
    return answer(mode, "fail", f"cuFile refuses files here: {message}", remedies(decision) or _BOUNCED)


def remedies(decision: Decision | None) -> str:
    """Each blocker of the best path with its cure, in one line."""
    if decision is None:
        return ""
    first, *others = decision.paths
    lines = [f"{each.found} (`{each.id}`): {each.remedy}" for each in first.blockers]
    ways = [f"{path.mode} by {len(path.blockers)}" for path in others if path.blockers]
    if lines and ways:
        lines.append(f"these are those of {first.mode}; {', '.join(ways)}: `tunetool inspect --gds`")
    return "; ".join(lines)


def answer(mode: Mode, status: CheckStatus, found: str, remedy: str = "") -> CheckResult:
    """In mode auto nobody asked for GPUDirect: what is not there is left out, and has no say."""
    if mode == "auto" and status in ("fail", "unknown"):
        status = "skip"
    return CheckResult(id=CHECK_ID, status=status, expected=_EXPECTED, found=found, remedy=remedy)
