"""What `verify` shows of one node: what limits, the ladder, the figures, the drives side by side, and the checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from tunetool.inspect.ceilings import format_link_speed
from tunetool.measure.balance import CHECK_ID as BALANCE
from tunetool.measure.figures import is_sequential, is_share
from tunetool.measure.gds.config import CHECK_ID as GDS_CONFIG
from tunetool.measure.gds.counters import CHECK_ID as GDS
from tunetool.measure.ladder.budget import EXPECTED
from tunetool.measure.ladder.deepspeed_handles import CHECK_ID as DEEPSPEED
from tunetool.node.common.training_part import CHECK_ID as TRAINING
from tunetool.node.units import format_bandwidth, format_figure, format_size
from tunetool.record import DriveFacts, Evidence, Measurement, Record, chosen
from tunetool.verdict import SHARE_KEPT, TESTER_CEILING, TESTER_CPU_SHARE, slowest_volume
from tunetool.verify.drive_errors import CHECK_ID as ERRORS
from tunetool.verify.ladder_view import ladder, rates
from tunetool.view.figures import ceiling_of, what_limits
from tunetool.view.model import Block, Cell, Cells, Notes, Plot, Section, Table, View
from tunetool.view.plots import Bar, bar_of, bars
from tunetool.view.text import number

_MEASURED, _WANTED, _SLOW = "#1f6feb", "#8c959f", "#cf222e"
_SLOWER = 1.5
"""A drive whose requests take that many times the median of all is marked."""
_TIMES = ("read", "write")
"""Directions in which drives were timed."""
_HANDLES = {
    "cpu": "aio",
    "cuda": "aio, HBM",
    "gds": "gds, HBM",
    "direct": "GDS, HBM",
    "compat": "GDS compat",
    "posix": "POSIX, HBM",
}
_LEFT_OUT = {DEEPSPEED: "deepspeed: left out", GDS: "gds: not proven", TRAINING: "training environment"}
_OF_THE_MEASUREMENT = (BALANCE, ERRORS, DEEPSPEED, GDS, GDS_CONFIG)
"""Checks that need no manifest."""
_FIGURE_TITLES = ("figure", "GB/s", "GiB/s", "from", "to", "expected", "evidence", "medium", "verdict")
_DRIVE_TITLES = (
    *("serial number", "alone, GB/s", "read request, ms", "write request, ms"),
    *("name", "model", "firmware", "size", "link", "address"),
)


def view(record: Record, directory: Path | None = None) -> View:
    """What is shown."""
    return View(
        f"Storage of {record.node.host}",
        head=[] if record.target else ["nothing measured"],
        sections=[
            *ladder(record),
            *_sequential(record, main_figures(record)),
            *rates(record),
            *_drives(record),
            Section("Checks", [Notes(list(_checks(record)))], on="terminal"),
        ],
        advice=list(limits(record)),
        advice_on="page",
        checks=True,
    )


def main_figures(record: Record) -> list[Measurement]:
    """What `verify` measures at every level: fio's sequential figures, then DeepSpeed's and GPUDirect Storage's."""
    return [
        *(each for each in record.measurements if is_sequential(each)),
        *(each for each in record.measurements if is_share(each)),
        *(each for each in record.measurements if _is_of_handle(each)),
    ]


def limits(record: Record) -> Iterator[str]:
    """The layer that limits, as far as this record shows it: one line for each finding."""
    loss = record.ladder.loss if record.ladder else None
    if loss is not None:
        yield f"{loss.rung}, the first rung that loses ({loss.cause}): {loss.found}; {loss.remedy}"
    ceiling = ceiling_of(record)
    for figure in main_figures(record):
        reached = what_limits(figure, ceiling if is_sequential(figure) else None)
        if reached is not None:
            yield f"{_name(figure)}: {reached}"
        if is_sequential(figure) and (slowest := slowest_volume(record.measurements, figure)):
            yield f"{_name(figure)}: {slowest}"
    for check in record.checks:
        if check.status == "fail":
            yield f"{check.id}: {check.found}"
    if record.ladder is None and main_figures(record):
        yield "the layers below the file system were not measured: `tunetool verify --level full` does that"
    elif loss is None and record.ladder is not None:
        yield "no rung of the ladder loses more than is expected of it"


def _is_of_handle(figure: Measurement) -> bool:
    return figure.labels["subject"] in ("deepspeed", "gds")


def _name(figure: Measurement) -> str:
    """Its direction, and which handle moved the bytes where that was not fio."""
    direction = figure.labels["direction"]
    volume = f", {figure.labels['volume']}" if "volume" in figure.labels else ""
    if _is_of_handle(figure):
        return f"{direction}, {_HANDLES.get(str(figure.parameters.get('device')), '?')}{volume}"
    return direction + volume


def _sequential(record: Record, figures: Sequence[Measurement]) -> list[Section]:
    notes = Notes(list(_notes(record, figures)))
    if not figures:
        return [Section("Sequential", [notes], on="terminal")]
    rows = [_figure(record, figure) for figure in figures]
    table = Table(_FIGURE_TITLES, rows, numbers=_FIGURE_TITLES[1:6], sortable=False)
    plot = Plot(bars("sequential, GB/s (whiskers: interval)", list(_bars(record, figures))))
    return [Section("Sequential", [plot, table, notes])]


def _bars(record: Record, figures: Sequence[Measurement]) -> Iterator[Bar]:
    wanted = {expectation.name: expectation.value / 1e9 for expectation in record.expectations}
    for figure in figures:
        yield bar_of(_name(figure), figure, _MEASURED, 1e9)
        expected = wanted.get(figure.name)
        if expected is not None:
            yield Bar(f"{_name(figure)}, expected", expected, expected, expected, _WANTED)


def _figure(record: Record, figure: Measurement) -> Cells:
    expectation = next((each for each in record.expectations if each.name == figure.name), None)
    interval, status = figure.confidence, expectation.status if expectation else None
    share = _share(record, figure) if _is_of_handle(figure) else None
    return [
        _name(figure),
        number(figure.value / 1e9),
        number(figure.value / 2**30),
        number(interval.low / 1e9) if interval else "",
        number(interval.high / 1e9) if interval else "",
        number(expectation.value / 1e9) if expectation else "-",
        proof_of(figure.evidence) or "none",
        figure.medium,
        Cell(share) if share else Cell(status.upper() if status else "not judged", mark=status),
    ]


def proof_of(evidence: Evidence | None) -> str | None:
    """``block 1.0000``, and the worst sample where one proves nothing: it decides, and the sum may hide it."""
    if evidence is None or evidence.ratio is None:
        return None
    worst = "" if evidence.worst_ratio is None else f", once {evidence.worst_ratio:.4f}"
    return f"{evidence.kind} {evidence.ratio:.4f}{worst}"


def _share(record: Record, figure: Measurement) -> str | None:
    """The figure as a share of fio's bandwidth in the same direction; None where fio did not run."""
    labels = {"subject": "sequential", "io_engine": None, "volume": figure.labels.get("volume")}
    sides = chosen(record.measurements, "bandwidth", direction=figure.labels["direction"], **labels)
    fio = next((each.value for each in sides), 0.0)
    return f"{figure.value / fio:.0%} of fio" if fio else None


def _notes(record: Record, figures: Sequence[Measurement]) -> Iterator[str]:
    """The ceiling, the expectations, and how each figure was measured: one line each."""
    ceilings = chosen(record.measurements, "ceiling")
    for ceiling in ceilings:
        exceeded = any(figure.value > ceiling.value for figure in figures)
        note = "; exceeded, so the drives do not use these links (virtual drives?)" if exceeded else ""
        drives = ceiling.parameters.get("drives")
        yield f"ceiling of the {drives} drives' links: {format_bandwidth(ceiling.value)}{note}"
    if figures and record.target and not ceilings:
        yield "ceiling: unknown, the links of these drives are not visible"
    several = {figure.name for figure in figures if "volume" in figure.labels}
    for expectation in record.expectations:
        if expectation.name in several:
            continue
        name, wanted = expectation.name.replace(".", " "), format_figure(expectation.value, expectation.unit)
        yield f"expectation ({expectation.source}): {name} of at least {wanted}"
    if any(expectation.name in several for expectation in record.expectations):
        yield f"expectation of each volume: {SHARE_KEPT:.0%} of its share, by its number of drives"
    if record.tolerance:
        yield f"tolerance: {record.tolerance * 100:g} % of an expectation may be missing"
    yield from map(_how, figures)


def _how(figure: Measurement) -> str:
    """How a figure was measured, and whether it drifts."""
    interval, trend, given = figure.confidence, figure.trend, figure.parameters
    line = _name(figure)
    line += f": median, {interval.method} of {given.get('sample_seconds')} s" if interval else ""
    if interval and interval.level:
        line += f" ({interval.level:.1%} confidence)"
    if trend and trend.significant and trend.change is not None:
        line += f"; {'rising' if trend.change > 0 else 'falling'} by {abs(trend.change):.1%} meanwhile"
    line += f"; {figure.engine}"
    # The limits of the program that measured.
    ceiling, share = given.get(TESTER_CEILING), given.get(TESTER_CPU_SHARE)
    line += f", without storage {format_bandwidth(float(ceiling))}" if ceiling is not None else ""
    return line + (f", {float(share):.0%} of its cores busy" if share is not None else "")


def _checks(record: Record) -> Iterator[str]:
    """Lines on a terminal: how many checks have which status, what was left out, and what failed with its remedy."""
    if all(check.id in _OF_THE_MEASUREMENT for check in record.checks):
        yield "configuration checks: skipped, there is no manifest"
    found = [check.status for check in record.checks]
    if summary := ", ".join(
        f"{found.count(each)} {each}" for each in ("pass", "fail", "unknown", "skip") if each in found
    ):
        yield f"checks: {summary}"
    tried = any(check.id == DEEPSPEED for check in record.checks)
    for check in record.checks:
        # Where DeepSpeed was tried, its own line says why it was left out.
        if check.id in _LEFT_OUT and check.status == "skip" and not (check.id == TRAINING and tried):
            yield f"{_LEFT_OUT[check.id]}, {check.found}" + (f"; {check.remedy}" if check.remedy else "")
        if check.status in ("fail", "unknown"):
            yield f"{check.status.upper():8}{check.id}: {check.found}"
            yield f"        expected: {check.expected}"
            if check.remedy:
                yield f"        remedy: {check.remedy}"


def _drives(record: Record) -> list[Section]:
    """The drives side by side: what each is, and what was measured of it."""
    alone = _by_drive(chosen(record.measurements, "bandwidth", subject="drive"))
    times = [_by_drive(chosen(record.measurements, "service_time", direction=way)) for way in _TIMES]
    measured = list(dict.fromkeys(drive for figures in (alone, *times) for drive in figures))
    slow = _beyond(alone, EXPECTED["alone"].least, -1) | {drive for by in times for drive in _beyond(by, _SLOWER, 1)}
    facts = {drive.serial or drive.name: drive for drive in record.node.drives or []}
    rows = [_drive(drive, facts.get(drive), alone, times, drive in slow) for drive in measured]
    lost = frozenset(index for index, drive in enumerate(measured) if drive in slow)
    table = Table(_DRIVE_TITLES, rows, numbers=_DRIVE_TITLES[1:4], lost=lost)
    return [Section("Drives side by side", [*_plots(alone, times, slow), table], on="page")] if measured else []


def _by_drive(figures: Sequence[Measurement]) -> Mapping[str, Measurement]:
    return {each.labels.get("drive", "?"): each for each in figures}


def _beyond(figures: Mapping[str, Measurement], times: float, sign: int) -> set[str]:
    """The drives below (``sign`` -1) or above (1) that many times the median of all."""
    middle = median(m.value for m in figures.values()) if figures else 0.0
    return {drive for drive, m in figures.items() if sign * (m.value - times * middle) > 0}


def _plots(
    alone: Mapping[str, Measurement], times: Sequence[Mapping[str, Measurement]], slow: set[str]
) -> Iterator[Block]:
    requests = [(f"a request of each drive, {way}, ms", by, 1e-3) for way, by in zip(_TIMES, times, strict=True)]
    shown = [("each drive alone, GB/s", alone, 1e9)] if alone else requests
    for title, figures, unit in shown:
        drawn = [
            bar_of(f"{drive} (slow)" if drive in slow else drive, m, _SLOW if drive in slow else _MEASURED, unit)
            for drive, m in figures.items()
        ]
        if drawn:
            yield Plot(bars(title, drawn))


def _drive(
    drive: str,
    facts: DriveFacts | None,
    alone: Mapping[str, Measurement],
    times: Sequence[Mapping[str, Measurement]],
    slow: bool,
) -> Cells:
    link = facts.link if facts else None
    speed = link.current_speed_gts if link else None
    return [
        f"{drive} (slow)" if slow else drive,
        number(alone[drive].value / 1e9) if drive in alone else "-",
        *(number(by_drive[drive].value * 1e3) if drive in by_drive else "-" for by_drive in times),
        facts.name if facts else "-",
        (facts.model if facts else None) or "-",
        (facts.firmware if facts else None) or "-",
        format_size(facts.size_bytes) if facts and facts.size_bytes else "-",
        format_link_speed(speed, link.current_width) if link and speed else "-",
        (facts.pci_address if facts else None) or "-",
    ]
