"""The speed to expect of a kind of node: from what its best node measured, or what its drives' links carry. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tunetool.errors import UsageProblem
from tunetool.inspect.model import Inspection
from tunetool.measure import Direction
from tunetool.measure.evidence import HIGHEST, LOWEST
from tunetool.measure.figures import NAMES, sequential_figures
from tunetool.node.units import format_bandwidth
from tunetool.record import Expectation, Measurement, Record, chosen
from tunetool.verdict import LEVEL, first_problem, status_of, tester_limit

DIRECTIONS: tuple[Direction, ...] = ("read", "write")
PUBLISHED: Mapping[Direction, float] = {"read": 0.4, "write": 0.2}
"""Share of the links: eight Gen5 drives were published at 48 GiB/s read and 26 GiB/s write (DeepNVMe, 2025), which is
41 and 22 % of their 126 GB/s."""
_SAME = 0.001
"""Relative difference of two ceilings of the same drives."""


@dataclass(frozen=True)
class Ceiling:
    """What the drives' links carry at most, in bytes per second, and which drives these are."""

    value: float
    drives: str

    def is_same(self, other: Ceiling) -> bool:
        """Whether the drives are as fast; their sums may have been made in another order."""
        return abs(self.value - other.value) <= _SAME * other.value


@dataclass(frozen=True)
class NodeFigures:
    """What a record says of a node. ``problem``: why its figures do not count."""

    host: str
    figures: Mapping[Direction, Measurement]
    ceiling: Ceiling | None = None
    problem: str | None = None

    def low(self, direction: Direction) -> float:
        """The low end of the figure's interval."""
        figure = self.figures[direction]
        return figure.confidence.low if figure.confidence is not None else figure.value


@dataclass(frozen=True)
class Proposal:
    """The speed to expect in one direction, in bytes per second."""

    direction: Direction
    value: float
    reason: str
    notes: Sequence[str] = ()

    @property
    def text(self) -> str:
        """As an inventory has it."""
        return f"{self.value / 1e9:.9g}GBps"


def ceiling_of(inspection: Inspection) -> Ceiling:
    """The lower ceiling of drives and of the links that they share. Raises ``UsageProblem`` where none is known."""
    by_id = {each.id: each for each in inspection.ceilings}
    drives, links = by_id.get("drives"), by_id.get("links")
    if drives is None or drives.value is None:
        why = drives.of if drives is not None else "no NVMe drive that is free or in an array"
        raise UsageProblem(
            f"no ceiling of the drives is known here: {why}",
            "give a record of `tunetool verify`, or `--root` with a recording of a node",
        )
    return Ceiling(min(drives.value, links.value if links and links.value else drives.value), drives.of)


def nodes_of(record: Record) -> list[NodeFigures]:
    """The node, or the nodes of a fleet, of a record of ``verify``. Raises ``UsageProblem`` for another record."""
    if record.hosts is not None:
        nodes = [
            NodeFigures(
                each.host,
                _figures([figure for figure in record.measurements if figure.host == each.host]),
                problem=first_problem(each),
            )
            for each in record.hosts
        ]
    else:
        problem = first_problem(record.verdict) if record.verdict else "it has no verdict"
        nodes = [NodeFigures(record.node.host, _figures(record.measurements), _ceiling(record), problem)]
    if not any(each.figures for each in nodes):
        raise UsageProblem(
            f"the record of `{record.node.host}` (kind `{record.kind}`) has no sequential figure that is proven",
            "give records of `tunetool verify` that measured",
        )
    return nodes


def _figures(measurements: Sequence[Measurement]) -> dict[Direction, Measurement]:
    return sequential_figures(each for each in measurements if _is_proven(each))


def is_counted(figure: Measurement) -> bool:
    """Whether the drives counted as many bytes as the figure claims."""
    evidence = figure.evidence
    return evidence is not None and evidence.kind == "block" and LOWEST <= (evidence.ratio or 0.0) <= HIGHEST


def _is_proven(figure: Measurement) -> bool:
    interval = figure.confidence
    return is_counted(figure) and interval is not None and (interval.level or 0.0) >= LEVEL


def _ceiling(record: Record) -> Ceiling | None:
    figure = next(iter(chosen(record.measurements, "ceiling")), None)
    return Ceiling(figure.value, f"{figure.parameters.get('drives')} drives") if figure is not None else None


def common_ceiling(nodes: Sequence[NodeFigures]) -> Ceiling | None:
    """The nodes' ceiling, as far as it is known. Raises ``UsageProblem`` for nodes of different kinds."""
    known = {each.host: each.ceiling for each in nodes if each.ceiling is not None}
    for host, ceiling in known.items():
        first_host, first = next(iter(known.items()))
        if not ceiling.is_same(first):
            raise UsageProblem(
                f"the drives of `{first_host}` and `{host}` differ: their links carry "
                f"{format_bandwidth(first.value)} and {format_bandwidth(ceiling.value)}",
                "one kind of node at a time: the values belong into the variables of its group",
            )
    return next(iter(known.values()), None)


def from_links(ceiling: Ceiling) -> list[Proposal]:
    """Proposals before anything was measured."""
    return [
        Proposal(
            direction,
            _rounded(share * ceiling.value),
            f"{share:.0%} of what the links of {ceiling.drives} carry, as published for eight Gen5 drives",
            [f"{direction}: a value to begin with; measure a node, and give its record to this command"],
        )
        for direction, share in PUBLISHED.items()
    ]


def from_best(nodes: Sequence[NodeFigures], ceiling: Ceiling | None, margin: float) -> list[Proposal]:
    """Proposals from the best node in each direction. Raises ``UsageProblem`` where no node's figures count."""
    counted = [each for each in nodes if each.problem is None]
    proposals = []
    for direction in DIRECTIONS:
        having = [each for each in counted if direction in each.figures]
        if not having:
            continue
        best = max(having, key=lambda each: each.low(direction))
        figure = best.figures[direction]
        notes = []
        if ceiling is not None and figure.value > ceiling.value:
            notes.append(
                f"{direction}: {format_bandwidth(figure.value)} exceeds the links' {format_bandwidth(ceiling.value)}, "
                "so the drives do not use these links (virtual drives?)"
            )
        limit = tester_limit(figure)
        if limit is not None:
            notes.append(f"{direction}: {limit}, so that the drives may be faster")
        reason = (
            f"{100 * margin:g} % below the low end of the best node's interval: {best.host}, "
            f"{format_bandwidth(best.low(direction))}"
        )
        proposals.append(Proposal(direction, _rounded((1 - margin) * best.low(direction)), reason, notes))
    if not proposals:
        host, problem = next((each.host, each.problem) for each in nodes if each.problem is not None)
        raise UsageProblem(f"no figure counts: `{host}`: {problem}", "mend that, then `tunetool verify` again")
    return proposals


def _rounded(value: float) -> float:
    """Down to two significant digits."""
    step = 10 ** max(len(str(int(value))) - 2, 0)
    return float(int(value) // step * step)


def reaches(node: NodeFigures, proposals: Sequence[Proposal]) -> bool:
    """Whether `verify` would pass the node's figures; one without a figure, or with a problem, does not pass."""
    return node.problem is None and all(
        each.direction in node.figures
        and status_of(
            node.figures[each.direction],
            Expectation(name=NAMES[each.direction], value=each.value, source="advise expect"),
        )
        == "pass"
        for each in proposals
    )


def variables(proposals: Sequence[Proposal]) -> dict[str, str]:
    """For an inventory's group_vars."""
    return {f"tunetool_expect_{each.direction}": each.text for each in proposals}


def as_document(nodes: Sequence[NodeFigures], ceiling: Ceiling | None, proposals: Sequence[Proposal]) -> dict[str, Any]:
    """For ``--json``, in bytes per second."""
    return {
        "ceiling": {"value": ceiling.value, "drives": ceiling.drives} if ceiling is not None else None,
        "nodes": [
            {
                "host": each.host,
                **{direction: figure.value for direction, figure in each.figures.items()},
                "reaches": reaches(each, proposals),
                **({"problem": each.problem} if each.problem is not None else {}),
            }
            for each in nodes
        ],
        "proposals": [
            {"direction": each.direction, "value": each.value, "reason": each.reason, "notes": list(each.notes)}
            for each in proposals
        ],
        "variables": variables(proposals),
    }
