"""From samples to the record's measurements, its checks and its verdict. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from tunetool.bench.loading.samples import Load, Matrix, Row
from tunetool.measure.evidence import HIGHEST, LOWEST, doubt, obstacles, summed
from tunetool.measure.figure import Quantity, What, figure
from tunetool.measure.rounds import Ratio, compared, ratio
from tunetool.node.units import format_size
from tunetool.record import CheckResult, CheckStatus, Evidence, Measurement, Scalar
from tunetool.verdict import Case, ComparedEngine, ComparedEngines, case_of_engines

PINNED, FIO = "pinned", "fio"
SLACK_BYTES = 8 << 20
"""Bytes that the engine's library, a journal and the system's log may read and write besides."""


def measurements(matrix: Matrix, conditions: dict[str, Scalar]) -> list[Measurement]:
    """Every figure of one state."""
    common: dict[str, Scalar] = {
        **conditions,
        "state": matrix.state,
        "gpus": matrix.gpus,
        "repeated_samples": matrix.repeated.taken,
    }
    figures = [each for row in matrix.rows.values() for each in _row(matrix, row, {**common, "engine": row.name})]
    for name, engine, speeds in ((PINNED, "copies from pinned memory", matrix.pinned), (FIO, "fio", matrix.fio)):
        if speeds:
            what = _what(matrix, name, "bandwidth", "bandwidth", common, engine, "{engine}")
            figures.append(figure(what, list(speeds.values())))
    return figures


def _row(matrix: Matrix, row: Row, common: dict[str, Scalar]) -> Iterator[Measurement]:
    for which, loads in (("first", row.first), ("warm", row.warm)):
        if not loads:
            continue
        taken = list(loads.values())
        what = _what(matrix, row.name, which, "bandwidth", {**common, "direction": "read"}, row.name)
        yield figure(what, [load.bytes / load.seconds for load in taken], evidence=_evidence(matrix, taken))
        what = _what(matrix, row.name, f"{which}_time", "duration", common, row.name)
        yield figure(what, [load.seconds for load in taken])
        for name, to_base in ratios(matrix, row, which).items():
            yield from compared(_what(matrix, row.name, f"{which}_{name}", "ratio", common, row.name), to_base)


def ratios(matrix: Matrix, row: Row, which: str) -> dict[str, Ratio | None]:
    """The ratios of a row to copies from pinned memory, to fio's read, and to the fastest other engine."""
    loads = row.first if which == "first" else row.warm

    def limit(name: str, speeds: Mapping[int, float]) -> Ratio | None:
        seconds = {number: loads[number].bytes / speed for number, speed in speeds.items() if number in loads}
        return ratio(name, seconds, row.seconds(which))

    rival = best_other(matrix, row, which)
    return {
        "of_pinned": limit(PINNED, matrix.pinned),
        "of_fio": limit(FIO, matrix.fio),
        "versus_best_other": ratio(rival.name, rival.seconds(which), row.seconds(which)) if rival else None,
    }


def best_other(matrix: Matrix, row: Row, which: str) -> Row | None:
    """The fastest of the other engines that gave the files' bytes."""
    rivals = [each for each in matrix.rows.values() if each is not row and each.seconds(which) and not each.differs]
    return min(rivals, key=lambda each: median(each.seconds(which).values()), default=None)


def _evidence(matrix: Matrix, loads: Sequence[Load]) -> Evidence:
    return summed(matrix.stack, [load.counted for load in loads], sum(load.bytes for load in loads))


def _what(
    matrix: Matrix,
    engine: str,
    name: str,
    quantity: Quantity,
    parameters: dict[str, Scalar],
    program: str,
    form: str = "{engine}.{figure}",
) -> What:
    medium = "page cache" if matrix.state == "cached" else matrix.stack.medium
    state = "{state}" if matrix.gpus == 1 else "{state}-{gpus}-gpus"
    return What(
        f"loading.{state}.{form}", quantity, program, medium, name, _labels(matrix, engine), parameters=parameters
    )


def _labels(matrix: Matrix, engine: str) -> dict[str, str]:
    gpus = {"gpus": str(matrix.gpus)} if matrix.gpus > 1 else {}
    return {"state": matrix.state, **gpus, "engine": engine}


def checks(matrix: Matrix) -> list[CheckResult]:
    """Whether each engine gave the bytes of the files."""
    return [_check(matrix, row) for row in matrix.rows.values()]


def _check(matrix: Matrix, row: Row) -> CheckResult:
    status, found = _outcome(row)
    return CheckResult(
        id=f"loading.{matrix.key}.{row.name}",
        labels={"subject": "loading", **_labels(matrix, row.name)},
        status=status,
        expected="every tensor as in the files, by checksums",
        found=found,
        remedy="do not load by it; report the versions in the record to its authors" if status == "fail" else "",
    )


def _outcome(row: Row) -> tuple[CheckStatus, str]:
    if row.left_out:
        return "skip", row.left_out
    if row.differs:
        return "fail", "other bytes"
    if row.failed:
        return "unknown", row.failed
    count = len(row.first) + len(row.warm)
    return ("pass", f"equal in {count} loads") if count else ("skip", "nothing was loaded")


def case(matrices: Sequence[Matrix], conditions: dict[str, Scalar], doubts: Sequence[str] = ()) -> Case:
    """The case for the verdict: only equality is judged, not speed."""
    parts = []
    for matrix in matrices:
        engines = [_compared(matrix, row) for row in matrix.rows.values()]
        parts.append(ComparedEngines(measurements(matrix, conditions), engines, unproven_reasons(matrix)))
    return case_of_engines(parts, doubts)


def _compared(matrix: Matrix, row: Row) -> ComparedEngine:
    name = f"`{row.name}` {matrix.title}"
    differs = f"{name} gives other bytes than the files hold" if row.differs else None
    return ComparedEngine(_check(matrix, row), differs, row.failed and f"{name} could not be measured: {row.failed}")


def past_the_cache(matrix: Matrix, load: Load) -> str | None:
    """Why an engine has no figures from the page cache: it read all from the drives; None where it did not.

    ``load``: a warm one, after the engine's library was read."""
    if matrix.state != "cached" or load.fetched < max(LOWEST * load.bytes, SLACK_BYTES):
        return None
    return f"{_fetched(load)}: it reads past the page cache, or that does not hold the files"


def _fetched(load: Load) -> str:
    return f"it fetched {format_size(load.fetched)} from the drives for {format_size(load.bytes)}"


def unproven_reasons(matrix: Matrix) -> list[str]:
    """Why figures prove nothing: cold bytes that came from no drive, others that came from one."""
    if matrix.state != "cold":
        # The first load of a process reads the library of the engine too.
        worst = {name: max(row.warm.values(), key=_excess) for name, row in matrix.rows.items() if row.warm}
        return [
            f"`{name}` {matrix.title}: {_fetched(load)}; take a smaller `--model`, or end what uses the memory"
            for name, load in worst.items()
            if _excess(load) > 0
        ]
    loads = [(row.name, [load.counted for load in row.first.values()]) for row in matrix.rows.values()]
    reasons = [line for name, counted in loads if (line := doubt(matrix.stack, "read", counted, f"`{name}`"))]
    return [*obstacles(matrix.stack), *reasons]


def _excess(load: Load) -> float:
    """Bytes from drives beyond those that a load from memory may fetch."""
    return load.fetched - (HIGHEST - 1) * load.bytes - SLACK_BYTES
