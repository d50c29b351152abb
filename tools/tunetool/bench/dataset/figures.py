"""From passes to the record's measurements, its checks and its verdict. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tunetool.bench.dataset.engines import BatchEngine, DaliEngine, FioEngine, ImageEngine, RecordEngine, TokenEngine
from tunetool.bench.dataset.samples import EngineRow, StateTable
from tunetool.measure.evidence import HIGHEST, LOWEST, doubt, obstacles, summed
from tunetool.measure.figure import Quantity, What, figure
from tunetool.measure.rounds import Ratio, compared, ratio
from tunetool.measure.tester import cpu_share
from tunetool.node.units import format_count, format_size
from tunetool.record import CheckResult, CheckStatus, Measurement, Scalar
from tunetool.verdict import TESTER_CEILING, Case, ComparedEngine, ComparedEngines, case_of_engines

RATE, READ, FETCHED, VERSUS = "samples", "read", "fetched", "versus_base"
SLACK_BYTES = 8 << 20
"""Bytes that an engine's library, a journal and the system's log may read besides."""
EXPECTED = "as in the files: each image, and samples of tokens, spread over the pass, that are read again after it"


def case(tables: Sequence[StateTable], conditions: Mapping[str, Scalar], doubts: Sequence[str] = ()) -> Case:
    """The case for the verdict: only equality is judged, not speed."""
    parts = [
        ComparedEngines(
            [each for row in table.rows.values() for each in _figures_of(table, row, conditions)],
            [*(_compared(table, row) for row in table.rows.values()), *_left_out(table)],
            unproven_reasons(table),
        )
        for table in tables
    ]
    return case_of_engines(parts, doubts)


def _figures_of(table: StateTable, row: EngineRow, conditions: Mapping[str, Scalar]) -> Iterator[Measurement]:
    passes = list(row.passes.values())
    if not passes:
        return
    shared: dict[str, Scalar] = {
        **conditions,
        "state": table.state,
        "engine": row.engine.name,
        "repeated_samples": table.repeated.taken,
        **_details(row, int(conditions["threads"])),
    }
    limits: dict[str, Scalar] = {
        TESTER_CEILING: row.typical(lambda each: each.ceiling * each.bytes / each.samples),
        **cpu_share([each.cores for each in passes], _threads(row, int(conditions["threads"]))),
    }
    rates = [each.samples / each.seconds for each in passes]
    yield figure(_what(table, row, RATE, "rate", shared), rates)
    evidence = summed(table.stack, [each.counted for each in passes], sum(each.bytes for each in passes))
    speeds = [each.bytes / each.seconds for each in passes]
    yield figure(
        _what(table, row, READ, "bandwidth", {**shared, **limits, "direction": "read"}), speeds, evidence=evidence
    )
    fetched = [each.fetched / each.bytes for each in passes if each.fetched is not None]
    if fetched:
        yield figure(_what(table, row, FETCHED, "ratio", shared, is_cost=True), fetched)
    yield from compared(_what(table, row, VERSUS, "ratio", shared), versus_base(table, row))


def _details(row: EngineRow, threads: int) -> dict[str, Scalar]:
    if isinstance(row.engine, ImageEngine):
        return {"workers": row.engine.workers}
    if isinstance(row.engine, RecordEngine | DaliEngine):
        return dict(row.facts)
    if isinstance(row.engine, BatchEngine | FioEngine):
        return {"read_threads": threads, **row.facts}
    details: dict[str, Scalar] = {
        "major_faults": row.typical(lambda each: each.major_faults),
        "minor_faults": row.typical(lambda each: each.minor_faults),
        "huge_mapped_bytes": row.typical(lambda each: each.huge_bytes),
        "huge_pool_bytes": row.typical(lambda each: each.pool_bytes),
        "passes_ended_by_read_ahead": sum(each.ended_by_read_ahead for each in row.passes.values()),
        "samples_of_a_pass": row.typical(lambda each: each.samples),
    }
    return {**details, "read_threads": threads} if row.engine.direct else details


def _threads(row: EngineRow, threads: int) -> int:
    if isinstance(row.engine, TokenEngine):
        return threads if row.engine.direct else 1
    if isinstance(row.engine, RecordEngine | DaliEngine):
        return int(row.facts["cpus"])
    if isinstance(row.engine, BatchEngine | FioEngine):
        return threads
    # The trainer's process waits while workers decode.
    return max(1, row.engine.workers)


def _what(
    table: StateTable,
    row: EngineRow,
    name: str,
    quantity: Quantity,
    parameters: Mapping[str, Scalar],
    is_cost: bool = False,
) -> What:
    return What(
        "dataset.{state}.{engine}.{figure}",
        quantity,
        row.engine.name,
        table.medium,
        name,
        _labels(table, row.engine.name),
        parameters=parameters,
        better="lower" if is_cost else None,
    )


def _labels(table: StateTable, engine: str) -> dict[str, str]:
    return {"state": table.state, "engine": engine}


def versus_base(table: StateTable, row: EngineRow) -> Ratio | None:
    """How many times as fast as the engine that it is compared with; None for that one itself, and without it."""
    base = table.rows.get(row.engine.base)
    if base is None or base is row:
        return None
    return ratio(base.engine.name, base.seconds_of_a_sample(), row.seconds_of_a_sample())


def _compared(table: StateTable, row: EngineRow) -> ComparedEngine:
    name = f"`{row.engine.name}` {table.title}"
    status, found = _outcome(row)
    differs = status == "fail"
    check = CheckResult(
        id=f"dataset.{table.state}.{row.engine.name}",
        labels={"subject": "dataset", **_labels(table, row.engine.name)},
        status=status,
        expected=EXPECTED,
        found=found,
        remedy="do not train by it; report the versions in the record" if differs else "",
    )
    return ComparedEngine(
        check,
        f"{name} gives other bytes than the files hold" if differs else None,
        f"{name} could not be measured: {row.failed}" if row.failed else None,
    )


def _outcome(row: EngineRow) -> tuple[CheckStatus, str]:
    """The status of an engine's check, and what was found."""
    if any(each.is_equal is False for each in row.passes.values()):
        return "fail", "other bytes"
    if row.left_out:
        return "skip", row.left_out
    if row.failed:
        return "unknown", row.failed
    count = len(row.passes)
    if any(each.is_equal is None for each in row.passes.values()):
        return "skip", f"measured in {format_count(count, 'round')}; it hands no bytes out"
    return ("pass", f"equal in {format_count(count, 'round')}") if count else ("skip", "nothing was read")


def _left_out(table: StateTable) -> Iterator[ComparedEngine]:
    for name, why in table.libraries.items():
        labels = {"subject": "dataset", **_labels(table, name)}
        id_ = f"dataset.{table.state}.{name}"
        yield ComparedEngine(CheckResult(id=id_, labels=labels, status="skip", expected=EXPECTED, found=why))


def unproven_reasons(table: StateTable) -> list[str]:
    """Why figures prove nothing: cold bytes that came from no drive, warm bytes that came from one."""
    by_process = [line for row in table.rows.values() if (line := _wrong_state(table, row))]
    if table.state == "warm":
        return by_process
    rows = [(row.engine.name, [each.counted for each in row.passes.values()]) for row in table.rows.values()]
    doubts = [line for name, counted in rows if (line := doubt(table.stack, "read", counted, f"`{name}`"))]
    return [*obstacles(table.stack), *doubts, *by_process]


def _wrong_state(table: StateTable, row: EngineRow) -> str | None:
    """That the page cache answered for the drives or the drives for it, by the kernel's count of the engine's own
    reads: other work on the drives is not in it."""
    counted = [(each.fetched, each.bytes) for each in row.passes.values() if each.fetched is not None]
    name = f"`{row.engine.name}` {table.title}"
    if table.state == "warm" and len(counted) < len(row.passes):
        return f"{name}: the kernel does not count what a process fetches from drives, so nothing proves the page cache"
    for fetched, used in counted:
        shown = f"{name} fetched {format_size(fetched)} from the drives for {format_size(used)}"
        if table.state == "cold" and fetched < LOWEST * used:
            return f"{shown}: the page cache had the rest; end what else reads the files"
        if table.state == "warm" and fetched > (HIGHEST - 1) * used + SLACK_BYTES:
            return (
                f"{shown}: the page cache does not hold the files; take a smaller `--size`, or end what uses the memory"
            )
    return None
