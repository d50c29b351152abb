"""From rounds to the record's measurements, its checks and its verdict. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from tunetool.advise.drive_life import YEAR, Drives, life
from tunetool.advise.node_loss import DAY
from tunetool.measure.evidence import Counted, doubt, obstacles
from tunetool.measure.figure import Quantity, What, figure, measured
from tunetool.measure.rounds import compared, ratio
from tunetool.measure.sampling import Repeats
from tunetool.node.machine.block_stack import BlockStack
from tunetool.node.units import format_count
from tunetool.record import CheckResult, CheckStatus, Measurement, Scalar
from tunetool.verdict import Case, ComparedEngine, ComparedEngines, case_of_engines

FIO, PAGE_CACHE, PREFILL = "fio", "page-cache", "prefill"
CACHED = (PAGE_CACHE, "lmcache")
"""Engines for which the page cache may answer: what the drives count proves nothing about them, and is a figure."""
SLACK_BYTES = 8 << 20
"""Bytes that a journal and the system's log may move besides."""
EXPECTED = "every block as it was written, by its sum"


@dataclass(frozen=True)
class Reading:
    """One round of an engine: the requests, then prefixes of given lengths. fio's has bytes and seconds alone."""

    seconds: float
    """Of reading for the requests."""
    restored_bytes: int
    claimed_bytes: int
    """All that was read, for prefixes of given lengths too."""
    counted: Counted | None
    moment: float
    restores: Sequence[tuple[int, float]] = ()
    """Tokens and seconds of each request that found something."""
    prefixes: Mapping[int, Sequence[float]] = field(default_factory=dict)
    """Seconds by tokens."""
    written_bytes: int = 0
    writing: float = 0.0
    drive_read: int | None = None
    drive_written: int | None = None
    """By the drives' counters; None where none counts."""
    wrong: int = 0
    """Blocks that had other bytes."""


@dataclass
class Row:
    """An engine, or fio."""

    engine: str
    readings: dict[int, Reading] = field(default_factory=dict)
    """By round."""
    repeated: Repeats = field(default_factory=Repeats)
    left_out: str | None = None
    failed: str | None = None
    facts: dict[str, Scalar] = field(default_factory=dict)

    def seconds(self) -> dict[int, float]:
        """For a byte, by round: rows do not move equally many."""
        found = {number: each for number, each in self.readings.items() if each.restored_bytes}
        return {number: each.seconds / each.restored_bytes for number, each in found.items()}


@dataclass(frozen=True)
class Setting:
    """What all rows share."""

    stack: BlockStack
    conditions: Mapping[str, Scalar]
    block_tokens: int
    block_bytes: int
    prefill_rate: float | None
    """Tokens per second."""
    written_a_day: float | None
    """Bytes of blocks; None where nothing says how many requests come."""
    drives: Drives | None
    """None without a rating."""
    hit_rates: Sequence[float] = ()
    evictions: Sequence[float] = ()
    """Blocks for each request, by round."""


def case(rows: Sequence[Row], setting: Setting, doubts: Sequence[str] = ()) -> Case:
    """The case for the verdict: only the bytes are judged, not speed."""
    part = ComparedEngines(
        [*(each for row in rows if row.readings for each in _of_row(row, rows, setting)), *_of_trace(setting)],
        [_compared(row) for row in rows],
        _unproven(rows, setting.stack),
    )
    return case_of_engines([part], doubts)


def percentile(values: Sequence[float], share: float) -> float:
    """What ``share`` of them do not exceed (nearest rank)."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def pays_from(reading: Reading, rate: float, block_tokens: int) -> float:
    """Tokens from which on restoring a prefix takes less time than its prefill; infinite if it never does.

    Of a round's restores, each with tokens and seconds, the line through them by least squares. Whole blocks alone are
    restored.
    """
    points = [*reading.restores, *((tokens, each) for tokens, times in reading.prefixes.items() for each in times)]
    tokens, seconds = (sum(point[axis] for point in points) / len(points) for axis in (0, 1))
    spread = sum((point[0] - tokens) ** 2 for point in points)
    slope = sum((x - tokens) * (y - seconds) for x, y in points) / spread if spread else seconds / tokens
    start = max(0.0, seconds - slope * tokens)
    if slope >= 1 / rate:
        return math.inf
    return max(1, math.ceil(start / (1 / rate - slope) / block_tokens)) * block_tokens


def _of_row(row: Row, rows: Sequence[Row], setting: Setting) -> Iterator[Measurement]:
    readings = list(row.readings.values())
    shared = {**setting.conditions, **row.facts, "engine": row.engine, "repeated_samples": row.repeated.taken}

    def what(name: str, quantity: Quantity, tokens: int | None = None, **more: Scalar) -> What:
        labels = {"engine": row.engine, **({"tokens": str(tokens)} if tokens else {})}
        form = "kv_cache.{engine}.prefix-{tokens}.{figure}" if tokens else "kv_cache.{engine}.{figure}"
        return What(form, quantity, row.engine, setting.stack.medium, name, labels, parameters={**shared, **more})

    found = [each for each in readings if each.restored_bytes]
    speeds = [each.restored_bytes / each.seconds for each in found]
    about = what("restore", "bandwidth", direction="read")
    if any(each.counted for each in found):
        yield measured(about, setting.stack, found, speeds)
    elif found:
        yield figure(about, speeds, [each.moment for each in found])
    if row.engine == FIO:
        return
    for other, name in ((FIO, "of_fio"), (PAGE_CACHE, "versus_page_cache")):
        base = next((each for each in rows if each.engine == other and each is not row), None)
        # What the page cache gives is no share of what drives give.
        if base is not None and not (other == FIO and row.engine in CACHED):
            yield from compared(what(name, "ratio"), ratio(other, base.seconds(), row.seconds()))
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        times = [[seconds for _, seconds in each.restores] for each in readings if each.restores]
        if times:
            yield figure(what(name, "latency", of=len(times[0])), [percentile(each, share) for each in times])
        for tokens in readings[0].prefixes:
            of_length = [each.prefixes[tokens] for each in readings]
            about = what(name, "latency", tokens, of=len(of_length[0]))
            yield figure(about, [percentile(each, share) for each in of_length])
    yield from _of_drives(row, setting, what("", "ratio"))
    if setting.prefill_rate is not None:
        yield from _against_prefill(row, setting, setting.prefill_rate, what)


def _against_prefill(row: Row, setting: Setting, rate: float, what: Callable[..., What]) -> Iterator[Measurement]:
    readings = list(row.readings.values())
    for tokens in readings[0].prefixes:
        ours = {number: median(each.prefixes[tokens]) for number, each in row.readings.items()}
        theirs = dict.fromkeys(ours, tokens / rate)
        yield from compared(what("versus_prefill", "ratio", tokens), ratio(PREFILL, theirs, ours))
    starts = [pays_from(each, rate, setting.block_tokens) for each in readings]
    if all(map(math.isfinite, starts)):
        yield figure(replace(what("pays_from", "ratio"), better="lower"), starts)


def _of_drives(row: Row, setting: Setting, what: What) -> Iterator[Measurement]:
    """Writes, and what the drives counted."""
    readings = [each for each in row.readings.values() if each.written_bytes]
    if readings:
        store = replace(
            what, figure="store", quantity="bandwidth", parameters={**what.parameters, "direction": "write"}
        )
        yield figure(store, [each.written_bytes / each.writing for each in readings])
    read = [each.drive_read / each.claimed_bytes for each in row.readings.values() if each.drive_read is not None]
    if read:
        yield figure(replace(what, figure="from_drives", better="lower"), read)
    written = [each.drive_written / each.written_bytes for each in readings if each.drive_written is not None]
    if written:
        yield figure(replace(what, figure="write_amplification", better="lower"), written)
    if setting.written_a_day:
        a_day = [setting.written_a_day * each for each in written or [1.0]]
        yield figure(replace(what, figure="writes_a_day", quantity="memory"), a_day)
        if setting.drives is not None:
            years = [life(each, setting.drives).years for each in a_day]
            yield figure(
                replace(what, figure="drive_life", quantity="duration", better="higher"),
                [YEAR * each for each in years],
            )


def _of_trace(setting: Setting) -> Iterator[Measurement]:
    about = What("kv_cache.{figure}", "ratio", "trace", setting.stack.medium, "hit_rate", parameters=setting.conditions)
    if setting.hit_rates:
        yield figure(about, setting.hit_rates)
        yield figure(replace(about, figure="evictions", better="lower"), setting.evictions)
    if setting.prefill_rate is not None:
        yield figure(
            replace(about, figure=PREFILL, quantity="rate", engine=PREFILL, medium="GPU"), [setting.prefill_rate]
        )


def written_a_day(
    blocks_a_second: float | None, rate: float | None, block_bytes: int, block_tokens: int
) -> float | None:
    """Bytes of blocks: by the arrivals of a trace, else as many as the GPU prefills without a pause."""
    if blocks_a_second is None and rate is not None:
        blocks_a_second = rate / block_tokens
    return None if blocks_a_second is None else blocks_a_second * block_bytes * DAY


def _compared(row: Row) -> ComparedEngine:
    status, found = _outcome(row)
    differs = status == "fail"
    check = CheckResult(
        id=f"kv_cache.{row.engine}",
        labels={"subject": "kv_cache", "engine": row.engine},
        status=status,
        expected=EXPECTED,
        found=found,
        remedy="do not serve from it: see `dmesg | tail`, and `tunetool verify`" if differs else "",
    )
    return ComparedEngine(
        check,
        f"`{row.engine}` gives other bytes than were written: {found}" if differs else None,
        f"`{row.engine}` could not be measured: {row.failed}" if row.failed else None,
    )


def _outcome(row: Row) -> tuple[CheckStatus, str]:
    wrong = sum(each.wrong for each in row.readings.values())
    if wrong:
        return "fail", f"{format_count(wrong, 'block')} with other bytes"
    if row.failed:
        return "unknown", row.failed
    if row.left_out or not row.readings:
        return "skip", row.left_out or "nothing was read"
    rounds = format_count(len(row.readings), "round")
    return (
        ("skip", f"measured in {rounds}; it hands no blocks out")
        if row.engine == FIO
        else ("pass", f"equal in {rounds}")
    )


def _unproven(rows: Sequence[Row], stack: BlockStack) -> list[str]:
    """Why figures prove nothing. In memory nothing counts, and nothing needs to."""
    if stack.in_memory:
        return []
    counted = {row.engine: [each.counted for each in row.readings.values()] for row in rows}
    doubts = [line for name, each in counted.items() if (line := doubt(stack, "read", each, f"`{name}`"))]
    return [*obstacles(stack), *doubts]
