"""The result of `bench experts` for people: a table of random reads, one of caches, and a sentence of advice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tunetool.bench.experts.samples import TARGET
from tunetool.node.units import format_count, format_size
from tunetool.record import Measurement, Record, chosen
from tunetool.report.page import add_number_columns, line_of, new_table, print_block
from tunetool.report.table import print_verdict_line
from tunetool.view.text import number

_DEMANDS = {"uniform": "even", "zipf": "uneven"}


@dataclass(frozen=True)
class Line:
    """The figures of one row, by the last part of their names. Each has a bandwidth."""

    key: str
    figures: Mapping[str, Measurement]

    @property
    def bandwidth(self) -> Measurement:
        """Of all experts that were wanted."""
        return self.figures["bandwidth"]

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
        return "-" if figure is None else number(figure.value / unit)

    def times(self) -> str:
        """The gain, in brackets where the rounds do not decide it."""
        shown = self.shown("gain")
        return shown if self.gain is not None or "gain" not in self.figures else f"({shown})"

    def speeds(self) -> tuple[str, str]:
        """GB/s, and from where to where."""
        interval = self.bandwidth.confidence
        spread = f"{number(interval.low / 1e9)} to {number(interval.high / 1e9)}" if interval else "-"
        return self.shown("bandwidth", 1e9), spread


def lines(record: Record) -> list[Line]:
    """The rows of the record, in its order."""
    by_key: dict[str, dict[str, Measurement]] = {}
    for each in chosen(record.measurements, subject="experts"):
        row = ".".join(each.labels[name] for name in ("place", "mode", "pattern", "cached") if name in each.labels)
        by_key.setdefault(row, {})[each.figure] = each
    return [Line(key, figures) for key, figures in by_key.items() if "bandwidth" in figures]


def print_experts(record: Record, path: Path | None, console: Console) -> None:
    """Print the tables with their notes and the advice, then the verdict. ``path``: where the record is."""
    console.print(line_of(f"{record.node.host}: `{record.target}`"))
    known = lines(record)
    reads, traces = [each for each in known if not each.demand], [each for each in known if each.demand]
    if reads:
        console.print(_of_reads(reads))
    if traces:
        console.print(_of_traces(traces))
    for text in [*notes(known), *advice(known)]:
        print_block(console, text, 2)
    print_verdict_line(record, path, console)


def _of_reads(reads: Sequence[Line]) -> Table:
    table = new_table()
    table.add_column("all experts at random, cold")
    add_number_columns(table, "GB/s", "interval", "p50 ms", "p99 ms", "gain")
    for line in reads:
        name = line.key.replace(".direct", ", O_DIRECT").replace(".buffered", ", page cache")
        table.add_row(name, *line.speeds(), line.shown("p50", 1e-3), line.shown("p99", 1e-3), line.times())
    return table


def _of_traces(traces: Sequence[Line]) -> Table:
    table = new_table()
    table.add_column("trace of a router")
    add_number_columns(
        table, "cached", "hits", "expected", "GB/s", "interval", "step p50 ms", "p99", "gain", "tokens/s"
    )
    for line in traces:
        rate = line.figures.get("hit_rate")
        table.add_row(
            line.demand,
            str(line.slots),
            "-" if rate is None else f"{rate.value:.1%}",
            "-" if rate is None else f"{float(rate.parameters['expected']):.1%}",
            *line.speeds(),
            line.shown("p50", 1e-3),
            line.shown("p99", 1e-3),
            line.times(),
            line.shown("tokens"),
        )
    return table


def notes(known: Sequence[Line]) -> Iterator[str]:
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


def advice(known: Sequence[Line]) -> list[str]:
    """The sentence how to read experts, and what a cache is worth. Empty where nothing was compared."""
    direct = next((line for line in known if line.key == f"{TARGET}.direct"), None)
    if direct is None or "gain" not in direct.figures:
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
