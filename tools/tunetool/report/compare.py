"""The comparison of two records: which measurements are significantly faster or slower."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from rich.console import Console
from rich.text import Text

from tunetool.measure.statistics import DIFFERENCE_ERROR, DIFFERENCE_METHOD, Difference, difference, significant
from tunetool.node.common.refusal import on_one_line
from tunetool.record import Measurement, Record
from tunetool.report.flat import Cell
from tunetool.report.page import add_number_columns, new_table
from tunetool.view.figures import label

Pick = Callable[[Sequence[Measurement]], Sequence[Measurement]]
Word = Literal["faster", "slower", "no significant difference", "not compared"]

_MILLISECOND = 1e-3
_CONDITIONS = (
    *("block_bytes", "queue_depth", "jobs", "io_engine", "direct", "sample_seconds"),
    # How much was moved or computed. Where the model lies is no condition: to ask for that is why people compare.
    *("model_bytes", "state_bytes", "swap_bytes", "parameters"),
    *("tokens", "sequence_length", "images", "image_side", "batch_size", "batch", "prompt", "new_tokens"),
)
"""Parameters that must be equal for two figures of the same name to be comparable."""


@dataclass(frozen=True)
class Row:
    """One measurement of either record, and how the second compares with the first."""

    name: str
    word: Word
    first: float | None
    second: float | None
    unit: str
    change: float | None = None
    """Relative change of the median: 0.1 means that the second is 10 % larger."""
    probability: float | None = None
    reason: str = ""


def compare(first: Record, second: Record, pick: Pick | None = None) -> list[Row]:
    """Compare every measurement that has samples in either record, and is picked; the rows are sorted by name."""
    in_first, in_second = _by_name(first, pick), _by_name(second, pick)
    names = sorted({*in_first, *in_second})
    differences: dict[str, Difference] = {}
    rows: dict[str, Row] = {}
    for name in names:
        a, b = in_first.get(name), in_second.get(name)
        obstacle = _obstacle(a, b)
        known = a or b
        if known is None:
            continue
        if obstacle is None and a is not None and b is not None:
            differences[name] = difference(a.samples or [], b.samples or [])
            if differences[name].least <= DIFFERENCE_ERROR:
                continue
            obstacle = f"{len(a.samples or [])} and {len(b.samples or [])} samples are too few to tell"
            del differences[name]
        rows[name] = Row(
            name, "not compared", a.value if a else None, b.value if b else None, known.unit, reason=obstacle or ""
        )
    for name, counts in zip(differences, significant([each.probability for each in differences.values()]), strict=True):
        rows[name] = _row(in_first[name], in_second[name], differences[name], counts)
    return [rows[name] for name in names]


def compare_with_all(baselines: Sequence[Record], record: Record, pick: Pick | None = None) -> list[Row]:
    """Compare ``record`` with each baseline: it is faster or slower only where it is so against every one of them."""
    by_name: dict[str, list[Row]] = {}
    for baseline in baselines:
        for row in compare(baseline, record, pick):
            by_name.setdefault(row.name, []).append(row)
    return [_agreed(rows) if len(baselines) > 1 else rows[0] for _, rows in sorted(by_name.items())]


def _agreed(rows: Sequence[Row]) -> Row:
    compared = [row for row in rows if row.word != "not compared"]
    if not compared:
        return rows[0]
    weakest = max(compared, key=lambda row: row.probability or 0.0)
    words = [row.word for row in compared]
    if len(set(words)) == 1:
        return weakest if len(compared) == len(rows) else replace(weakest, reason=f"of {len(compared)} baselines")
    counted = ", ".join(f"{word} than {words.count(word)}" for word in ("faster", "slower") if word in words)
    return replace(weakest, word="no significant difference", reason=f"{counted} of {len(compared)} baselines")


TITLES = ("measurement", "first", "second", "unit", "change", "p", "second is", "reason")


def cells(rows: Sequence[Row]) -> list[tuple[Cell, ...]]:
    """The cells of each row, for the columns ``TITLES``."""
    return [
        (row.name, row.first, row.second, row.unit, row.change, row.probability, row.word, row.reason) for row in rows
    ]


def conditions(first: Record, second: Record) -> list[str]:
    """Other differences between the two records that affect the comparison, one line each."""
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


def _by_name(record: Record, pick: Pick | None) -> Mapping[str, Measurement]:
    wanted = record.measurements if pick is None else pick(record.measurements)
    return {label(each): each for each in wanted if each.samples}


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


def _row(first: Measurement, second: Measurement, test: Difference, counts: bool) -> Row:
    word: Word = "no significant difference"
    if counts and test.ratio != 1:
        word = "faster" if (test.ratio > 1) == (first.better == "higher") else "slower"
    return Row(
        label(first),
        word,
        first.value,
        second.value,
        first.unit,
        change=test.ratio - 1,
        probability=test.probability,
    )


def as_document(rows: Sequence[Row], notes: Sequence[str]) -> str:
    """The comparison as JSON."""
    document = {
        "method": DIFFERENCE_METHOD,
        "notes": list(notes),
        "measurements": [{key: value for key, value in asdict(row).items() if value not in (None, "")} for row in rows],
    }
    return json.dumps(document, indent=2) + "\n"


def print_comparison(rows: Sequence[Row], notes: Sequence[str], console: Console) -> None:
    """The comparison for people."""
    table = new_table()
    table.add_column("measurement", overflow="fold")
    add_number_columns(table, "first", "second", "change", "p")
    table.add_column("second is", ratio=1, overflow="fold")
    for row in rows:
        change = "-" if row.change is None else f"{row.change:+.1%}"
        probability = "-" if row.probability is None else f"{row.probability:.3f}"
        remark = f"{row.word}: {row.reason}" if row.reason else row.word
        cells = (row.name, _shown(row.first, row.unit), _shown(row.second, row.unit), change, probability, remark)
        table.add_row(*cells)
    console.print(table)
    for line in [*notes, DIFFERENCE_METHOD]:
        console.print(Text(on_one_line(line)), soft_wrap=True)


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "B/s":
        return f"{value / 1e9:.4g} GB/s"
    if unit == "s" and value < 1:
        return f"{value * 1e3:.4g} ms" if value >= _MILLISECOND else f"{value * 1e6:.4g} us"
    return f"{value:.4g} {unit}".removesuffix(" 1")
