"""What differs between the nodes of a fleet, as fixed-width text and as an HTML page."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from tunetool.inspect.fleet_compare import counts, natural
from tunetool.inspect.fleet_model import Difference, FleetInspection
from tunetool.node.common.files import replace_file
from tunetool.node.play import reasons
from tunetool.node.units import format_count
from tunetool.report.html import render
from tunetool.report.lines import wrapped

_MOST_NAMED = 8
"""Hosts named on one line of the screen; the page and the JSON have all."""


def screen(fleet: FleetInspection) -> str:
    """The lines for a terminal: hosts without an answer, then the differences, the most severe first."""
    lines = [line for text in [*_missing(fleet), *_differences(fleet)] for line in wrapped(text, 4)]
    return "".join(f"{line}\n" for line in [*lines, *wrapped(summary(fleet), 4)])


def summary(fleet: FleetInspection) -> str:
    """One line over all."""
    inspected = len(fleet.hosts) - len(fleet.missing)
    missing = f"; {len(fleet.missing)} not inspected" if fleet.missing else ""
    if inspected < 2:
        return f"{format_count(inspected, 'host')} inspected: nothing to compare{missing}"
    if not fleet.differences:
        return f"{inspected} hosts are alike in {fleet.facts} facts{missing}"
    odd = counts(fleet.differences)
    undecided = any(each.majority is None for each in fleet.differences)
    named = f"{len(odd)} of {inspected} hosts differ from most" if odd else f"{inspected} hosts differ"
    facts = format_count(len({each.fact for each in fleet.differences}), "fact")
    split = "; where two values are on equally many hosts, no host is the odd one" if undecided else ""
    return f"{named}, in {facts} of {fleet.facts}{split}{missing}"


def _missing(fleet: FleetInspection) -> Iterator[str]:
    for group in missing_by_reason(fleet):
        yield _without_inspection(group, fleet)
        if words := reasons.hint(group):
            yield f"  hint: {words}"


def _without_inspection(group: reasons.SameReason, fleet: FleetInspection) -> str:
    if len(group.hosts) == 1:
        return f"{group.hosts[0]}: {group.status}: {group.reason}"
    return reasons.line(group, len(fleet.hosts))


def missing_by_reason(fleet: FleetInspection) -> list[reasons.SameReason]:
    """The hosts without an inspection, together where the reason is the same."""
    return reasons.by_reason((each.host, "not inspected", each.reason or "no reason") for each in fleet.missing)


def _differences(fleet: FleetInspection) -> Iterator[str]:
    for each in fleet.differences:
        for hosts, parts in _alike(each):
            named = ", ".join(hosts[:_MOST_NAMED])
            more = f" and {len(hosts) - _MOST_NAMED} more" if len(hosts) > _MOST_NAMED else ""
            yield f"{named}{more}: {difference(each, parts)}" + (f"; do: {each.remedy}" if each.remedy else "")


def _alike(each: Difference) -> list[tuple[list[str], tuple[str, ...]]]:
    """The hosts of a difference, together where the same drives or GPUs differ."""
    by_parts: dict[tuple[str, ...], list[str]] = {}
    for host in each.hosts:
        by_parts.setdefault(tuple(each.parts.get(host, ())), []).append(host)
    return [(hosts, parts) for parts, hosts in by_parts.items()]


def difference(each: Difference, parts: Sequence[str] = ()) -> str:
    """The fact, the odd value, and the value of most hosts."""
    where = f" ({', '.join(parts)})" if parts else ""
    if each.majority is None:
        return f"{each.title}: {each.value}; most have no common value ({each.majority_hosts} of {each.compared})"
    return f"{each.title}: {each.value}{where}; {each.majority} on {each.majority_hosts} of {each.compared} hosts"


def write_page(fleet: FleetInspection, path: Path) -> None:
    """Write the page to ``path`` by rename."""
    replace_file(str(path), page(fleet))


def page(fleet: FleetInspection) -> str:
    """The text of the page."""
    odd = counts(fleet.differences)
    groups = missing_by_reason(fleet)
    grouped = {name for group in groups if len(group.hosts) > 1 for name in group.hosts}
    return render(
        "fleet-inspection.html.j2",
        taken=fleet.taken,
        command=shlex.join(fleet.command),
        provenance=[("tunetool", fleet.tool_version)],
        summary=summary(fleet),
        of=len(fleet.hosts),
        missing=[(_without_inspection(group, fleet), reasons.hint(group), group.hosts) for group in groups],
        differences=[
            {
                "hosts": ", ".join(hosts),
                "title": each.title,
                "value": each.value,
                "parts": parts,
                "majority": each.majority or "-",
                "count": f"{each.majority_hosts} of {each.compared}",
                "remedy": each.remedy or "",
            }
            for each in fleet.differences
            for hosts, parts in _alike(each)
        ],
        hosts=[
            {
                "host": each.host,
                "differs": odd.get(each.host, 0),
                "findings": [f"{finding.id}: {finding.found}" for finding in each.inspection.findings]
                if each.inspection is not None
                else [],
                "inspected": each.inspection is not None,
            }
            for each in sorted(fleet.hosts, key=lambda each: natural(each.host))
            if each.host not in grouped
        ],
    )
