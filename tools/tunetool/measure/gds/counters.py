"""cuFile's counters, level 3, from the bytes that libcufile fills; and the check ``gds.path`` by them, or by cuFile's
refusal. Pure.

Read here and not by cuda-bindings' own classes: those know one layout, and libcufile 1.19 changed it in the middle
(``cufile.h`` of both), so that bindings newer than the library would read every count from a wrong place.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tunetool.measure import Direction
from tunetool.measure.evidence import LOWEST
from tunetool.measure.gds.spec import Mode, Way
from tunetool.node.gds.path_choice import Decision
from tunetool.node.units import format_size
from tunetool.record import CheckResult, CheckStatus

FIRST = (1, 15)
"""The first libcufile whose counters a program can read."""
_VECTORS = (1, 19)
"""The first whose basic counters go on with those of vector I/O."""
_BASIC, _BASIC_WITH_VECTORS, _HISTOGRAMS, _GPUS, _GPU = 512, 624, 512, 16, 248
_COUNTS = {"read": 16, "write": 16 + 13 * 8}
"""Where a GPU's counts of a direction begin, after its UUID."""


@dataclass(frozen=True)
class Counts:
    """What went one way, all GPUs together. Requests are cuFile's."""

    bytes: int = 0
    requests: int = 0
    p2pdma: int = 0
    nvidia_fs: int = 0
    posix: int = 0
    unaligned: int = 0
    rerouted: int = 0
    """Went through the memory of another GPU or of the host (dynamic routing)."""
    errors: int = 0

    @property
    def direct(self) -> int:
        """Requests that drives and GPU served between them."""
        return self.p2pdma + self.nvidia_fs

    @property
    def bounced_bytes(self) -> int:
        """Bytes that went through memory of the host; requests are of one size here."""
        return self.bytes * self.posix // self.requests if self.requests else 0

    def since(self, before: Counts) -> Counts:
        """What was added after ``before``."""
        return Counts(*(after - was for after, was in zip(_tuple(self), _tuple(before), strict=True)))


def _tuple(counts: Counts) -> Sequence[int]:
    return [getattr(counts, name) for name in Counts.__dataclass_fields__]


def version_of(number: int) -> tuple[int, int]:
    """``cuFileGetVersion`` answers 1150 for 1.15."""
    return number // 1000, number % 1000 // 10


def parse(raw: bytes, version: tuple[int, int], direction: Direction) -> Counts:
    """The counts of ``direction`` in a CUfileStatsLevel3_t of libcufile ``version``. Raises ``ValueError``."""
    start = (_BASIC_WITH_VECTORS if version >= _VECTORS else _BASIC) + _HISTOGRAMS
    (gpus,) = struct.unpack_from("<I", raw, start)
    if gpus > _GPUS:
        raise ValueError(f"cuFile's counters name {gpus} GPUs: their layout is another one")
    totals = [0] * len(Counts.__dataclass_fields__)
    for index in range(gpus):
        fields = struct.unpack_from("<10Q", raw, start + 8 + index * _GPU + _COUNTS[direction])
        errors = struct.unpack_from("<Q", raw, start + 8 + index * _GPU + _COUNTS[direction] + _ERRORS[direction])[0]
        moved, _, _, _, requests, p2pdma, nvidia_fs, posix, unaligned, rerouted = fields
        for position, value in enumerate((moved, requests, p2pdma, nvidia_fs, posix, unaligned, rerouted, errors)):
            totals[position] += value
    return Counts(*totals)


_ERRORS = {"read": 12 * 8, "write": 10 * 8}
"""Offset of the errors after the first count; reads have two more counts in between."""


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
