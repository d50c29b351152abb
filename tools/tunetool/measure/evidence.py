"""Decides by counters before and after whether the bytes that a program claims reached the drives, and by a file's
blocks whether it holds what was written: a sparse or short one is read without a drive."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tunetool.measure import Direction
from tunetool.node.array.md_arrays import read_arrays
from tunetool.node.machine.block_stack import BlockStack, Counters
from tunetool.node.units import format_size
from tunetool.record import Evidence

LOWEST, HIGHEST = 0.98, 1.02
"""Ratio of counted to claimed bytes that proves a sample. A file system's own metadata stays far inside."""

_CLOCK_FACTOR, _CLOCK_SLACK = 1.25, 0.25
"""Factor and seconds by which bytes may move longer than fio says: its jobs do not start at the same time."""

REPEATS = 3
"""Number of samples of one direction that may be repeated because something else used the drives."""

Judgement = Literal["proven", "other-io", "other-time", "missing"]


@dataclass(frozen=True)
class Counted:
    """One sample's claim, and what each device counted during it."""

    claimed_bytes: int
    counted_bytes: int
    devices: Mapping[str, Counters]
    slack: int = 0
    """Bytes that may be counted in addition."""
    moving_seconds: float = 0.0
    """Least seconds in which nearly all of the bytes moved, by tunetool's clock; 0 without readings during the
    sample."""
    cached_bytes: int = 0
    """Bytes of files that were opened for direct I/O and that the page cache holds nevertheless; 0 where nobody looked,
    and where it holds so few that they explain nothing."""
    others: str = ""
    """Who moved bytes meanwhile, in words; empty where nobody looked."""

    @property
    def ratio(self) -> float:
        """Counted bytes for each claimed one."""
        return self.counted_bytes / self.claimed_bytes

    @property
    def judgement(self) -> Judgement:
        """Whether the claim holds. A sample with ``other-io`` is worth repeating, one with ``missing`` is not."""
        if self.ratio < LOWEST:
            return "missing"
        return "proven" if self.counted_bytes <= HIGHEST * self.claimed_bytes + self.slack else "other-io"


def obstacles(stack: BlockStack, root: str = "/") -> list[str]:
    """Why no sample on this stack can be proven, known in advance; each with its remedy."""
    if stack.in_memory:
        return [f"`{stack.directory}` lies on {stack.medium}, in memory: choose a directory on drives"]
    if not stack.counts:
        return [
            f"`{stack.directory}` lies on {stack.medium}, which has no block device whose counters could prove "
            "the bytes: choose a directory on drives"
        ]
    syncs = [
        f"array `{array.device}` does a `{array.sync.action}` ({array.sync}), which takes its drives: measure after it"
        for array in read_arrays(root)
        if array.sync is not None and array.device in stack.devices
    ]
    silent = [f"`{name}` counts nothing: run `echo 1 > /sys/block/{name}/queue/iostats`" for name in stack.silent]
    return [*silent, *syncs]


def took_longer(counted: Counted, seconds: float) -> bool:
    """Whether the bytes of a sample moved for longer than the program says that they took.

    One such sample may come from a node so busy that the program's jobs began apart; a wrong clock makes all of them
    so.
    """
    return counted.moving_seconds > _CLOCK_FACTOR * seconds + _CLOCK_SLACK


def wrong_clock(samples: Iterable[tuple[Counted | None, float]]) -> str | None:
    """Why fio's time cannot be true, from samples, each with the seconds that fio claims: its bytes took longer.

    When they moved is known from the drives' counters, looked at again and again by tunetool's own clock. How long the
    drives were busy would not tell: small reads leave fast drives idle, and whatever else a slow disk does keeps it
    busy before and after.
    """
    for counted, seconds in samples:
        if counted is not None and took_longer(counted, seconds):
            return (
                f"the drives moved its bytes for {counted.moving_seconds:.1f} s in a sample of which fio says that it "
                f"took {seconds:.1f} s: its clock is wrong; see "
                "`/sys/devices/system/clocksource/clocksource0/current_clocksource`"
            )
    return None


def explain(stack: BlockStack, direction: Direction, sample: Counted, engine: str = "fio") -> str:
    """Why ``sample``, which ``engine`` claims, proves nothing."""
    devices = ", ".join(f"`{name}`" for name in stack.counts)
    if sample.judgement == "missing":
        return (
            f"{devices} counted only {sample.ratio:.3f} of the {format_size(sample.claimed_bytes)} that {engine} "
            f"claims to {direction}: the rest never reached a drive{_cache(stack, sample)}"
        )
    foreign = format_size(sample.counted_bytes - sample.claimed_bytes)
    if sample.cached_bytes:
        return f"{devices} counted {foreign} more than {engine}'s {direction}s{_cache(stack, sample)}"
    others = f": {sample.others}" if sample.others else ""
    return (
        f"{devices} counted {foreign} more than {engine}'s {direction}s, {REPEATS} repeats included: something else "
        f"uses the drives{others}; stop it (see `pidstat -d 1`) and verify again"
    )


def _cache(stack: BlockStack, sample: Counted) -> str:
    """Text: the page cache as the cause, where it is one."""
    if sample.cached_bytes:
        return (
            f": the page cache holds {format_size(sample.cached_bytes)} of files that were opened for direct I/O, so "
            f"{stack.fs_type} ignores that and the page cache answers for the drives; choose a directory on another "
            "file system, or mount this one without `data=journal`"
        )
    if stack.medium.startswith("loop device"):
        return "; the page cache may hold the loop device's file: `losetup --direct-io=on`"
    return ""


def doubt(
    stack: BlockStack, direction: Direction, counted: Iterable[Counted | None], engine: str = "fio"
) -> str | None:
    """Why samples prove nothing; None where the drives' counters agree with all that they counted."""
    bad = [each for each in counted if each is not None and each.judgement != "proven"]
    return explain(stack, direction, _worst(bad), engine) if bad else None


def summed(stack: BlockStack, counted: Sequence[Counted | None], claimed: int) -> Evidence:
    """A figure's evidence: the bytes that all of its samples claim, against what was counted meanwhile."""
    known = [sample.counted_bytes for sample in counted if sample is not None]
    bad = [sample for sample in counted if sample is not None and sample.judgement != "proven"]
    if not known:
        return Evidence(kind="memory" if stack.in_memory else "none", claimed_bytes=claimed)
    return Evidence(
        kind="memory" if stack.in_memory else "block",
        device=", ".join(stack.counts),
        claimed_bytes=claimed,
        counted_bytes=sum(known),
        ratio=sum(known) / claimed,
        worst_ratio=_worst(bad).ratio if bad else None,
    )


def _worst(bad: Sequence[Counted]) -> Counted:
    """The sample to report: a contradicted claim matters more than other I/O."""
    return min(bad, key=lambda sample: (sample.judgement != "missing", -abs(sample.ratio - 1)))


@dataclass(frozen=True)
class Claim:
    """The bytes that it moved, and the seconds that this took."""

    claimed_bytes: int
    seconds: float

    @property
    def bandwidth(self) -> float:
        """Bytes per second."""
        return self.claimed_bytes / self.seconds


_STAT_BLOCK = 512
"""``st_blocks`` counts in units of 512 bytes, whatever the file system's block (stat(2))."""


def incomplete(directory: Path, names: list[str], size: int) -> list[str]:
    """What is wrong with the files, a line for each that holds less than ``size`` bytes."""
    problems = []
    for name in names:
        try:
            status = (directory / name).stat()
        except OSError as error:
            problems.append(f"`{name}` is gone: {error.strerror}")
            continue
        stored = min(status.st_size, status.st_blocks * _STAT_BLOCK)
        if stored < size:
            shortfall = f"`{name}` holds {format_size(stored)} of the {format_size(size)} that were written to it"
            problems.append(f"{shortfall}: a sparse, short or compressed file proves nothing")
    return problems
