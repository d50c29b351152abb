"""What `bench checkpoint` shows: a table and bars for each medium and its training, and which engine to use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tunetool.bench.checkpoint.engines import DIRECT, ENGINES
from tunetool.bench.checkpoint.figures import FIO
from tunetool.node.units import format_bandwidth, format_size
from tunetool.record import CheckResult, Measurement, Record, chosen
from tunetool.view.engines import EngineFigures, counted_by_drives, equality, without_figures
from tunetool.view.model import Block, Cell, Cells, Notes, Plot, Section, Table, View
from tunetool.view.plots import Bar, bar_of, bars
from tunetool.view.text import interval_of, number, shown

_TITLES = (
    *("engine", "stall, s", "durable, s", "durable, GB/s", "restore, GB/s", "CPU, s", "memory", "equal"),
    "x torch.save",
)
_TRAINING = ("engine", "every, steps", "lost per checkpoint, s", "from, s", "to, s", "loop held, s")
_DIRECT, _OTHER, _FIO = "#1f6feb", "#8c959f", "#2da44e"
_NEAR = 0.95
"""From this share of fio's bandwidth on, the medium is the bottleneck."""
_ONE_CORE = (0.85, 1.25)
"""Busy cores per rank that count as one busy thread, with what other threads add."""


class Engine(EngineFigures):
    """An engine of checkpoints."""

    @property
    def own(self) -> bool:
        """Whether it is tunetool's; a record may name engines that are no longer known."""
        return self.name in ENGINES and ENGINES[self.name].own


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


def _media(record: Record) -> list[Medium]:
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
            medium.engines.append(Engine(name, figures, checks.get(name)))
        medium.left_out = [check for name, check in checks.items() if name not in by_engine]
        result.append(medium)
    return result


def _in_memory(labels: Mapping[str, str]) -> bool:
    return labels.get("place") == "memory"


def view(record: Record, _: Path | None = None) -> View:
    """What is shown: a section for each medium, one for its training loop, and which engine to use."""
    known = _media(record)
    return View(
        f"Checkpoints on {record.node.host}",
        head=list(_conditions(record)),
        sections=[section for medium in known for section in _sections(medium)],
        advice=[line for medium in known for line in _advice(medium)],
    )


def _conditions(record: Record) -> Iterator[str]:
    if record.measurements:
        parameters = record.measurements[0].parameters
        device = parameters.get("gpu") or parameters.get("device", "")
        yield (
            f"{parameters['state']}; {parameters['ranks']} rank(s) on {device}, torch {parameters['torch']}; up to "
            f"{parameters['rounds']} rounds, each with the engines in a new random order"
        )


def _sections(medium: Medium) -> Iterator[Section]:
    yield Section(f"engines on {medium.name}", list(_of_engines(medium)))
    if medium.trained:
        lost = list(_bars(medium.trained, "lost_time"))
        plot = Plot(bars(f"{medium.name}: time lost per checkpoint in training, s", lost))
        table = Table(_TRAINING, [_of_training(engine) for engine in medium.trained])
        yield Section(f"training on {medium.name}", [plot, table])


def _of_engines(medium: Medium) -> Iterator[Block]:
    if medium.memory:
        words = "memory, a stand-in for a medium of that speed; its content is lost with the node"
        yield Notes([f"{medium.name}: {words}"])
    if medium.measured:
        yield Plot(bars(f"{medium.name}: durable, GB/s", list(_rates(medium, "durable", "write"))))
        yield Plot(bars(f"{medium.name}: restored from a cold cache, GB/s", list(_rates(medium, "restore", "read"))))
        yield Plot(bars(f"{medium.name}: stall of the training loop, s", list(_bars(medium.measured, "stall"))))
        best_of_fio = [_of_fio(medium)] if "write" in medium.fio else []
        rows = [*best_of_fio, *(_of_engine(engine) for engine in medium.measured)]
        yield Table(_TITLES, rows, numbers=(*_TITLES[1:-2], _TITLES[-1]))
    yield Notes(list(_footnotes(medium)))


def _rates(medium: Medium, figure: str, direction: str) -> Iterator[Bar]:
    if direction in medium.fio:
        yield bar_of("best of fio", medium.fio[direction], _FIO, 1e9)
    yield from _bars(medium.measured, figure, 1e9)


def _bars(engines: Iterable[Engine], figure: str, unit: float = 1.0) -> Iterator[Bar]:
    for each in engines:
        if figure in each.figures:
            colour = _DIRECT if each.own else _OTHER
            yield bar_of(each.name, each.figures[figure], colour, unit)


def _of_engine(engine: Engine) -> Cells:
    ratio = engine.figures.get("versus_torch_save")
    peak = engine.value("peak_memory")
    doubt = "~" if ratio is not None and not ratio.parameters["decided"] else ""
    return [
        engine.name,
        *(engine.shown(figure) for figure in ("stall", "durable_time")),
        *(engine.shown(figure, 1e9) for figure in ("durable", "restore")),
        engine.shown("cpu"),
        "-" if peak is None else Cell(format_size(peak), number=peak),
        equality(engine),
        "-" if ratio is None else f"{doubt}{ratio.value:.2f}",
    ]


def _of_fio(medium: Medium) -> Cells:
    write, read = medium.fio["write"], medium.fio.get("read")
    seconds = float(write.parameters["state_bytes"]) / write.value
    rates = (shown(figure.value if figure else None, 1e9) for figure in (write, read))
    return ["best of fio", "", number(seconds), *rates, "", "", "", ""]


def _of_training(engine: Engine) -> Cells:
    lost, held = engine.figures["lost_time"], engine.figures.get("held")
    interval = interval_of(lost)
    edges = (interval.low, interval.high) if interval else (None, None)
    times = (lost.value, *edges, held.value if held else None)
    return [engine.name, str(lost.parameters["every"]), *map(shown, times)]


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
            yield f"{engine.name}: its first save, not in the figures, stalled the loop for {number(apart.value)} s"
    yield from _sizes(medium)
    if medium.fio:
        jobs = ", ".join(
            f"{direction} by {figure.parameters['files']} files" for direction, figure in medium.fio.items()
        )
        direct = next(iter(medium.fio.values())).parameters["direct"]
        into = ", into memory as large as the state" if medium.memory and "read" in medium.fio else ""
        yield f"best of fio: {jobs}{into}, each searched over 1 to 16; direct={int(bool(direct))}, end_fsync=1"
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


def _advice(medium: Medium) -> list[str]:
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
    lines = [", ".join(clauses) + f"; {_binds(best)}"]
    for engine in good[1:]:
        ratio = engine.figures.get("versus_best_other")
        if ratio is not None and engine.name == DIRECT and not best.own:
            lines.append(f"`{engine.name}`: {_ratio_text(ratio, 'the best other')}; {_binds(engine)}")
    quiet = min(good, key=lambda engine: engine.value("stall") or 0.0)
    if quiet is best or (quiet.value("stall") or 0.0) > 0.8 * (best.value("stall") or 0.0):
        return lines
    return [*lines, f"shortest stall: `{quiet.name}`, {quiet.shown('stall')} s for each save"]


def _binds(engine: Engine) -> str:
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
