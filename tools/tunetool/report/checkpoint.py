"""The result of `bench checkpoint` for people: a table for each medium, and which engine to use and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tunetool.node.units import format_bandwidth, format_size
from tunetool.record import CheckResult, Measurement, Record, chosen
from tunetool.report.page import add_number_columns, line_of, new_table, print_block
from tunetool.report.table import print_verdict_line
from tunetool.view.engines import EngineFigures, counted_by_drives, without_figures
from tunetool.view.text import interval_of, number

FIO = "fio"
_NEAR = 0.95
"""From this share of fio's bandwidth on, the medium is the bottleneck."""
_ONE_CORE = (0.85, 1.25)
"""Busy cores per rank that count as one busy thread, with what other threads add."""


@dataclass(frozen=True)
class Engine(EngineFigures):
    """An engine of checkpoints."""

    family: str = ""


@dataclass
class Medium:
    """Everything that was measured on one medium."""

    name: str
    memory: bool
    engines: list[Engine] = field(default_factory=list)
    left_out: list[CheckResult] = field(default_factory=list)
    fio: dict[str, Measurement] = field(default_factory=dict)
    baseline: Measurement | None = None

    @property
    def measured(self) -> list[Engine]:
        """Engines with a durable save, the fastest first."""
        engines = [engine for engine in self.engines if engine.value("durable")]
        return sorted(engines, key=lambda engine: -(engine.value("durable") or 0.0))

    @property
    def trained(self) -> list[Engine]:
        """Engines that were measured in a training loop, the least lost time first."""
        engines = [engine for engine in self.engines if engine.value("lost_time") is not None]
        return sorted(engines, key=lambda engine: engine.value("lost_time") or 0.0)


def media(record: Record) -> list[Medium]:
    """Group the record's figures by medium and engine; drives come before memory."""
    result = []
    for memory in (False, True):
        measurements = [
            each for each in chosen(record.measurements, subject="checkpoint") if _in_memory(each.labels) == memory
        ]
        checks = {
            check.labels["engine"]: check
            for check in record.checks
            if "engine" in check.labels and _in_memory(check.labels) == memory
        }
        if not measurements and not checks:
            continue
        medium = Medium(measurements[0].medium if measurements else "memory" if memory else "drives", memory)
        by_engine: dict[str, dict[str, Measurement]] = {}
        for each in measurements:
            engine = each.labels.get("engine")
            if engine is None:
                medium.baseline = each
            elif engine == FIO:
                medium.fio[each.labels["direction"]] = each
            else:
                by_engine.setdefault(engine, {})[each.figure] = each
        for name, figures in by_engine.items():
            family = str(next(iter(figures.values())).parameters.get("family", ""))
            medium.engines.append(Engine(name, figures, checks.get(name), family))
        medium.left_out = [check for name, check in checks.items() if name not in by_engine]
        result.append(medium)
    return result


def _in_memory(labels: Mapping[str, str]) -> bool:
    return labels.get("place") == "memory"


def print_checkpoint(record: Record, path: Path | None, console: Console) -> None:
    """Print a table for each medium with its notes and advice, then the verdict. ``path``: where the record is."""
    console.print(line_of(f"{record.node.host}: `{record.target}`"))
    for line in _conditions(record):
        print_block(console, line, 2)
    for medium in media(record):
        for line in _head(medium):
            print_block(console, line, 2)
        if medium.measured:
            console.print(_table(medium))
        if medium.trained:
            console.print(_training(medium))
        for line in [*_footnotes(medium), *advice(medium)]:
            print_block(console, line, 2)
    print_verdict_line(record, path, console)


def _conditions(record: Record) -> Iterator[str]:
    if record.measurements:
        parameters = record.measurements[0].parameters
        device = f"{parameters['gpu']}" if "gpu" in parameters else str(parameters.get("device", ""))
        yield (
            f"{parameters['state']}; {parameters['ranks']} rank(s) on {device}, torch {parameters['torch']}; up to "
            f"{parameters['rounds']} rounds, each with the engines in a new random order"
        )


def _head(medium: Medium) -> Iterator[str]:
    if medium.memory:
        yield f"{medium.name}: memory, a stand-in for a medium of that speed; its content is lost with the node"
    else:
        yield f"{medium.name}:"


def _table(medium: Medium) -> Table:
    table = new_table()
    table.add_column(f"on {medium.name}" if medium.memory else "engine", overflow="fold")
    add_number_columns(table, "stall s", "durable s", "GB/s", "restore", "CPU s", "memory")
    table.add_column("equal")
    table.add_column("x torch.save", justify="right")
    if "write" in medium.fio:
        table.add_row(*_fio_cells(medium))
    for engine in medium.measured:
        table.add_row(*_cells(engine))
    return table


def _cells(engine: Engine) -> list[Text]:
    ratio = engine.figures.get("versus_torch_save")
    peak = engine.value("peak_memory")
    return [
        Text(engine.name),
        Text(_seconds(engine.value("stall"))),
        Text(_seconds(engine.value("durable_time"))),
        Text(_rate(engine.value("durable"))),
        Text(_rate(engine.value("restore"))),
        Text(_seconds(engine.value("cpu"))),
        Text(format_size(peak) if peak is not None else "-"),
        Text("yes" if engine.is_equal else "NO", style="" if engine.is_equal else "bold red"),
        Text(_times(ratio)),
    ]


def _fio_cells(medium: Medium) -> list[Text]:
    write, read = medium.fio["write"], medium.fio.get("read")
    seconds = float(write.parameters["state_bytes"]) / write.value
    cells = ["best of fio", "", _seconds(seconds), _rate(write.value), _rate(read.value if read else None), "", "", ""]
    return [Text(each) for each in [*cells, ""]]


def _training(medium: Medium) -> Table:
    table = new_table()
    table.add_column("training" + (f" on {medium.name}" if medium.memory else ""), overflow="fold")
    add_number_columns(table, "every", "lost per checkpoint", "from", "to", "loop held")
    for engine in medium.trained:
        lost, held = engine.figures["lost_time"], engine.figures.get("held")
        parameters, interval = lost.parameters, interval_of(lost)
        every = parameters["every"]
        cells = [engine.name, f"{every} steps", f"{lost.value:.3f} s"]
        cells += [f"{interval.low:.3f} s", f"{interval.high:.3f} s"] if interval else ["", ""]
        table.add_row(*map(Text, [*cells, f"{held.value:.3f} s" if held else ""]))
    return table


def _footnotes(medium: Medium) -> Iterator[str]:
    first = next((engine.figures["durable"] for engine in medium.measured), None)
    rounds = len(first.samples or []) if first else 0
    if rounds == 1:
        yield "one round gives no interval, so no comparison is decided" + (
            "" if medium.memory else "; restores are from a cold cache"
        )
    if rounds > 1 and first is not None and first.confidence is not None:
        yield (
            f"medians of {rounds} rounds; x torch.save: median over pairs of one round, `~` where "
            f"its interval ({first.confidence.level:.1%}) contains 1 and the comparison is undecided"
            + ("" if medium.memory else "; restores are from a cold cache")
        )
    for engine in medium.engines:
        apart = engine.figures.get("first_stall")
        if apart is not None:
            yield f"{engine.name}: its first save, not in the figures, stalled the loop for {_seconds(apart.value)} s"
    yield from _sizes(medium)
    if medium.fio:
        jobs = ", ".join(
            f"{direction} by {figure.parameters['files']} files" for direction, figure in medium.fio.items()
        )
        direct = next(iter(medium.fio.values())).parameters["direct"]
        yield f"best of fio: {jobs}, each searched over 1 to 16; direct={int(bool(direct))}, end_fsync=1"
    if not medium.memory:
        yield from counted_by_drives(medium.measured, "durable", "written")
        yield from counted_by_drives(medium.measured, "restore", "read")
    yield from without_figures(medium.engines, medium.left_out)


def _sizes(medium: Medium) -> Iterator[str]:
    """Lines on the sizes of checkpoints, where an engine compresses."""
    sizes = [(engine.name, size) for engine in medium.measured if (size := engine.figures.get("size"))]
    packed = [(name, size) for name, size in sizes if size.parameters.get("compression") != "none"]
    plain = [size.value for _, size in sizes if size.parameters.get("compression") == "none"]
    for name, size in packed:
        others = f"; without compression {min(plain):.3f} to {max(plain):.3f}" if plain else ""
        yield (
            f"{name}: its files hold {format_size(int(size.parameters['file_bytes']))}, {size.value:.3f} of the state, "
            f"by {size.parameters['compression']}{others}; the state is random, trained weights may give another share"
        )


def advice(medium: Medium) -> list[str]:
    """Sentences: the engine to use on this medium and its bottleneck, and the engine that stalls the loop least.

    Empty where fewer than two engines restored equal states.
    """
    good = [engine for engine in medium.measured if engine.is_equal]
    if len(good) < 2:
        return []
    best = good[0]
    where = f"on {medium.name}" + (" (memory, a stand-in)" if medium.memory else "")
    compared = best.figures.get("versus_best_other")
    rate = f"{format_bandwidth(best.value('durable') or 0.0)} durable"
    if compared is not None and compared.parameters["decided"]:
        clauses = [f"use `{best.name}` {where}: {rate}"]
    else:
        second = good[1].name if compared is None else compared.parameters["against"]
        clauses = [f"`{best.name}` or `{second}` {where}, these rounds do not decide which is faster: {rate}"]
    for figure, words in (("versus_torch_save", "torch.save"), ("versus_best_other", "the best other")):
        ratio = best.figures.get(figure)
        if ratio is not None:
            against = f", `{ratio.parameters['against']}`" if figure == "versus_best_other" else ""
            clauses.append(_ratio_text(ratio, words + against))
    lines = [", ".join(clauses) + f"; {binds(best)}"]
    for engine in good[1:]:
        ratio = engine.figures.get("versus_best_other")
        if ratio is not None and engine.family == "direct" and not best.family.startswith("direct"):
            lines.append(f"`{engine.name}`: {_ratio_text(ratio, 'the best other')}; {binds(engine)}")
    quiet = min(good, key=lambda engine: engine.value("stall") or 0.0)
    if quiet is best or (quiet.value("stall") or 0.0) > 0.8 * (best.value("stall") or 0.0):
        return lines
    return [*lines, f"shortest stall: `{quiet.name}`, {_seconds(quiet.value('stall'))} s for each save"]


def binds(engine: Engine) -> str:
    """The bottleneck of an engine, as far as its figures show it."""
    share = engine.figures.get("of_fio_write")
    if share is not None and share.value >= _NEAR:
        return f"the medium is the bottleneck: this is {share.value:.0%} of the best of fio"
    spent, seconds = engine.value("cpu"), engine.value("durable_time")
    cores = spent / seconds if spent is not None and seconds else 0.0
    reached = f"{share.value:.0%} of the best of fio, and " if share is not None else ""
    ranks = float(engine.figures["durable"].parameters["ranks"])
    if _ONE_CORE[0] <= cores / ranks <= _ONE_CORE[1]:
        return f"{reached}one core of each rank is busy all the time: that is the bottleneck"
    return f"{reached}{cores:.1f} cores are busy"


def _ratio_text(ratio: Measurement, against: str) -> str:
    interval = interval_of(ratio)
    spread = f"{interval.low:.2f} to {interval.high:.2f}" if interval else "one round has no interval"
    undecided = "" if ratio.parameters["decided"] else ", not decided"
    return f"{ratio.value:.2f} times the speed of {against} ({spread}{undecided})"


def _times(ratio: Measurement | None) -> str:
    if ratio is None:
        return "-"
    return f"{ratio.value:.2f}" if ratio.parameters["decided"] else f"~{ratio.value:.2f}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def _rate(value: float | None) -> str:
    return "-" if value is None else number(value / 1e9)


__all__ = ["Engine", "Medium", "advice", "binds", "media", "print_checkpoint"]
