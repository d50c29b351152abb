"""What `bench reference` shows: every part with its verdict, the nodes, and the figures of each part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tunetool.node.play.reasons import by_reason, line
from tunetool.node.units import format_figure
from tunetool.record import REPORT, FleetHost, Measurement, Part, Record
from tunetool.view.figures import label
from tunetool.view.model import Block, Cell, Cells, Notes, Plot, Section, Table, View
from tunetool.view.plots import bar_of, bars
from tunetool.view.text import interval_of, number

_COLOUR = "#1f6feb"
_TITLES: Mapping[str, str] = {
    "verify": "Storage",
    "checkpoint": "Checkpoints: the fastest durable save of each node, and its restore",
    "staging": "Model and data in memory, or read in place",
    "strategies": "Steps by nodes, ranks and ZeRO stage",
}
_UNITS: Mapping[str, tuple[str, float]] = {"B/s": ("GB/s", 1e9), "s": ("s", 1.0)}
"""What a plot shows, and how much of the record's unit that is."""
_LEFT_OUT = "left out"
"""How the first reason of such a host begins."""


def view(record: Record, directory: Path | None = None) -> View:
    """What is shown; there is no page where no part was run. Pages of parts are beside ``directory``."""
    parts, hosts = record.parts or [], record.hosts or []
    ran = any(part.run for part in parts)
    rows = [_part(part, directory) for part in parts]
    table = Table(("part", "verdict", "record", "reason"), rows, (), texts=("reason",), sortable=False)
    sections = [Section("Parts", [table, Notes(list(_notes(record)), on="terminal")], on="" if ran else "terminal")]
    if hosts and ran:
        sections.append(Section("Nodes", [_nodes(hosts)], on="page"))
    for name, title in _TITLES.items():
        figures = [each for each in record.measurements if _part_of(each) == name]
        if figures:
            sections.append(Section(title, list(_figures(figures))))
    return View(f"The whole chain from {record.node.host}", sections=sections)


def _part(part: Part, directory: Path | None) -> Cells:
    link = f"../{part.run}/{REPORT}"
    has_page = part.run is not None and directory is not None and (directory / link).is_file()
    return [
        part.name,
        Cell("not run" if part.status == "skip" else part.status.upper(), mark=part.status),
        Cell(part.run or "-", link=link if has_page else ""),
        next(iter(part.reasons), ""),
    ]


def _nodes(hosts: Sequence[FleetHost]) -> Table:
    """A row for all hosts of one status with one reason."""
    statuses = {host.host: host.status for host in hosts}
    rows: list[Cells] = [
        [", ".join(each.hosts), Cell(each.status.upper(), statuses[each.hosts[0]]), each.reason]
        for each in by_reason((host.host, host.status, next(iter(host.reasons), "")) for host in hosts)
    ]
    return Table(("node", "verify", "reason"), rows, (), texts=("node", "reason"))


def _notes(record: Record) -> Iterator[str]:
    """Lines on hosts that were left out, and where to find each part's own table."""
    hosts = record.hosts or []
    out = [host for host in hosts if any(reason.startswith(_LEFT_OUT) for reason in host.reasons)]
    for group in by_reason((host.host, "", host.reasons[0]) for host in out):
        yield f"{group.hosts[0]} was {group.reason}" if len(group.hosts) == 1 else line(group, len(hosts))
    kept = next((part.run for part in record.parts or [] if part.run), None)
    if kept is not None:
        yield f"each part's own table: `tunetool report show {kept}`"


def _part_of(figure: Measurement) -> str:
    subject = figure.labels["subject"]
    return subject if subject in _TITLES else "verify"


def _figures(figures: list[Measurement]) -> Iterator[Block]:
    for unit, (shown, size) in _UNITS.items():
        if drawn := [bar_of(label(each), each, _COLOUR, size) for each in figures if each.unit == unit]:
            yield Plot(bars(shown, drawn))
    titles = ("figure", "median", "interval", "medium", "node")
    yield Table(titles, [_row(each) for each in figures], numbers=titles[1:2])


def _row(figure: Measurement) -> Cells:
    interval, size = interval_of(figure), _UNITS.get(figure.unit, ("", 1.0))[1]
    none = "none: one round" if len(figure.samples or []) == 1 else "-"
    median = f"{number(figure.value)} s" if figure.unit == "s" else format_figure(figure.value, figure.unit)
    return [
        figure.name,
        Cell(median, number=figure.value),
        f"{number(interval.low / size)} to {number(interval.high / size)}" if interval else none,
        figure.medium,
        figure.host or "-",
    ]
