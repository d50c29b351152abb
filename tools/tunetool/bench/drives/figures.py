"""From readings to the record's measurements, its checks and its verdict. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tunetool.bench.drives.layouts import ALONE, COMPARED, FILES, RAW
from tunetool.bench.drives.samples import Cell, Row
from tunetool.measure.evidence import HIGHEST, LOWEST, doubt, obstacles
from tunetool.measure.figure import What, measured
from tunetool.measure.rounds import Ratio, compared, ratio
from tunetool.measure.tester import ceiling_of, cpu_share
from tunetool.record import CheckResult, Measurement, Scalar
from tunetool.verdict import Case

BANDWIDTH, EFFICIENCY = "bandwidth", "efficiency"
FORM = "scaling.{layout}.{drives}.{io_engine}.{direction}.{figure}"
Rows = Mapping[Cell, Row]


def measurements(rows: Rows, conditions: Mapping[str, Scalar]) -> list[Measurement]:
    """Every figure of all rows that were measured."""
    known = {cell: row for cell, row in rows.items() if row.readings}
    figures = [each for row in known.values() for each in _of_row(row, known, conditions)]
    return [*figures, *(each for name in COMPARED for each in _compared(name, known, conditions))]


def _of_row(row: Row, rows: Rows, conditions: Mapping[str, Scalar]) -> Iterator[Measurement]:
    cell, readings = row.cell, list(row.readings.values())
    least, most = row.drive_shares()
    spent = [reading.cores for reading in readings if reading.cores is not None]
    parameters: dict[str, Scalar] = {
        **conditions,
        "layout": cell.layout,
        "drives": cell.drives,
        "io_engine": cell.engine,
        "direction": cell.direction,
        "serials": ", ".join(leaf.label for leaf in row.stack.leaves),
        "threads": row.threads,
        "repeated_samples": row.repeated.taken,
        "least_drive_share": round(least, 4),
        "most_drive_share": round(most, 4),
        **_copies(row),
        **cpu_share(spent, row.threads),
        **ceiling_of(row.ceiling),
    }
    layer = "drive" if cell.layout == RAW else "filesystem"
    what = What(FORM, "bandwidth", row.program, row.stack.medium, BANDWIDTH, cell.labels, layer, parameters)
    yield measured(what, row.stack, readings, [reading.bandwidth for reading in readings])
    alone = (cell._replace(layout=name, drives=1) for name in (cell.layout, *ALONE.get(cell.layout, ())))
    base = next((rows[each] for each in alone if each in rows), None)
    if base is not None and base is not row:
        # Of the sum that so many drives alone would give.
        share = ratio(base.cell.key, base.seconds_a_byte(cell.drives), row.seconds_a_byte())
        yield from _ratio(EFFICIENCY, row, share, conditions)


def _copies(row: Row) -> dict[str, Scalar]:
    """Of a mirror: on how many drives a byte lies, and what the drives themselves counted for each claimed one."""
    known = row.drive_bytes()
    if row.copies == 1 or not known:
        return {}
    return {"copies": row.copies, "drive_bytes_ratio": round(sum(known) / len(known), 4)}


def _compared(name: str, rows: Rows, conditions: Mapping[str, Scalar]) -> Iterator[Measurement]:
    for ours, theirs in COMPARED[name]:
        for cell, row in rows.items():
            other = rows.get(cell._replace(layout=theirs)) if cell.layout == ours else None
            if other is not None:
                to_other = ratio(other.cell.key, other.seconds_a_byte(), row.seconds_a_byte())
                yield from _ratio(name, row, to_other, conditions)


def _ratio(name: str, row: Row, to_base: Ratio | None, conditions: Mapping[str, Scalar]) -> list[Measurement]:
    """In pairs of the same round."""
    cell = row.cell
    parameters: dict[str, Scalar] = {
        **conditions,
        "layout": cell.layout,
        "drives": cell.drives,
        "io_engine": cell.engine,
        "direction": cell.direction,
    }
    what = What(FORM, "ratio", row.program, row.stack.medium, name, cell.labels, parameters=parameters)
    return compared(what, to_base)


def _not_as_copied(row: Row) -> list[str]:
    """Why the bytes of a mirror did not move as it keeps them: its array's counters do not tell."""
    wrong = [each for each in row.drive_bytes() if not LOWEST * row.due <= each <= HIGHEST * row.due]
    if not wrong:
        return []
    worst = max(wrong, key=lambda each: abs(each - row.due))
    return [
        f"{row.cell.key}: its drives counted {worst:.3f} bytes for each that was claimed, and {row.due} are due: "
        "md made copies alike, or something else used the drives; run it again"
    ]


def taken_down(mode: str, count: int, problems: Sequence[str]) -> list[CheckResult]:
    """Whether everything that was made is gone. Nothing of a standing volume was made."""
    if mode == "standing" or not count:
        return []
    expected = "every drive is blank again" if mode == "blank" else "no loop device, mount or array of this run is left"
    name = "scaling.taken-down"
    if problems:
        return [CheckResult(id=name, status="unknown", expected=expected, found=problems[0])]
    return [CheckResult(id=name, status="pass", expected=expected, found=f"all of {count}")]


def case(
    rows: Rows,
    conditions: Mapping[str, Scalar],
    checks: Sequence[CheckResult],
    doubts: Sequence[str],
    ceilings: Sequence[Measurement] = (),
) -> Case:
    """The case for the verdict: whether it was measured and proven; no speed is judged."""
    figures = measurements(rows, conditions)
    reasons = "; ".join(check.found for check in checks if check.status == "skip")
    return Case(
        measurements=[*figures, *ceilings],
        checks=checks,
        doubts=[*doubts, *unproven(rows)],
        errors=[] if figures else [f"nothing was measured: {reasons or 'no round was completed'}"],
        judged="work",
    )


def unproven(rows: Rows) -> list[str]:
    """Why figures prove nothing."""
    known = [line for row in rows.values() if row.cell.layout == FILES for line in obstacles(row.stack)]
    for row in rows.values():
        counted = [reading.counted for reading in row.readings.values()]
        line = doubt(row.stack, row.cell.direction, counted, row.program)
        if line:
            known.append(f"{row.cell.key}: {line}")
        if row.copies > 1:
            known += _not_as_copied(row)
        silent = row.stack.silent
        known += [f"`{name}` counts nothing: run `echo 1 > /sys/block/{name}/queue/iostats`" for name in silent]
    return list(dict.fromkeys(known))
