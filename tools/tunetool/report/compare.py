"""Two records side by side: what got faster, what slower, and what only looks so."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tunetool.measure.comparison import ERROR, METHOD, Difference, difference, significant
from tunetool.record import Measurement, Record
from tunetool.report.page import WIDTH

Word = Literal["faster", "slower", "no significant difference", "not compared"]

_MILLISECOND = 1e-3
_CONDITIONS = ("block_bytes", "queue_depth", "jobs", "io_engine", "direct", "sample_seconds")
"""Parameters that make two figures of one name different questions."""


@dataclass(frozen=True)
class Row:
    """One measurement in both records."""

    name: str
    word: Word
    first: float | None
    second: float | None
    unit: str
    change: float | None = None
    """Of the median, as a fraction of the first; positive: larger."""
    probability: float | None = None
    reason: str = ""


def compare(first: Record, second: Record) -> list[Row]:
    """Every measurement that either record has, by name; figures without samples of their own are left out."""
    ours, theirs = _by_name(first), _by_name(second)
    names = sorted({*ours, *theirs})
    found: dict[str, Difference] = {}
    rows: dict[str, Row] = {}
    for name in names:
        a, b = ours.get(name), theirs.get(name)
        obstacle = _obstacle(a, b)
        known = a or b
        if known is None:
            continue
        if obstacle is None and a is not None and b is not None:
            found[name] = difference(a.samples or [], b.samples or [])
            if found[name].least <= ERROR:
                continue
            obstacle = f"{len(a.samples or [])} and {len(b.samples or [])} samples are too few to tell"
            del found[name]
        rows[name] = Row(
            name, "not compared", a.value if a else None, b.value if b else None, known.unit, reason=obstacle or ""
        )
    for name, counts in zip(found, significant([each.probability for each in found.values()]), strict=True):
        rows[name] = _row(ours[name], theirs[name], found[name], counts)
    return [rows[name] for name in names]


def conditions(first: Record, second: Record) -> list[str]:
    """What differs between the two besides the figures, a line each."""
    lines = []
    if first.node.host != second.node.host:
        lines.append(f"different hosts: {first.node.host} and {second.node.host}")
    if first.node.speed_hash and second.node.speed_hash and first.node.speed_hash != second.node.speed_hash:
        lines.append("the machines differ in what affects speed: drives, links, kernel or driver (`speed_hash`)")
    if first.target != second.target:
        lines.append(f"different targets: `{first.target}` and `{second.target}`")
    for which, record in (("first", first), ("second", second)):
        if record.verdict is not None and record.verdict.status in ("unproven", "error"):
            lines.append(f"the {which} record is {record.verdict.status}: {(record.verdict.reasons or ['?'])[0]}")
    return lines


def _by_name(record: Record) -> Mapping[str, Measurement]:
    found: dict[str, Measurement] = {}
    for measurement in record.measurements:
        serial = measurement.parameters.get("serial") or measurement.parameters.get("device")
        rank = f"rank {measurement.rank}" if measurement.rank is not None else None
        labels = [str(part) for part in (serial, measurement.host, rank) if part]
        if measurement.samples:
            found[" ".join([measurement.name, *labels])] = measurement
    return found


def _obstacle(first: Measurement | None, second: Measurement | None) -> str | None:
    if first is None or second is None:
        return f"only the {'second' if first is None else 'first'} record has it"
    if first.medium != second.medium:
        return f"different media: {first.medium} and {second.medium}"
    for name in _CONDITIONS:
        a, b = first.parameters.get(name), second.parameters.get(name)
        if a != b:
            return f"measured differently: {name} {a} and {b}"
    return None


def _row(first: Measurement, second: Measurement, found: Difference, counts: bool) -> Row:
    word: Word = "no significant difference"
    if counts and found.ratio != 1:
        word = "faster" if (found.ratio > 1) == (first.better == "higher") else "slower"
    rank = f"rank {first.rank}" if first.rank is not None else None
    labels = [str(part) for part in (first.parameters.get("serial"), first.host, rank) if part]
    return Row(
        " ".join([first.name, *labels]),
        word,
        first.value,
        second.value,
        first.unit,
        change=found.ratio - 1,
        probability=found.probability,
    )


def as_document(rows: Sequence[Row], notes: Sequence[str]) -> str:
    """The comparison as JSON."""
    document = {
        "method": METHOD,
        "notes": list(notes),
        "measurements": [{key: value for key, value in asdict(row).items() if value not in (None, "")} for row in rows],
    }
    return json.dumps(document, indent=2) + "\n"


def print_comparison(rows: Sequence[Row], notes: Sequence[str], console: Console) -> None:
    """The comparison for people."""
    table = Table(box=box.SIMPLE_HEAD, width=WIDTH, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("measurement", overflow="fold")
    for title in ("first", "second", "change", "p"):
        table.add_column(title, justify="right")
    table.add_column("second is", ratio=1, overflow="fold")
    for row in rows:
        change = "-" if row.change is None else f"{row.change:+.1%}"
        probability = "-" if row.probability is None else f"{row.probability:.3f}"
        told = f"{row.word}: {row.reason}" if row.reason else row.word
        cells = (row.name, _shown(row.first, row.unit), _shown(row.second, row.unit), change, probability, told)
        table.add_row(*map(Text, cells))
    console.print(table)
    for line in [*notes, METHOD]:
        console.print(Text(line), soft_wrap=True)


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "B/s":
        return f"{value / 1e9:.4g} GB/s"
    if unit == "s" and value < 1:
        return f"{value * 1e3:.4g} ms" if value >= _MILLISECOND else f"{value * 1e6:.4g} us"
    return f"{value:.4g} {unit}".removesuffix(" 1")
