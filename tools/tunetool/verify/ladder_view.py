"""What is shown of the ladder: its picture, the rungs from the bottom up with their shares, the first loss, the rates.

The picture has a bar for each rung from the drives up, the ceiling, and the rung that loses. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from tunetool.node.units import format_rate
from tunetool.record import Ladder, Measurement, Record, Rung, chosen
from tunetool.view.figures import ceiling_of
from tunetool.view.model import Block, Cell, Cells, Notes, Plot, Section, Table
from tunetool.view.plots import picture, shortened
from tunetool.view.text import number

_INTRODUCTION = (
    "each rung does a little more than the one below; the mark on a bar is what the rung is expected to keep of it"
)


def ladder(record: Record) -> list[Section]:
    """The section of the ladder, where there is one."""
    return [Section("The ladder", list(_ladder(record, record.ladder)))] if record.ladder is not None else []


def rates(record: Record) -> list[Section]:
    """The sections of the rates, where there are any: one for each direction."""
    figures = [each for each in record.measurements if each.quantity == "rate"]
    directions = dict.fromkeys(each.labels["direction"] for each in figures)
    return [_rates(record, way, chosen(figures, direction=way)) for way in directions]


def _rates(record: Record, direction: str, figures: Sequence[Measurement]) -> Section:
    wanted = {expectation.name: expectation for expectation in record.expectations}
    rows: list[Cells] = []
    for m in figures:
        expectation = wanted.get(m.name)
        status = expectation.status if expectation else None
        rows.append(
            [
                m.labels["block"],
                format_rate(m.value),
                scaled_as(m.value, m.confidence.low) if m.confidence else "",
                scaled_as(m.value, m.confidence.high) if m.confidence else "",
                *(latency((m.percentiles or {}).get(name)) for name in ("p50", "p99", "p99.9")),
                f"{m.parameters.get('jobs')}x{m.parameters.get('queue_depth')}",
                format_rate(expectation.value) if expectation else "-",
                Cell(status.upper() if status else "not judged", mark=status),
            ]
        )
    titles = ("block", "rate", "from", "to", "p50", "p99", "p99.9", "depth", "expected", "verdict")
    numbers = (*titles[1:7], "expected")
    return Section(f"Random {direction}s", [Table(titles, rows, numbers=numbers, sortable=False)])


def _ladder(record: Record, shown: Ladder) -> Iterator[Block]:
    yield Notes([_INTRODUCTION], on="page")
    yield Plot(ladder_picture(shown.rungs, ceiling_of(record)))
    rungs = [rung for rung in shown.rungs if rung.skipped is None]
    titles = ("rung", "GB/s", "GiB/s", "keeps", "of", "at least", "evidence", "result")
    yield Table(
        titles,
        [_rung(record, rung) for rung in rungs],
        numbers=(*titles[1:4], "at least"),
        lost=frozenset(index for index, rung in enumerate(rungs) if rung.loses),
        sortable=False,
    )
    skipped: dict[str, list[str]] = {}
    for rung in shown.rungs:
        if rung.skipped is not None:
            skipped.setdefault(rung.skipped, []).append(rung.title)
    yield Notes([f"skipped: {'; '.join(known)}: {reason}" for reason, known in skipped.items()])
    yield Notes(list(_on_terminals(record, shown)), on="terminal")


def _rung(record: Record, rung: Rung) -> Cells:
    value = rung.value or 0.0
    return [
        rung.title,
        number(value / 1e9),
        number(value / 2**30),
        f"{rung.share:.0%}" if rung.share is not None else "-",
        rung.below or "-",
        f"{rung.least:.0%}" if rung.least is not None else "-",
        _proof([m for m in record.measurements if m.name == rung.name]),
        "LOSES" if rung.loses else "short?" if _falls_short(rung) else "",
    ]


def _falls_short(rung: Rung) -> bool:
    """Whether it keeps less than it should, lost or not."""
    return rung.share is not None and rung.least is not None and rung.share < rung.least


def _proof(measurements: Sequence[Measurement]) -> str:
    ratios = [m.evidence.worst_ratio or m.evidence.ratio for m in measurements if m.evidence and m.evidence.ratio]
    return f"{max(ratios, key=lambda ratio: abs(ratio - 1)):.4f}" if ratios else "none"


def _on_terminals(record: Record, shown: Ladder) -> Iterator[str]:
    """Each drive's speed and the first loss: a page has a table, and what limits above all."""
    drives = chosen(record.measurements, "bandwidth", subject="drive")
    if drives:
        speeds = (f"`{m.labels['drive']}` {number(m.value / 1e9)}" for m in drives)
        yield f"each drive alone, GB/s: {', '.join(speeds)}"
    if shown.loss is not None:
        yield f"first loss, {shown.loss.cause}: {shown.loss.found}"
        yield f"  remedy: {shown.loss.remedy}"
        return
    # A rung that falls short in the median alone is not certain to lose.
    short = [f"{rung.title} {rung.share:.0%} of {rung.least:.0%}" for rung in shown.rungs if _falls_short(rung)]
    if short:
        yield (
            f"not certain: {'; '.join(short)}: the median falls short, and a sample or more reaches it; measure again "
            "with a longer `--duration`, on a quiet machine"
        )
    else:
        yield "every rung keeps what is expected of it"


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


_WIDTH, _LEFT, _RIGHT, _TOP, _ROW, _BAR = 760, 200, 180, 44, 26, 16
_KEPT, _LOST, _CEILING = "#1f6feb", "#cf222e", "#8c6d1f"
_LONGEST = 30
"""Characters of a rung's title."""
_FAR = 2.0
"""A ceiling that is further above the fastest rung would make all bars short: it is written, not drawn."""


def ladder_picture(rungs: Sequence[Rung], ceiling: float | None) -> str:
    """The picture of the rungs in their order; values in bytes per second."""
    values = {rung.title: rung.value for rung in rungs if rung.value is not None}
    top = max(values.values(), default=0.0) or 1.0
    drawn_ceiling = ceiling if ceiling is not None and ceiling <= _FAR * top else None
    top = max(top, drawn_ceiling or 0.0)
    scale = (_WIDTH - _LEFT - _RIGHT) / top
    height = _TOP + len(rungs) * _ROW + 8
    bottom = height - 8
    parts = picture(_WIDTH, height, _words(rungs, ceiling))
    parts.append('<text x="4" y="16" font-size="14">GB/s, from the drives up</text>')
    if ceiling is not None:
        x = _LEFT + min(ceiling, top) * scale
        shown = f"ceiling of the links {number(ceiling / 1e9)}"
        if drawn_ceiling is not None:
            parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 8}" y2="{bottom}" stroke="{_CEILING}" '
                'stroke-width="1.5" stroke-dasharray="5 3"/>'
            )
        parts.append(f'<text x="{x:.1f}" y="{_TOP - 14}" text-anchor="middle">{shown}</text>')
    for index, rung in enumerate(rungs):
        parts += _row(rung, _TOP + index * _ROW, scale, values)
    return "\n".join([*parts, "</svg>"])


def _row(rung: Rung, y: float, scale: float, values: dict[str, float]) -> list[str]:
    base = y + _BAR - 3.5
    title = escape(shortened(rung.title, _LONGEST))
    if rung.value is None:
        return [
            f'<text class="quiet" x="{_LEFT - 8}" y="{base:.1f}" text-anchor="end">{title}</text>',
            f'<text class="quiet" x="{_LEFT + 6}" y="{base:.1f}">skipped</text>',
        ]
    style = ' class="lost"' if rung.loses else ""
    width = rung.value * scale
    parts = [
        f'<text{style} x="{_LEFT - 8}" y="{base:.1f}" text-anchor="end">{title}</text>',
        f'<rect x="{_LEFT}" y="{y:.1f}" width="{width:.1f}" height="{_BAR}" fill="{_LOST if rung.loses else _KEPT}"/>',
    ]
    end = width
    below = values.get(rung.below or "")
    if rung.least is not None and below is not None:
        # What this rung is expected to keep of the one below.
        mark = _LEFT + min(rung.least * below * scale, _WIDTH - _LEFT - _RIGHT)
        parts.append(
            f'<line class="whisker" x1="{mark:.1f}" x2="{mark:.1f}" y1="{y - 2:.1f}" y2="{y + _BAR + 2:.1f}" '
            'stroke="#1f2328" stroke-width="2"/>'
        )
        end = max(end, mark - _LEFT)
    parts.append(f'<text{style} x="{_LEFT + end + 6:.1f}" y="{base:.1f}">{escape(_said(rung))}</text>')
    return parts


def _said(rung: Rung) -> str:
    shown = number((rung.value or 0.0) / 1e9)
    if rung.share is None:
        return shown
    least = f", {rung.least:.0%} wanted" if rung.loses and rung.least is not None else ""
    return f"{shown}  keeps {rung.share:.0%}{least}"


def _words(rungs: Sequence[Rung], ceiling: float | None) -> str:
    """The picture for those who do not see it."""
    said = [f"{rung.title} {'skipped' if rung.value is None else _said(rung)}" for rung in rungs]
    lost = [rung.title for rung in rungs if rung.loses]
    head = f"ceiling {number(ceiling / 1e9)}; " if ceiling is not None else ""
    end = f"; loses: {', '.join(lost)}" if lost else "; no rung loses"
    return f"The ladder, GB/s: {head}{'; '.join(said)}{end}"
