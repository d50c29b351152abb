"""What `stage` shows: what was moved, each part of the work beside the others, and what binds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from tunetool.node.units import format_bandwidth, format_size
from tunetool.record import CheckResult, Measurement, Record
from tunetool.view.model import Block, Notes, Plot, Section, Table, View
from tunetool.view.plots import Bar, bar_of, bars
from tunetool.view.text import number

_BINDS = {
    "cpu": "the CPUs were busy, with this or with other work",
    "source": "reading the source took most of the time",
    "destination": "writing took most of the time",
}
"""What each bottleneck of a copy means."""
_WHOLE, _PART, _BINDING = "#1f6feb", "#8c959f", "#d55e00"
_PARTS = (
    ("source", "source, reading", "reading_seconds"),
    ("checksums", "checksums", "checksum_seconds"),
    ("destination", "destination, writing", "writing_seconds"),
)
"""A part of the work, its name for people, and the parameter with its seconds over all threads."""
_ALONE = (
    "alone: the measured speed divided by the part's share of the threads' time; computed, not measured; what comes "
    "after the last byte (sync, rename) is in the time of the copy alone",
    "one run has no interval: run it again, and compare",
)
_HASHED = "every file was hashed while it was read; `tunetool stage verify` reads the copy again and compares"


def view(record: Record, directory: Path | None = None) -> View:
    """What is shown. ``measurements`` holds the copy or its verification; a removal has none."""
    figures = record.measurements
    checks = [line for check in record.checks for line in _check(check)]
    return View(
        f"Staging on {record.node.host}",
        head=[line for figure in figures for line in _head(figure)],
        sections=[
            *(Section("Speeds", list(_blocks(figure))) for figure in figures),
            Section("Checks", [Notes(checks)], on="terminal"),
        ],
        advice=[f"binds: {_binds(figure)}" for figure in figures],
        checks=True,
    )


def _head(figure: Measurement) -> Iterator[str]:
    given = figure.parameters
    size, files = float(given["bytes"]), int(given["files"])
    # A record of an earlier version says nothing of holes.
    holes = int(given.get("hole_bytes", 0))
    kept = f", of which {format_size(holes)} stay holes" if holes else ""
    transfer = f"from `{given['source']}` ({given['source_medium']}) to {figure.medium}" if _copied(figure) else "read"
    yield (
        f"{format_size(size)} ({int(size):,} bytes) in {files:,} files{kept}, {float(given['seconds']):.2f} s: "
        f"{format_bandwidth(figure.value)}; {transfer}"
    )
    yield (
        f"{given['threads']} threads, {given['checksum']}; {format_size(float(given['direct_bytes']))} read past the "
        f"page cache; CPU {float(given['cpu_seconds']):.2f} s on {given['cpus']}, which were busy for "
        f"{float(given['cpu_busy']):.0%}"
    )


def _copied(figure: Measurement) -> bool:
    """Whether something was written, not only read again."""
    return "source" in figure.parameters


def _far(figure: Measurement) -> bool:
    """Whether rclone copied: the threads then only read what was there already."""
    return figure.parameters.get("source_medium") == "remote"


def _binds(figure: Measurement) -> str:
    binds = str(figure.parameters["binds"])
    # A record of another version may name what this one does not know.
    meaning = "rclone fetched it" if _far(figure) else _BINDS.get(binds)
    return f"{binds} ({meaning})" if meaning else binds


def _blocks(figure: Measurement) -> Iterator[Block]:
    shares = _shares(figure)
    yield Plot(_bars(figure, shares))
    rows = [
        [name, number(float(figure.parameters[key])), f"{shares[part]:.0%}", number(figure.value / 1e9 / shares[part])]
        for part, name, key in _PARTS
        if part in shares
    ]
    yield Table(("part", "s over all threads", "share", "alone, GB/s"), rows, sortable=False)
    yield Notes([*(_ALONE if rows else ()), *([_HASHED] if _copied(figure) else ())])


def _shares(figure: Measurement) -> Mapping[str, float]:
    """By part, its share of the threads' time; empty where the threads did not copy."""
    seconds = {part: float(figure.parameters.get(key, 0.0)) for part, _, key in _PARTS}
    whole = sum(seconds.values())
    return {} if _far(figure) or not whole else {part: each / whole for part, each in seconds.items() if each}


def _bars(figure: Measurement, shares: Mapping[str, float]) -> str:
    """The figure, and what each part would reach if nothing else took time."""
    whole = bar_of("the copy" if _copied(figure) else "reading and checksums", figure, _WHOLE, 1e9)
    drawn = [whole]
    for part, name, _ in _PARTS:
        # Checksums are so fast that their bar would hide the others; the table has them.
        if part in shares and part != "checksums":
            speed, binds = whole.value / shares[part], part == figure.parameters["binds"]
            shown = f"{name}: binds" if binds else name
            drawn.append(Bar(shown, speed, speed, speed, _BINDING if binds else _PART))
    return bars("GB/s: as it went, and each part if the others took no time", drawn)


def _check(check: CheckResult) -> Iterator[str]:
    yield f"{check.status.upper():8}{check.id}: {check.found}; {check.expected}"
    if check.remedy:
        yield f"        remedy: {check.remedy}"
