"""The ladder for people: the rungs from the bottom up with their shares, the first loss, and random reads."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tunetool.node.units import format_rate
from tunetool.record import Measurement, Record, Rung, chosen
from tunetool.report.page import new_table, print_block
from tunetool.view.text import number

RUNG_TITLES = ("rung", "GB/s", "GiB/s", "keeps", "of", "at least", "evidence")
RATE_TITLES = ("random", "rate", "from", "to", "p50", "p99", "p99.9", "depth", "expected", "verdict")


def print_ladder(record: Record, console: Console) -> None:
    """Print the ladder's tables and its first loss; nothing for a record without a ladder."""
    if record.ladder is None:
        return
    console.print(_rungs_table(record, [rung for rung in record.ladder.rungs if rung.skipped is None]))
    for reason, titles in skipped(record.ladder.rungs).items():
        print_block(console, f"skipped: {'; '.join(titles)}: {reason}", 2)
    _print_drives(record, console)
    rates = [m for m in record.measurements if m.quantity == "rate"]
    if rates:
        console.print(Text())
        console.print(_rates_table(record, rates))
    loss = record.ladder.loss
    if loss is None:
        print_block(console, no_loss(record.ladder.rungs), 2)
        return
    print_block(console, f"first loss, {loss.cause}: {loss.found}", 2)
    print_block(console, f"  remedy: {loss.remedy}", 4)


def falls_short(rung: Rung) -> bool:
    """Whether it keeps less than it should, lost or not."""
    return rung.share is not None and rung.least is not None and rung.share < rung.least


def no_loss(rungs: Sequence[Rung]) -> str:
    """What is said of a ladder without a loss: a rung that falls short in the median alone is not certain to lose."""
    short = [f"{rung.title} {rung.share:.0%} of {rung.least:.0%}" for rung in rungs if falls_short(rung)]
    if not short:
        return "every rung keeps what is expected of it"
    return (
        f"not certain: {'; '.join(short)}: the median falls short, and a sample or more reaches it; measure again with "
        "a longer `--duration`, on a quiet machine"
    )


def _rungs_table(record: Record, rungs: Sequence[Rung]) -> Table:
    table = _table(RUNG_TITLES, ("GB/s", "GiB/s", "keeps", "at least"))
    for rung in rungs:
        cells = rung_cells(record, rung)
        style = "bold red" if rung.loses else ""
        mark = "LOSES" if rung.loses else "short?" if falls_short(rung) else ""
        table.add_row(*(Text(cell, style=style) for cell in cells), Text(mark, style=style))
    return table


def rung_cells(record: Record, rung: Rung) -> tuple[str, ...]:
    """A rung that was measured, for the columns ``RUNG_TITLES``."""
    value = rung.value or 0.0
    return (
        rung.title,
        number(value / 1e9),
        number(value / 2**30),
        f"{rung.share:.0%}" if rung.share is not None else "-",
        rung.below or "-",
        f"{rung.least:.0%}" if rung.least is not None else "-",
        _proof([m for m in record.measurements if m.name == rung.name]),
    )


def _proof(measurements: Sequence[Measurement]) -> str:
    ratios = [m.evidence.worst_ratio or m.evidence.ratio for m in measurements if m.evidence and m.evidence.ratio]
    if not ratios:
        return "none"
    return f"{max(ratios, key=lambda ratio: abs(ratio - 1)):.4f}"


def skipped(rungs: Sequence[Rung]) -> dict[str, list[str]]:
    """The titles of the rungs that were not measured, by the reason."""
    by_reason: dict[str, list[str]] = {}
    for rung in rungs:
        if rung.skipped is not None:
            by_reason.setdefault(rung.skipped, []).append(rung.title)
    return by_reason


def _print_drives(record: Record, console: Console) -> None:
    drives = chosen(record.measurements, "bandwidth", subject="drive")
    if drives:
        speeds = ", ".join(
            f"`{m.parameters.get('serial') or m.parameters['device']}` {number(m.value / 1e9)}" for m in drives
        )
        print_block(console, f"each drive alone, GB/s: {speeds}", 2)


def _rates_table(record: Record, rates: Sequence[Measurement]) -> Table:
    table = _table(RATE_TITLES, ("rate", "from", "to", "p50", "p99", "p99.9", "expected"))
    for cells in rate_rows(record, rates):
        table.add_row(*map(Text, cells))
    return table


def rate_rows(record: Record, rates: Sequence[Measurement]) -> list[tuple[str, ...]]:
    """The cells of each figure of random reads, for the columns ``RATE_TITLES``."""
    wanted = {expectation.name: expectation for expectation in record.expectations}
    rows = []
    for m in rates:
        expectation = wanted.get(m.name)
        status = expectation.status if expectation else None
        cells = (
            m.labels["block"],
            format_rate(m.value),
            scaled_as(m.value, m.confidence.low) if m.confidence else "",
            scaled_as(m.value, m.confidence.high) if m.confidence else "",
            *(latency((m.percentiles or {}).get(name)) for name in ("p50", "p99", "p99.9")),
            f"{m.parameters.get('jobs')}x{m.parameters.get('queue_depth')}",
            format_rate(expectation.value) if expectation else "-",
            status.upper() if status else "not judged",
        )
        rows.append(cells)
    return rows


def _table(titles: Sequence[str], right: Sequence[str]) -> Table:
    table = new_table()
    for title in titles:
        table.add_column(title, justify="right" if title in right else "left", overflow="fold")
    if "rung" in titles:
        table.add_column("", overflow="fold")
    return table


def scaled_as(rate: float, value: float) -> str:
    """``value`` as a number in the unit in which ``rate`` is shown, without the unit."""
    factor = rate / float(format_rate(rate).split()[0])
    return number(value / factor)


def latency(seconds: float | None) -> str:
    """A latency for people, in microseconds, milliseconds or seconds; a dash for None."""
    if seconds is None:
        return "-"
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"
