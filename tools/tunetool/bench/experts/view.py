"""What `bench experts` shows: a table of random reads, one of caches, and a sentence of advice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tunetool.bench.experts.samples import MODES, TARGET
from tunetool.node.units import format_count, format_size
from tunetool.record import Measurement, Record, chosen
from tunetool.view.figures import figures
from tunetool.view.model import Cells, Notes, Section, Table, View
from tunetool.view.text import number, shown

_DEMANDS = {"uniform": "even", "zipf": "uneven"}
_MODES: Mapping[str, str] = dict(zip(MODES, ("O_DIRECT", "page cache"), strict=True))
_READS = ("read", "GB/s", "interval", "p50, ms", "p99, ms", "gain")
_TRACES = ("demand", "cached", "hits", "expected", *_READS[1:3], "step p50, ms", "p99, ms", "gain", "tokens/s")


@dataclass(frozen=True)
class Line:
    """The figures of one row, by what they are. Each has a bandwidth."""

    labels: Mapping[str, str]
    figures: Mapping[str, Measurement]

    @property
    def bandwidth(self) -> Measurement:
        """Of all experts that were wanted."""
        return self.figures["bandwidth"]

    @property
    def name(self) -> str:
        """For people."""
        mode = self.labels.get("mode", "")
        return self.demand or f"{self.labels.get('place')}, {_MODES.get(mode, mode)}"

    @property
    def demand(self) -> str | None:
        """``even`` or ``uneven``; None for reads of all experts in random order."""
        return _DEMANDS.get(str(self.bandwidth.parameters.get("pattern")))

    @property
    def slots(self) -> int:
        """Experts that the cache holds."""
        return int(self.bandwidth.parameters.get("cached", 0))

    @property
    def gain(self) -> Measurement | None:
        """Times the speed of what it is compared with; None unless the rounds decide it."""
        figure = self.figures.get("gain")
        return figure if figure is not None and figure.parameters["decided"] else None

    def shown(self, name: str, unit: float = 1.0) -> str:
        """The median."""
        figure = self.figures.get(name)
        return shown(figure.value if figure else None, unit)

    def cells(self) -> Iterator[str]:
        """The columns that both tables have: speed, interval, latencies and the gain, in brackets where undecided."""
        interval = self.bandwidth.confidence
        yield self.shown("bandwidth", 1e9)
        yield f"{number(interval.low / 1e9)} to {number(interval.high / 1e9)}" if interval else "-"
        yield from (self.shown(name, 1e-3) for name in ("p50", "p99"))
        gain = self.shown("gain")
        yield gain if self.gain is not None or "gain" not in self.figures else f"({gain})"


def view(record: Record, _: Path | None = None) -> View:
    """What is shown: a table of each sort of reads, its notes, all figures, and how to read experts."""
    known = _lines(record)
    reads, traces = [each for each in known if not each.demand], [each for each in known if each.demand]
    tables = {
        "all experts at random, cold": Table(_READS, [[line.name, *line.cells()] for line in reads]),
        "router's trace": Table(_TRACES, [_of_trace(line) for line in traces]),
    }
    sections = [Section(title, [table]) for title, table in tables.items() if table.rows]
    if sections:
        sections[-1] = Section(sections[-1].title, [*sections[-1].blocks, Notes(list(_notes(known)))])
    return View(
        f"Reading experts on {record.node.host}",
        sections=[*sections, *figures(record)],
        advice=_advice(known),
        checks=True,
    )


def _lines(record: Record) -> list[Line]:
    """The rows of the record, in its order."""
    by_row: dict[tuple[tuple[str, str], ...], dict[str, Measurement]] = {}
    for each in chosen(record.measurements, subject="experts"):
        by_row.setdefault(tuple(sorted(each.labels.items())), {})[each.figure] = each
    return [Line(dict(labels), row) for labels, row in by_row.items() if "bandwidth" in row]


def _of_trace(line: Line) -> Cells:
    rate = line.figures.get("hit_rate")
    hits = ("-", "-") if rate is None else (f"{rate.value:.1%}", f"{float(rate.parameters['expected']):.1%}")
    return [line.name, str(line.slots), *hits, *line.cells(), line.shown("tokens")]


def _notes(known: Sequence[Line]) -> Iterator[str]:
    """Lines under the tables: what was read, and its evidence."""
    if not known:
        return
    first = known[0].bandwidth
    size = {name: int(first.parameters[name]) for name in ("block_bytes", "experts", "threads", "top_k", "steps")}
    yield (
        f"medians of {format_count(len(first.samples or []), 'round')}; {size['experts']} experts of "
        f"{format_size(size['block_bytes'])}, {size['threads']} threads; a step wants {size['top_k']}, a trace has "
        f"{size['steps']} steps in a round; GB/s of a trace are those of all wanted experts, and what the cache holds "
        "costs nothing; a gain in brackets is not decided"
    )
    media = dict.fromkeys(
        (str(line.bandwidth.parameters["place"]), line.bandwidth.medium) for line in known if not line.slots
    )
    yield "; ".join(f"{place}: {medium}" for place, medium in media)
    proofs = [line.bandwidth.evidence for line in known if line.bandwidth.evidence]
    ratios = [proof.ratio for proof in proofs if proof.kind == "block" and proof.ratio is not None]
    if ratios:
        yield f"evidence: block, {min(ratios):.4f} to {max(ratios):.4f} of the bytes that were read"


def _advice(known: Sequence[Line]) -> list[str]:
    """The sentence how to read experts, and what a cache is worth. Empty where nothing was compared."""
    direct = next((each for each in known if each.labels.get("place") == TARGET and "gain" in each.figures), None)
    if direct is None:
        return []
    gain = direct.gain
    if gain is None:
        how = "read experts with O_DIRECT or through the page cache: these rounds do not decide which is faster"
    elif gain.value > 1:
        how = f"read experts with O_DIRECT, {_times(gain)} the speed of the page cache"
    else:
        how = f"read experts through the page cache: O_DIRECT has {_times(gain)} its speed"
    worth = [words for demand in _DEMANDS.values() if (words := _worth(known, demand))]
    if not worth:
        return [f"{how}; whether a cache pays is not decided by these rounds"]
    return [f"{how}; a cache in memory gives " + ", and ".join(worth)]


def _worth(known: Sequence[Line], demand: str) -> str | None:
    """What the best of the measured caches gives; None where none is decided."""
    gains = [(line, gain) for line in known if line.demand == demand and (gain := line.gain) is not None]
    if not gains:
        return None
    line, gain = max(gains, key=lambda each: each[1].value)
    tokens = f" and at most {line.shown('tokens')} tokens/s" if "tokens" in line.figures else ""
    count = gain.parameters["experts"]
    return f"{_times(gain)} the speed for {demand} demand with {line.slots} of {count} experts{tokens}"


def _times(gain: Measurement) -> str:
    interval = gain.confidence
    spread = f" ({interval.low:.2f} to {interval.high:.2f})" if interval else ""
    return f"{gain.value:.2f} times{spread}"
