"""The record of `stage` as an HTML page: the copy, its source and its destination side by side, and what binds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tunetool.node.common.files import replace_file
from tunetool.node.units import format_size
from tunetool.record import Measurement, Record
from tunetool.report.html import checks, render
from tunetool.report.stage import BINDS
from tunetool.view.plots import Bar, bar_of, bars
from tunetool.view.text import number

_WHOLE, _PART, _BINDING = "#1f6feb", "#8c959f", "#d55e00"
_PARTS = (
    ("source", "source, reading", "reading_seconds"),
    ("checksums", "checksums", "checksum_seconds"),
    ("destination", "destination, writing", "writing_seconds"),
)
"""A part of the work, its name for people, and the parameter with its seconds over all threads."""


def write_page(record: Record, path: Path) -> Path | None:
    """Write the page to ``path`` by rename."""
    replace_file(str(path), page(record))
    return path


def page(record: Record) -> str:
    """The text of the page."""
    figure = record.measurements[0] if record.measurements else None
    return render(
        "stage.html.j2",
        record=record,
        limits=list(_limits(figure)) if figure is not None else [],
        copied=figure is not None and "source" in figure.parameters,
        plot=_plot(figure) if figure is not None else "",
        parts=list(_parts(figure)) if figure is not None else [],
        facts=list(_facts(figure, record.target)) if figure is not None else [],
        **checks(record),
    )


def _limits(figure: Measurement) -> Iterator[str]:
    binds = str(figure.parameters["binds"])
    yield f"{binds}: {'rclone fetched it' if _far(figure) else BINDS.get(binds, binds)}"


def _far(figure: Measurement) -> bool:
    """Whether rclone copied: the threads then only read what was there already."""
    return figure.parameters.get("source_medium") == "remote"


def _shares(figure: Measurement) -> Mapping[str, float]:
    """By part, its share of the threads' time; empty where the threads did not copy."""
    seconds = {part: float(figure.parameters.get(key, 0.0)) for part, _, key in _PARTS}
    whole = sum(seconds.values())
    return {} if _far(figure) or not whole else {part: each / whole for part, each in seconds.items() if each}


def _plot(figure: Measurement) -> str:
    """The figure, and what each part would reach if nothing else took time."""
    whole = bar_of("the copy" if "source" in figure.parameters else "reading and checksums", figure, _WHOLE, 1e9)
    drawn, shares = [whole], _shares(figure)
    for part, name, _ in _PARTS:
        # Checksums are so fast that their bar would hide the others; the table has them.
        if part in shares and part != "checksums":
            speed = whole.value / shares[part]
            binds = part == figure.parameters["binds"]
            colour = _BINDING if binds else _PART
            drawn.append(Bar(f"{name}: binds" if binds else name, speed, speed, speed, colour))
    return bars("GB/s: as it went, and each part if the others took no time", drawn)


def _parts(figure: Measurement) -> Iterator[Mapping[str, Any]]:
    shares = _shares(figure)
    for part, name, key in _PARTS:
        if part in shares:
            yield {
                "name": name,
                "seconds": number(float(figure.parameters[key])),
                "share": f"{shares[part]:.0%}",
                "speed": number(figure.value / 1e9 / shares[part]),
            }


def _facts(figure: Measurement, target: str | None) -> Iterator[tuple[str, str]]:
    """Names and values."""
    parameters = figure.parameters
    if "source" in parameters:
        yield "source", f"{parameters['source']} ({parameters['source_medium']})"
    yield "destination", f"{target} ({figure.medium})"
    yield "bytes", f"{format_size(float(parameters['bytes']))} ({int(float(parameters['bytes'])):,} bytes)"
    yield "files", f"{int(float(parameters['files'])):,}"
    yield "time", f"{number(float(parameters['seconds']))} s"
    yield "read past the page cache", format_size(float(parameters["direct_bytes"]))
    yield "checksums", str(parameters["checksum"])
    yield "threads", str(parameters["threads"])
    busy = f"{float(parameters['cpu_busy']):.0%} busy, with this or with other work"
    yield "CPUs", f"{parameters['cpus']}, {busy}; {number(float(parameters['cpu_seconds']))} s of this process"
