"""What `bench drives` shows: bandwidth by number of drives, the published one, what binds, and advice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tunetool.bench.drives.figures import BANDWIDTH, EFFICIENCY
from tunetool.bench.drives.layouts import COMPARED
from tunetool.bench.drives.preflight import SUBJECT
from tunetool.node.units import format_count
from tunetool.record import CheckResult, Measurement, Record, chosen
from tunetool.view.curves import Line, legend_of, plot
from tunetool.view.figures import ceiling_of, has_reasons, what_limits
from tunetool.view.model import Block, Notes, Plot, Section, Table, View
from tunetool.view.text import interval_words, number

SOURCE = "DeepSpeed blog, `DeepNVMe: Affordable I/O scaling for Deep Learning Applications`"
NOTE = (
    "published, not measured here: transfers of 1 GB between HBM and a RAID0, one VM, by ds_io, whose GB/sec are "
    "probably 2^30 bytes: 48 would be 51.5 GB/s"
)


class Published(NamedTuple):
    """One row: GB/sec as it says."""

    drives: str
    number: int
    read: float
    write: float


ROWS: Sequence[Published] = (
    Published("4 x PCIe Gen4", 4, 10, 5),
    Published("4 x PCIe Gen5", 4, 27, 11),
    Published("8 x PCIe Gen5", 8, 48, 26),
)


_PUBLISHED = ("drives", "read, GB/sec", "write, GB/sec")
_WORDS = {
    "xfs_over_ext4": ("XFS", "ext4"),
    "raid0_over_per_drive": ("RAID0", "a file system on each drive"),
    "raid10_over_raid0": ("RAID10", "RAID0"),
    "raid1_over_raid0": ("RAID1", "RAID0"),
}
"""By the figure's name, what is compared with what."""
_SETTINGS = {
    "raid0_over_per_drive": " (`raid_array_groups: all` and `drive`)",
    "raid10_over_raid0": " (`raid_array_level: 10` and `0`)",
    "raid1_over_raid0": " (`raid_array_level: 1` and `0`)",
}
"""What chooses between them on a node."""
_EVEN = 1.1
"""Of an equal part of a mirror's reads, which md shares out: more on one drive holds up the others."""
_VIRTUAL = " for virtual drives, which are files of one disk and say nothing of others"


@dataclass
class Curve:
    """What one engine moved in one direction on one layout, by number of drives."""

    layout: str
    engine: str
    direction: str
    bandwidths: dict[int, Measurement] = field(default_factory=dict)
    others: dict[str, dict[int, Measurement]] = field(default_factory=dict)
    """Ratios by the last part of their names."""

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.layout}, {self.engine}"

    @property
    def best(self) -> Measurement:
        """Over the most drives."""
        return self.bandwidths[max(self.bandwidths)]

    @property
    def copies(self) -> int:
        """How many drives get each byte that is written, over the most of them; 1 of what is read."""
        return int(self.best.parameters.get("copies", 1)) if self.direction == "write" else 1

    @property
    def efficiency(self) -> Measurement | None:
        """Of the most drives; None where one drive was not measured, or nothing else."""
        return self.others.get(EFFICIENCY, {}).get(max(self.bandwidths))


def view(record: Record, _: Path | None = None) -> View:
    """What is shown: a section for each direction, the published figures, and what the comparisons say. A page without
    figures has the checks, which say why."""
    known = _curves(record)
    sections = [
        Section(f"{direction}s, GB/s", list(_blocks(direction, rows, _counts(known))))
        for direction in ("read", "write")
        if (rows := [curve for curve in known if curve.direction == direction])
    ]
    notes = Notes(list(_notes(record, known)))
    if known:
        published = Table(_PUBLISHED, [(row.drives, f"{row.read:g}", f"{row.write:g}") for row in ROWS], sortable=False)
        source = Notes([f"{NOTE}; {SOURCE}"])
        sections += [Section("how it was measured", [notes]), Section("published, HBM and RAID0", [published, source])]
    elif notes.lines:
        sections.append(Section("what was left out", [notes]))
    return View(
        f"Scaling by drives on {record.node.host}",
        sections=sections,
        advice=_advice(known),
        checks=not known and has_reasons(record),
    )


def _curves(record: Record) -> list[Curve]:
    """The curves of the record, by layout and engine."""
    known: dict[tuple[str, str, str], Curve] = {}
    for each in chosen(record.measurements, subject=SUBJECT):
        key = (each.labels["layout"], each.labels["io_engine"], each.labels["direction"])
        curve, drives = known.setdefault(key, Curve(*key)), int(each.labels["drives"])
        if each.figure == BANDWIDTH:
            curve.bandwidths[drives] = each
        else:
            curve.others.setdefault(each.figure, {})[drives] = each
    ordered = sorted(known.values(), key=lambda each: (each.direction, each.layout, each.engine))
    return [curve for curve in ordered if curve.bandwidths]


def _counts(known: Sequence[Curve]) -> list[int]:
    """All numbers of drives."""
    return sorted({count for curve in known for count in curve.bandwidths})


def _blocks(direction: str, rows: Sequence[Curve], counts: Sequence[int]) -> Iterator[Block]:
    lines = [
        Line(curve.title, [(float(count), curve.bandwidths[count].value) for count in sorted(curve.bandwidths)])
        for curve in rows
    ]
    drawn = plot(f"{direction}s by number of drives", "B/s", lines, float(max(counts)), "drives", max(counts))
    yield Plot(drawn, legend_of([line.name for line in lines]))
    titles = ("layout, engine", *(format_count(count, "drive") for count in counts), "of N times one")
    for shown, folded in ((_speed, ""), (_speed_and_interval, "With intervals")):
        cells = [
            (curve.title, *(shown(curve.bandwidths.get(count)) for count in counts), _share(curve)) for curve in rows
        ]
        yield Table(titles, cells, folded=folded)


def _speed(figure: Measurement | None) -> str:
    return "-" if figure is None else number(figure.value / 1e9)


def _speed_and_interval(figure: Measurement | None) -> str:
    interval = "-" if figure is None else interval_words(figure)
    return _speed(figure) + ("" if interval == "-" else f" ({interval})")


def _share(curve: Curve) -> str:
    share = curve.efficiency
    return "-" if share is None else f"{share.value:.0%}{'' if share.parameters['decided'] else ' ?'}"


def _notes(record: Record, known: Sequence[Curve]) -> Iterator[str]:
    """How it was measured, its proof, what binds, what was left out."""
    if known:
        parameters = known[0].best.parameters
        yield (
            f"medians of {format_count(len(known[0].best.samples or []), 'round')} of "
            f"{parameters['sample_seconds']:g} s, a write's until it was synced; `of N times one`: the share of what "
            "so many drives alone would give, in pairs of a round; `?`: these rounds do not decide if it is 100 %"
        )
        media = dict.fromkeys(curve.best.medium for curve in known)
        yield "; ".join(media)
        plain = [each for curve in known for each in curve.bandwidths.values() if "copies" not in each.parameters]
        if counted := _ratios(plain):
            yield f"evidence: block, each drive's own counters: {min(counted):.4f} to {max(counted):.4f} of the bytes"
        yield from _of_mirrors(known)
    yield from _binds(record, known)
    for check in record.checks:
        if check.status == "skip" and "layout" in check.labels:
            yield _left_out(check)


def _of_mirrors(known: Sequence[Curve]) -> Iterator[str]:
    """The evidence of mirrors: each byte once on the array, and its copies on the drives."""
    for curve in known:
        bandwidths = [each for each in curve.bandwidths.values() if "copies" in each.parameters]
        drives = [float(each.parameters["drive_bytes_ratio"]) for each in bandwidths]
        if counted := _ratios(bandwidths):
            limit = f": at most {1 / curve.copies:.0%} of N times one" if curve.copies > 1 else ""
            yield (
                f"{curve.title}, {curve.direction}: its array counted {min(counted):.4f} to {max(counted):.4f} of the "
                f"bytes, its drives {min(drives):.4f} to {max(drives):.4f}, {curve.copies} due{limit}"
            )


def _ratios(figures: Sequence[Measurement]) -> list[float]:
    """Counted bytes for each claimed one."""
    return [each.evidence.ratio for each in figures if each.evidence and each.evidence.ratio is not None]


def _left_out(check: CheckResult) -> str:
    remedy = f"; {check.remedy}" if check.remedy else ""
    return f"{check.labels['layout']}: left out, {check.found}{remedy}"


def _binds(record: Record, known: Sequence[Curve]) -> Iterator[str]:
    """For each curve what limits it over the most drives, where the record shows that."""
    ceiling = ceiling_of(record)
    whole = max(_counts(known), default=0)
    for curve in known:
        # The ceiling is that of all drives.
        carried = ceiling / curve.copies if ceiling is not None and max(curve.bandwidths) == whole else None
        limit = what_limits(curve.best, carried)
        if limit is not None:
            yield f"{curve.title}, {curve.direction}: what binds is {limit}"
        elif (share := curve.efficiency) is not None and share.parameters["decided"] and _below(share, curve.copies):
            left = f" of {max(curve.bandwidths) / curve.copies:g} that the copies leave" if curve.copies > 1 else ""
            yield (
                f"{curve.title}, {curve.direction}: {max(curve.bandwidths)} drives give "
                f"{share.value * max(curve.bandwidths):.2f} times one{left}: {_why_less(curve)}"
            )


def _why_less(curve: Curve) -> str:
    """Why drives give less than they would alone, where no link and no program binds them."""
    parameters = curve.best.parameters
    most = float(parameters.get("most_drive_share", 1.0))
    if curve.direction == "read" and "copies" in parameters and most > _EVEN:
        # The others wait for it.
        return f"md read one of them up to {most:.2f} times as much as its part"
    return "they share something (a link, cores, one disk below them)"


def _below(share: Measurement, copies: int) -> bool:
    """Whether a share, which is decidedly not 1, is also below what the copies of each byte leave of it."""
    highest = share.confidence.high if share.confidence and copies > 1 else share.value
    return highest < 1 / copies


def _advice(known: Sequence[Curve]) -> list[str]:
    """A sentence for each comparison. Empty where nothing was compared."""
    parts = [text for name in COMPARED for text in [_of_comparison(name, known)] if text]
    if not parts:
        return []
    of_virtual = known[0].best.parameters["mode"] == "virtual"
    return [f"advice{_VIRTUAL if of_virtual else ''}: {'. '.join(parts)}."]


def _of_comparison(name: str, known: Sequence[Curve]) -> str | None:
    """In each direction by the fastest engine, over the most drives."""
    ours, theirs = _WORDS[name]
    texts, decided = [], []
    for direction in ("read", "write"):
        compared = [curve for curve in known if curve.direction == direction and name in curve.others]
        if not compared:
            continue
        most = max(max(curve.others[name]) for curve in compared)
        wide = [curve for curve in compared if most in curve.others[name]]
        best = max(wide, key=lambda curve: curve.bandwidths[most].value)
        figure = best.others[name][most]
        spread = figure.confidence
        interval = f" [{_change(spread.low)} to {_change(spread.high)}]" if spread else ""
        verdict = "decided" if figure.parameters["decided"] else "not decided"
        decided.append(figure if figure.parameters["decided"] else None)
        texts.append(
            f"{direction}s {_change(figure.value)}{interval} over {format_count(most, 'drive')} "
            f"({best.layout}, {best.engine}): {verdict}"
        )
    if not texts:
        return None
    which = f"{ours} and {theirs}{_SETTINGS.get(name, '')}"
    return f"{which} differ by {'; '.join(texts)}{_choice(ours, theirs, decided)}"


def _choice(ours: str, theirs: str, decided: Sequence[Measurement | None]) -> str:
    values = {figure.value > 1 for figure in decided if figure is not None}
    if not values:
        return ", so choose by other reasons"
    if len(values) > 1:
        return ", which speaks for each in one direction"
    return f", so {ours if True in values else theirs} is the faster" + (" where that is decided" * (None in decided))


def _change(ratio: float) -> str:
    return f"{(ratio - 1) * 100:+.1f} %"
