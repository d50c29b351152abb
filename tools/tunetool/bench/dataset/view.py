"""What `bench dataset` shows: a table and bars for each state of the page cache, and a sentence of advice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tunetool.bench.dataset.engines import DALI, HUGE_POOL, TF_DATA, is_of_images
from tunetool.bench.dataset.figures import FETCHED, RATE, READ, VERSUS
from tunetool.bench.dataset.samples import TITLES, State, title_of
from tunetool.bench.dataset.token_child import MOST_AHEAD
from tunetool.node.units import format_count, format_size
from tunetool.record import CheckResult, Record, chosen
from tunetool.verdict import tester_limit
from tunetool.view.engines import EngineFigures, counted_by_drives, engine_checks, equality, without_figures
from tunetool.view.model import Block, Cells, Notes, Plot, Section, Table, View
from tunetool.view.plots import bar_of, bars
from tunetool.view.text import number

_TITLES = ("engine", "GB/s", "samples/s", "range", "fetched", "times", "equal")
_PLAIN, _SPECIAL = "#8c959f", "#1f6feb"
_PLOTS = (("tokens", READ, "GB/s", 1e9), ("images", RATE, "images/s", 1.0))


@dataclass
class StateSection:
    """All that was measured in one state."""

    state: State
    measured: list[EngineFigures] = field(default_factory=list)
    """Engines with figures, in the order of the record."""
    left_out: list[CheckResult] = field(default_factory=list)

    @property
    def title(self) -> str:
        """For people."""
        mediums = [each.medium for engine in self.measured for each in engine.figures.values()]
        return f"{self.state}: {title_of(self.state, mediums[0] if mediums else 'page cache')}"

    def named(self, name: str) -> EngineFigures | None:
        """The engine of this name; None without figures."""
        return next((engine for engine in self.measured if engine.name == name), None)


def view(record: Record, _: Path | None = None) -> View:
    """What is shown: a section for each state, and what to use."""
    known = list(_states(record))
    return View(
        f"Reading training data on {record.node.host}",
        sections=[Section(each.title, list(_blocks(each))) for each in known],
        advice=[_advice(known)] if record.measurements else [],
    )


def _states(record: Record) -> Iterator[StateSection]:
    """The record's figures by state and engine."""
    for state in TITLES:
        known = engine_checks(record, state=state)
        section = StateSection(state)
        for name, check in known.items():
            found = {each.figure: each for each in chosen(record.measurements, state=state, engine=name)}
            if found:
                section.measured.append(EngineFigures(name, found, check))
            else:
                section.left_out.append(check)
        if known:
            yield section


def _blocks(section: StateSection) -> Iterator[Block]:
    for kind, figure, unit, size in _PLOTS:
        drawn = [
            bar_of(
                each.name, each.figures[figure], _PLAIN if each.name.startswith(("mmap", "files")) else _SPECIAL, size
            )
            for each in section.measured
            if is_of_images(each.name) == (kind == "images")
        ]
        if drawn:
            yield Plot(bars(f"{section.title}: {kind}, {unit}", drawn))
    yield Table(_TITLES, [_row(engine) for engine in section.measured], _TITLES[1:-1])
    yield Notes(list(_notes(section)))


def _row(engine: EngineFigures) -> Cells:
    rate, versus = engine.figures[RATE], engine.figures.get(VERSUS)
    spread = rate.confidence
    return [
        engine.name,
        number((engine.value(READ) or 0.0) / 1e9),
        _rate(rate.value),
        f"{_rate(spread.low)} to {_rate(spread.high)}" if spread is not None else "-",
        engine.shown(FETCHED),
        "-" if versus is None else number(versus.value) + ("" if versus.parameters["decided"] else " ?"),
        "-" if engine.check is not None and engine.check.status == "skip" else equality(engine),
    ]


def _rate(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else number(value)


def _notes(section: StateSection) -> Iterator[str]:
    """Lines under the table: what the columns mean, the evidence, what binds, what was left out or failed."""
    if section.measured:
        first = section.measured[0].figures[RATE]
        rounds = format_count(len(first.samples or []), "round")
        yield (
            f"medians of {rounds}; range: of samples/s; fetched: bytes from the drives for each byte used; times: of "
            "the samples/s by plain mmap in the same order, by the fewest workers, for shards by files, for DALI by "
            "files with the most workers, or for options of tf.data by its defaults; `?`: these rounds do not decide"
        )
        yield from _what_was_read(section)
    if section.state == "cold":
        yield from counted_by_drives(section.measured, READ, "read")
        yield from (f"{engine.name}: {limit}" for engine in section.measured if (limit := _generator(engine)))
    yield from _ended_early(section)
    yield from _huge(section)
    yield from without_figures(section.measured, section.left_out)


def _what_was_read(section: StateSection) -> Iterator[str]:
    parameters = section.measured[0].figures[RATE].parameters
    kinds = {is_of_images(engine.name) for engine in section.measured}
    if False in kinds:
        size = format_size(2 * float(parameters["tokens"]))
        yield (
            f"tokens: {size} in Megatron's .bin, {parameters['documents']} documents, samples of "
            f"{parameters['sequence_length']} tokens"
        )
    if True in kinds:
        side = parameters["image_side"]
        yield f"images: {parameters['images']} of {side}x{side} pixels, decoded"
    yield f"a pass takes {parameters['seconds']:g} s at most"


def _generator(engine: EngineFigures) -> str | None:
    """That the program which asks for samples is the bottleneck; None where the drives are."""
    limit = tester_limit(engine.figures[READ])
    return f"the generator is the bottleneck: {limit}" if limit else None


def _ended_early(section: StateSection) -> Iterator[str]:
    parameters = {engine.name: engine.figures[RATE].parameters for engine in section.measured}
    shown = [
        f"{name} after {float(of['samples_of_a_pass'] or 0):.0f} samples"
        for name, of in parameters.items()
        if of.get("passes_ended_by_read_ahead")
    ]
    if shown:
        yield (
            f"ended before the time was over: {', '.join(shown)}. The kernel had read ahead {MOST_AHEAD:.0%} of the "
            "file by then, and later samples would have come from the page cache, which holds no data larger than "
            "memory"
        )


def _huge(section: StateSection) -> Iterator[str]:
    sizes = {
        engine.name: float(engine.figures[RATE].parameters.get("huge_mapped_bytes") or 0) for engine in section.measured
    }
    shown = [f"{name} {format_size(size)}" for name, size in sizes.items() if size]
    if shown:
        yield f"mapped by huge pages at the end of a pass: {', '.join(shown)}"


def _advice(sections: Sequence[StateSection]) -> str:
    """One sentence about what to use with cold files, where the order of samples is shuffled as in training."""
    cold = next((section for section in sections if section.state == "cold"), None)
    known = (_of_tokens(cold), _of_records(cold), _of_images(cold)) if cold is not None else ()
    parts = [part for part in known if part]
    return f"advice: {'; '.join(parts)}." if parts else "advice: none, since too little was measured to compare."


def _of_tokens(cold: StateSection) -> str | None:
    shuffled = [engine for engine in cold.measured if engine.is_equal and "-shuffled" in engine.name]
    base = cold.named("mmap-shuffled")
    if base is None or not base.is_equal:
        return None
    # A pool that no mapping takes from is no way to read.
    others = [engine for engine in shuffled if engine is not base and not engine.name.endswith(HUGE_POOL)]
    best = max(others, key=lambda engine: engine.value(VERSUS) or 0.0, default=None)
    if best is None:
        return None
    return _compared(best, base, "read shuffled tokens of a corpus larger than memory")


def _of_records(cold: StateSection) -> str | None:
    base, other = cold.named(TF_DATA), cold.named(f"{TF_DATA}-interleaved")
    if base is None or other is None or VERSUS not in other.figures:
        return None
    return _compared(other, base, "read TFRecords")


def _of_images(cold: StateSection) -> str | None:
    rates = {engine.name: engine.value(RATE) or 0.0 for engine in cold.measured}
    others = [engine for engine in cold.measured if engine.name.startswith(("tar-", DALI)) and VERSUS in engine.figures]
    if not others:
        return None

    def base_of(engine: EngineFigures) -> str:
        return str(engine.figures[VERSUS].parameters["against"])

    best = max(others, key=lambda engine: max(rates[engine.name], rates.get(base_of(engine), 0.0)))
    base = cold.named(base_of(best))
    return _compared(best, base, "read images") if base is not None else None


def _compared(other: EngineFigures, base: EngineFigures, what: str) -> str:
    """Which of two to use, from the ratio that ``other`` has to ``base``."""
    ratio = other.figures[VERSUS]
    if not ratio.parameters["decided"]:
        return f"{what} by `{base.name}` or `{other.name}`, between which these rounds do not decide"
    better, worse = (other, base) if ratio.value > 1 else (base, other)
    times = max(ratio.value, 1 / ratio.value)
    return (
        f"{what} by `{better.name}` ({_rate(better.value(RATE) or 0.0)} samples/s, "
        f"{number((better.value(READ) or 0.0) / 1e9)} GB/s), {number(times)} times `{worse.name}`"
    )
