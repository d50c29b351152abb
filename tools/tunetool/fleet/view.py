"""What a fleet's record says: a node a row, the bad ones on top, then those that are slow among the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import quote

from pydantic import ValidationError

from tunetool.errors import UsageProblem
from tunetool.fleet.outliers import OUTLIER
from tunetool.fleet.run_on_hosts import record_over
from tunetool.fleet.same_reasons import same_reasons
from tunetool.fleet.verify import name_outliers
from tunetool.inspect.fleet_compare import compare_facts, natural
from tunetool.inspect.fleet_facts import facts_of_node
from tunetool.inspect.fleet_model import Difference
from tunetool.measure.figures import is_sequential
from tunetool.node.play import reasons
from tunetool.node.units import format_count
from tunetool.record import FleetHost, Measurement, Node, Record, host_file
from tunetool.regular_files import below, read_json
from tunetool.verdict import WORST_FIRST
from tunetool.view.model import Block, Cell, Cells, Choice, Notes, Plot, Section, Table, View
from tunetool.view.points import Level, Point, points
from tunetool.view.text import number

_GOOD, _BAD = "#1f6feb", "#cf222e"
_NAMED = 5


@dataclass(frozen=True)
class Dot:
    """One node's figure; a node that is bad in any way has another colour and a larger dot."""

    name: str
    value: float
    bad: bool


def dots(title: str, given: Sequence[Dot]) -> str:
    """The picture; ``given`` is not empty, and its values are in the unit of ``title``."""
    ordered = sorted(given, key=lambda dot: (dot.value, dot.name))
    middle = median(dot.value for dot in ordered)
    bad = [dot for dot in ordered if dot.bad]
    named = "; ".join(f"{dot.name} {number(dot.value)}" for dot in ordered[:_NAMED])
    said = f"{title}: {len(ordered)} nodes, median {number(middle)}, the slowest: {named}; {len(bad)} marked"
    drawn = [
        Point(dot.name, dot.value, dot.value, dot.value, _BAD if dot.bad else _GOOD, 4 if dot.bad else 2.5)
        for dot in ordered
    ]
    return points(title, said, drawn, [Level("", middle)], f"the slowest node first; dashed: median {number(middle)}")


_MOST_FIGURES, _MOST_PLOTS, _MOST_NAMED, _MOST_REASONS = 6, 2, 8, 5
_UNITS = {"B/s": ("GB/s", 1e9), "s": ("s", 1.0), "1/s": ("1/s", 1.0), "B": ("GB", 1e9), "1": ("", 1.0)}


@dataclass(frozen=True)
class Column:
    """A figure that the nodes have, in the unit of the page."""

    name: str
    unit: str
    factor: float
    better: str
    values: Mapping[str, Measurement]
    """By host."""

    @property
    def title(self) -> str:
        """The name with its unit."""
        return f"{self.name}, {self.unit}" if self.unit else self.name

    @property
    def middle(self) -> float:
        """The median over all nodes."""
        return median(each.value for each in self.values.values())


@dataclass
class _Row:
    host: FleetHost
    outlier: list[str]
    reasons: list[str]
    lag: float
    """The largest share by which a figure is worse than the median."""
    differs: list[str] = field(default_factory=list)
    groups: Sequence[str] = ()

    @property
    def bad(self) -> bool:
        return self.host.status != "pass" or bool(self.outlier)


def view(record: Record, directory: Path | None) -> View:
    """What is shown; the hosts' own records and pages lie in ``hosts/`` below the ``directory``."""
    if directory is None:
        return view_of_nodes(record, {})
    return view_of_nodes(record, nodes_beside(record, directory), pages=pages_beside(record, directory))


def pages_beside(record: Record, directory: Path) -> dict[str, str]:
    """The addresses of the hosts' own pages, relative to the ``directory``; a host without one is left out."""
    names = {host.host: str(Path(host_file(host.host)).with_suffix(".html")) for host in record.hosts or []}
    return {host: quote(name) for host, name in names.items() if _is_below(directory, name)}


def _is_below(directory: Path, name: str) -> bool:
    try:
        return below(directory, name).is_file()
    except (OSError, UsageProblem):
        return False


def nodes_beside(record: Record, directory: Path) -> dict[str, Node]:
    """Each host's machine, from its own record below the ``directory``; a host without a readable one is left out."""
    nodes = {}
    for host in record.hosts or []:
        try:
            document = read_json(below(directory, host_file(host.host)))
            nodes[host.host] = Node.model_validate(document["node"])
        except (OSError, ValueError, KeyError, TypeError, UsageProblem, ValidationError):
            continue
    return nodes


def with_nodes(record: Record, path: Path) -> tuple[Record, dict[str, Node]]:
    """A fleet's record at ``path``, and its hosts' machines. Raises ``UsageProblem`` for a record of one node."""
    if record.hosts is None:
        raise UsageProblem(f"`{path}` is of one node", "name the records of several nodes, or that of `verify -i`")
    return record, nodes_beside(record, path.parent)


def of_nodes(shown: Sequence[Record]) -> tuple[Record, dict[str, Node]]:
    """One record over those of single nodes, the newest of each, and the nodes' machines. Raises ``UsageProblem``."""
    newest: dict[str, Record] = {}
    for each in sorted(shown, key=lambda each: each.finished):
        if each.hosts is not None or each.kind != shown[0].kind:
            raise UsageProblem("the records are not of one kind", "name records of single nodes by the same command")
        newest[each.node.host] = each
    hosts = [
        (
            FleetHost(
                host=host,
                record_id=each.id,
                status=each.verdict.status if each.verdict else "error",
                reasons=each.verdict.reasons if each.verdict else ["its record has no verdict"],
            ),
            each,
        )
        for host, each in sorted(newest.items(), key=lambda item: natural(item[0]))
    ]
    command, started = shown[0].command, min(each.started for each in shown)
    whole = record_over(command, shown[0].target, started, name_outliers(hosts), _of_a_fleet(shown[0].kind))
    finished = max(each.finished for each in shown)
    return whole.model_copy(update={"finished": finished}), {host: each.node for host, each in newest.items()}


def _of_a_fleet(kind: str) -> Callable[[Measurement], bool]:
    """Which figures a fleet's record has."""
    return is_sequential if kind == "verify" else lambda figure: True


def view_of_nodes(
    record: Record,
    nodes: Mapping[str, Node],
    groups: Mapping[str, Sequence[str]] | None = None,
    pages: Mapping[str, str] | None = None,
) -> View:
    """What is shown. ``nodes``: the hosts' machines; ``groups``: their groups in the inventory; ``pages``: addresses
    of their own pages, relative to that of the fleet."""
    columns, hosts = list(_columns(record)), record.hosts or []
    differences = compare_facts({host: facts_of_node(node) for host, node in nodes.items()}).differences
    rows = _rows(hosts, columns, differences, groups or {})
    bad = {row.host.host for row in rows if row.bad}
    statuses = Counter[str](row.host.status for row in rows)
    counts = "".join(f"{statuses[each]} {each.upper()}, " for each in WORST_FIRST if statuses[each])
    slow = sum(bool(row.outlier) for row in rows)
    shown: list[Block] = [
        Notes([f"{counts}{slow} slow among the others. The bad ones come first."]),
        *(Plot(_plot(column, bad)) for column in columns[:_MOST_PLOTS]),
        _table(_together(rows, columns, hosts), columns, differences, pages or {}),
        Notes(list(_in_words(hosts)), on="terminal"),
    ]
    sections = [Section("Nodes", shown), *_differences(differences, len(nodes))]
    return View(f"A fleet of {len(hosts)} nodes", sections=sections, advice=list(_limits(rows, columns)))


def _table(
    together: Sequence[Sequence[_Row]],
    columns: Sequence[Column],
    differences: Sequence[Difference],
    pages: Mapping[str, str],
) -> Table:
    """The nodes, to choose from by verdict, group and what differs."""
    firsts = [rows[0] for rows in together]
    grouped = [_all(rows, lambda row: row.groups) for rows in together]
    differing = [_all(rows, lambda row: row.differs) for rows in together]
    statuses = [[row.host.status] for row in firsts]
    slow = [["slow among the others"] if row.outlier else [] for row in firsts]
    facts = list(dict.fromkeys(each.title for each in differences if each.majority is not None))
    groups = sorted({each for row in grouped for each in row}, key=natural)
    choices = [
        Choice("status", "verdict", [each for each in WORST_FIRST if [each] in statuses], statuses),
        Choice("slow", "slow", ["slow among the others"] if any(slow) else [], slow),
        Choice("group", "rack or group", groups, grouped),
        Choice("differs", "differs in", facts, differing),
    ]
    more = [*(["groups"] if groups else []), *(["differs in"] if facts else [])]
    rows: list[Cells] = []
    for hosts, own_groups, own_facts in zip(together, grouped, differing, strict=True):
        row = hosts[0]
        cells = [_names([each.host.host for each in hosts], pages), Cell(row.host.status.upper(), row.host.status)]
        cells += [_cell(column, row.host.host) for column in columns]
        cells += [Cell(", ".join(own_groups))] if groups else []
        cells += [Cell(", ".join(own_facts))] if facts else []
        rows.append([*cells, _reason(hosts)])
    numbers = [column.title for column in columns]
    titles = ["node", "verdict", *numbers, *more, "reason"]
    return Table(titles, rows, numbers, ["reason"], name="nodes", choices=[each for each in choices if each.options])


def _all(rows: Sequence[_Row], of: Callable[[_Row], Sequence[str]]) -> list[str]:
    return sorted({each for row in rows for each in of(row)}, key=natural)


def _names(hosts: Sequence[str], pages: Mapping[str, str]) -> Cell:
    cells = [Cell(host, link=pages.get(host, "")) for host in hosts]
    return cells[0] if len(cells) == 1 else Cell(format_count(len(cells), "node"), members=cells)


def _in_words(hosts: Sequence[FleetHost]) -> Iterator[str]:
    """Whom a reason of several hosts is about, and what is slow by how much: a page has both to unfold and to sort."""
    for group in same_reasons(hosts):
        yield reasons.line(group, len(hosts))
        if hint := reasons.hint(group):
            yield f"  hint: {hint}"
    yield from (f"{host.host}: {each}" for host in hosts for each in host.reasons if each.startswith(OUTLIER))


def _columns(record: Record) -> Iterator[Column]:
    """The figures of which every host has one at most, in the record's order."""
    by_name: dict[str, list[Measurement]] = {}
    for each in record.measurements:
        if each.host is not None:
            by_name.setdefault(each.name, []).append(each)
    single = [(name, all_) for name, all_ in by_name.items() if len({each.host for each in all_}) == len(all_)]
    for name, figures in single[:_MOST_FIGURES]:
        unit, factor = _UNITS[figures[0].unit]
        short = figures[0].labels["direction"] if is_sequential(figures[0]) else name
        yield Column(short, unit, factor, figures[0].better, {str(each.host): each for each in figures})


def _rows(
    hosts: Sequence[FleetHost],
    columns: Sequence[Column],
    differences: Sequence[Difference],
    groups: Mapping[str, Sequence[str]],
) -> list[_Row]:
    """The worst first: by verdict, then outliers, then by the distance from the median."""
    rows = []
    for host in hosts:
        lag = max((_lag(column, host.host) for column in columns), default=0.0)
        outlier = [reason.removeprefix(OUTLIER) for reason in host.reasons if reason.startswith(OUTLIER)]
        reasons = [reason for reason in host.reasons if not reason.startswith(OUTLIER)]
        differs = [each.title for each in differences if each.majority is not None and host.host in each.hosts]
        rows.append(_Row(host, outlier, reasons, lag, list(dict.fromkeys(differs)), groups.get(host.host, ())))

    def worst(row: _Row) -> tuple[Any, ...]:
        return (
            WORST_FIRST.index(row.host.status),
            not row.outlier,
            -row.lag,
            -len(row.differs),
            natural(row.host.host),
        )

    return sorted(rows, key=worst)


def _lag(column: Column, host: str) -> float:
    """By which share of the median this host is worse; 0 where it is not, or was not measured."""
    figure, middle = column.values.get(host), column.middle
    if figure is None or not middle:
        return 0.0
    distance = (middle - figure.value) / middle
    return max(0.0, distance if column.better == "higher" else -distance)


def _limits(rows: Sequence[_Row], columns: Sequence[Column]) -> Iterator[str]:
    """What is wrong with which nodes, the most frequent first, then the slowest node."""
    by_cause: dict[str, list[str]] = {}
    for row in rows:
        # What did not answer limits no job: the verdict's reasons have it.
        if row.host.status != "pass" and not any(each.startswith(reasons.UNREACHABLE) for each in row.reasons):
            cause = row.reasons[0].partition(":")[0] if row.reasons else row.host.status
            by_cause.setdefault(cause, []).append(row.host.host)
    for cause, hosts in sorted(by_cause.items(), key=lambda item: -len(item[1]))[:_MOST_REASONS]:
        yield f"{format_count(len(hosts), 'node')}: {cause}: {_named(hosts)}"
    if len(by_cause) > _MOST_REASONS:
        yield f"{len(by_cause) - _MOST_REASONS} further causes: see the nodes below"
    slow = [row.host.host for row in rows if row.outlier]
    if slow:
        named = f"{format_count(len(slow), 'node')} slow among the others: {_named(slow)}"
        yield f"{named}: compare drives, links and firmware with those of the others"
    for column in columns[:1]:
        worst = max(column.values, key=lambda host: _lag(column, host))
        figure, middle = (number(value / column.factor) for value in (column.values[worst].value, column.middle))
        yield f"the slowest node limits a job on all: {worst}, {column.name} {figure} {column.unit} (median {middle})"


def _named(hosts: Sequence[str]) -> str:
    more = len(hosts) - _MOST_NAMED
    return ", ".join(hosts[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _plot(column: Column, bad: set[str]) -> str:
    given = [Dot(host, each.value / column.factor, host in bad) for host, each in column.values.items()]
    return dots(column.title, given)


def _together(rows: Sequence[_Row], columns: Sequence[Column], hosts: Sequence[FleetHost]) -> list[list[_Row]]:
    """The rows in their order; those without a figure that have their first reason in common are one."""
    group_of = {name: number for number, group in enumerate(same_reasons(hosts)) for name in group.hosts}
    shown: list[list[_Row]] = []
    groups: dict[int, list[_Row]] = {}
    for row in rows:
        name = row.host.host
        alone = name not in group_of or any(name in column.values for column in columns)
        if alone:
            shown.append([row])
        elif group_of[name] in groups:
            groups[group_of[name]].append(row)
        else:
            shown.append(groups.setdefault(group_of[name], [row]))
    return shown


def _reason(together: Sequence[_Row]) -> Cell:
    """Why, in the row that stands for all hosts that have nothing but a reason in common."""
    row = together[0]
    said = row.reasons[:2]
    if len(together) > 1:
        # What to do is the same for all of them, and stands in the record.
        group = reasons.by_reason((each.host.host, each.host.status, each.reasons[0]) for each in together)[0]
        said = [" ".join([group.reason, *([f"({hint})"] if (hint := reasons.hint(group)) else [])])]
    more = len(row.reasons) - 2 if len(together) == 1 else 0
    slow = [f"slow: {each.partition(': ')[0]}" for each in row.outlier]
    return Cell("; ".join([*said, *slow, *([f"{more} more"] if more > 0 else [])]))


def _cell(column: Column, host: str) -> Cell:
    """The value, and its distance from the median."""
    figure, middle = column.values.get(host), column.middle
    if figure is None:
        return Cell("-")
    apart = f"{figure.value / middle - 1:+.0%}" if middle else ""
    aside = "" if apart in ("+0%", "-0%") else apart
    return Cell(number(figure.value / column.factor), number=figure.value, aside=aside)


_DIFFERENCES = ("fact", "value there", "nodes", "names", "most nodes", "of", "what to do")


def _differences(differences: Sequence[Difference], compared: int) -> Iterator[Section]:
    title = f"Differences between {compared} nodes"
    if differences:
        rows = [_difference(each) for each in differences]
        yield Section(title, [Table(_DIFFERENCES, rows, ("nodes", "of"), ("names", "what to do"))])
    elif compared > 1:
        yield Section(title, [Notes([f"The machines of {compared} nodes are alike in what their records have."])])


def _difference(each: Difference) -> Cells:
    most = each.majority or "no common value"
    of = f"{each.majority_hosts} of {each.compared}"
    return [each.title, each.value, str(len(each.hosts)), _named(each.hosts), most, of, each.remedy or ""]
