"""The page of an acceptance: which machine, each goal with its figure, interval, proof and verdict, the worst first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tunetool.accept.judge import GOALS_WORST_FIRST, HELD, MISSED, OPEN, figure_of, title
from tunetool.fleet.view import pages_beside
from tunetool.inspect.fleet_compare import natural
from tunetool.node.units import format_count, format_size, format_size_binary
from tunetool.record import REPORT, DriveFacts, FleetHost, GoalResult, GoalVerdict, Record, Status, to_document
from tunetool.verdict import WORST_FIRST
from tunetool.view.model import Cell, Cells, Notes, Section, Table, View
from tunetool.view.text import counted, format_value, number, scale

_MARKS: dict[GoalVerdict, Status | None] = {
    "held": "pass",
    "missed": "fail",
    "not decided": "unstable",
    "skipped": None,
}
_TITLES = ("goal", "verdict", "figure", "interval", "proof")


def view(record: Record, directory: Path | None = None) -> View:
    """What is shown; on a fleet, the hosts' own pages lie below the ``directory``."""
    goals = _worst_first(record.goals or [])
    where = format_count(len(record.hosts), "node") if record.hosts is not None else record.node.host
    sections = [
        *([_nodes(record, goals, directory)] if record.hosts is not None else []),
        *([goals_section(goals) if record.hosts is None else _over_nodes(goals, len(record.hosts))] if goals else []),
        *(_machine(record) if record.hosts is None else []),
        *([_runs(record, directory)] if record.parts else []),
    ]
    sections.append(Section("Why these goals", [Notes(list(_reasons(goals)))], on="page"))
    return View(f"Acceptance of {where}", head=[_count(goals)], sections=sections, closing=[_signature(record)])


def goals_section(goals: Sequence[GoalResult]) -> Section:
    """The goals of a record of any kind."""
    ranked = _worst_first(goals)
    lost = frozenset(number for number, each in enumerate(ranked) if each.verdict == MISSED)
    return Section("Goals", [Table(_TITLES, [_row(each) for each in ranked], ("figure",), lost=lost)])


def _worst_first(goals: Sequence[GoalResult]) -> list[GoalResult]:
    return sorted(goals, key=lambda each: GOALS_WORST_FIRST.index(each.verdict))


def _count(goals: Sequence[GoalResult]) -> str:
    counts = [f"{sum(each.verdict == word for each in goals)} {word}" for word in reversed(GOALS_WORST_FIRST)]
    return f"{format_count(len(goals), 'goal')}: {', '.join(counts)}"


def _signature(record: Record) -> str:
    digest = record.sha256 or to_document(record)["sha256"]
    return (
        f"Signed by nobody: nothing but the record's own hash, sha256 {digest}, holds this page to its record.json. "
        "It shows accidental damage, and no forgery: whoever changes the record can make a new hash."
    )


def _over_nodes(goals: Sequence[GoalResult], count: int) -> Section:
    """A goal a row, by the node that is worst in it: each node's own page has all of its goals. ``count``: all nodes,
    also those that did not answer."""
    of_goal: dict[tuple[str, str, str, float], list[GoalResult]] = {}
    for each in goals:
        of_goal.setdefault((each.run, _named(each), each.sense, each.bound), []).append(each)
    rows = []
    for nodes in of_goal.values():
        worst = min(nodes, key=_distance)
        name, *rest = _row(worst.model_copy(update={"host": None}))
        rows.append([name, f"{sum(each.verdict == HELD for each in nodes)} of {count}", worst.host or "-", *rest])
    titles = ("goal", "held by", "worst node", *_TITLES[1:])
    return Section("Goals", [Table(titles, rows, ("held by", "figure"))])


def _distance(goal: GoalResult) -> tuple[int, float]:
    """The less, the worse: by verdict, then by how far the figure is on the goal's side."""
    value = goal.value or 0.0
    return GOALS_WORST_FIRST.index(goal.verdict), value if goal.sense == "at least" else -value


def _named(goal: GoalResult) -> str:
    return title(goal.model_copy(update={"host": None}))


def _row(goal: GoalResult) -> Cells:
    named = f"{title(goal)} {goal.sense} {format_value(goal.bound, goal.unit)}"
    figure = format_value(goal.value, goal.unit) if goal.value is not None else "-"
    verdict = Cell(goal.verdict, _MARKS[goal.verdict])
    return [named, verdict, Cell(figure, number=goal.value), _interval(goal), _proof(goal)]


def _interval(goal: GoalResult) -> str:
    interval = goal.confidence
    if interval is None:
        return "-"
    factor, unit = scale(goal.unit, max(abs(interval.low), abs(interval.high)))
    level = [f"{interval.level:.0%}"] if interval.level else []
    rounds = [format_count(goal.rounds, "round")] if goal.rounds else []
    values = f"{number(interval.low / factor)} to {number(interval.high / factor)} {unit}".strip()
    return ", ".join([values, *level, *rounds])


def _proof(goal: GoalResult) -> str:
    if goal.value is None:
        return "-"
    counted = [each for each in goal.evidence if each.ratio is not None]
    medium = f", {goal.medium}" if goal.medium else ""
    if counted:
        farthest = max(counted, key=lambda each: abs((each.ratio or 0.0) - 1))
        return f"{farthest.device or 'drives'} counted {farthest.ratio:.4f} of the bytes{medium}"
    memory = any(each.kind == "memory" for each in goal.evidence)
    return ("in memory: no drive counts" if memory else "no counter") + medium


def _reasons(goals: Sequence[GoalResult]) -> Iterator[str]:
    seen: dict[object, GoalResult] = {}
    for each in goals:
        seen.setdefault((each.run, _named(each)), each)
    for goal in seen.values():
        program = f"; by {goal.program}" if goal.program else ""
        figure = f"; {figure_of(goal)}" if goal.name else ""
        yield f"{_named(goal)}: {goal.why or 'the file names no source'}{figure}; `tunetool {goal.run}`{program}"


def _machine(record: Record) -> Iterator[Section]:
    node = record.node
    tool = " ".join(filter(None, ["tunetool", record.tool.version, record.tool.commit])) if record.tool else ""
    programs = sorted({each.program for each in record.goals or [] if each.program})
    facts = [
        ("machine", " ".join(filter(None, [node.host, node.machine]))),
        ("CPU", f"{node.cpu}, {node.cpu_count} cores" if node.cpu else ""),
        ("memory", format_size_binary(node.memory_bytes) if node.memory_bytes else ""),
        ("kernel", node.kernel or ""),
        ("GPUs", counted(node.gpus or [])),
        ("NVIDIA driver", node.driver or ""),
        ("programs", ", ".join([tool, *programs])),
        ("measured", f"{record.started:%Y-%m-%d %H:%M} to {record.finished:%Y-%m-%d %H:%M} UTC"),
    ]
    rows = [list(each) for each in facts if each[1]]
    yield Section("Machine", [Table(("fact", "value"), rows, (), sortable=False)])
    if node.drives:
        titles = ("drive", "serial", "model", "firmware", "size", "link")
        yield Section("Drives", [Table(titles, [_drive(each) for each in node.drives], ())])


def _drive(drive: DriveFacts) -> Cells:
    link = drive.link
    speed = f"{link.current_speed_gts:g} GT/s x{link.current_width}" if link and link.current_speed_gts else "-"
    size = format_size(drive.size_bytes) if drive.size_bytes else "-"
    return [drive.name, drive.serial or "-", drive.model or "-", drive.firmware or "-", size, speed]


def _runs(record: Record, directory: Path | None) -> Section:
    rows: list[Cells] = []
    for part in record.parts or []:
        page = f"{part.run}/{REPORT}" if part.run and directory is not None else ""
        # A host's page came from there alone, without those of its runs.
        link = f"../{page}" if page and directory is not None and (directory.parent / page).is_file() else ""
        rows.append([Cell(part.name, link=link), Cell(part.status.upper()), Cell(part.record_id or "-")])
    return Section("Runs", [Table(("run", "its own verdict", "record"), rows, ())], on="page")


def _nodes(record: Record, goals: Sequence[GoalResult], directory: Path | None) -> Section:
    pages = pages_beside(record, directory) if directory is not None else {}
    of_host = {host.host: [each for each in goals if each.host == host.host] for host in record.hosts or []}

    def worst(host: FleetHost) -> tuple[int, int, int, object]:
        words = [each.verdict for each in of_host[host.host]]
        return WORST_FIRST.index(host.status), -words.count(MISSED), -words.count(OPEN), natural(host.host)

    rows: list[Cells] = []
    for host in sorted(record.hosts or [], key=worst):
        words = [each.verdict for each in of_host[host.host]]
        counts = [str(words.count(word)) for word in GOALS_WORST_FIRST]
        reason = next(iter(host.reasons), "")
        rows.append(
            [Cell(host.host, link=pages.get(host.host, "")), Cell(host.status.upper(), host.status), *counts, reason]
        )
    titles = ("node", "verdict", *GOALS_WORST_FIRST, "reason")
    return Section("Nodes", [Table(titles, rows, GOALS_WORST_FIRST, ["reason"])])
