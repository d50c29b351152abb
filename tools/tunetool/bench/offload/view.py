"""What `bench offload` shows: the steps, what the swap moves, and a sentence of advice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tunetool.advise.ds_config import MEMORY_SHARE
from tunetool.advise.zero import ON_HOST
from tunetool.bench.offload.preflight import TARGET
from tunetool.bench.offload.samples import DRAM
from tunetool.node.units import format_count, format_size
from tunetool.record import Measurement, Record, chosen
from tunetool.view.model import Block, Notes, Plot, Section, Table, View
from tunetool.view.plots import Bar, bar_of, bars
from tunetool.view.text import number

_STEP = ("states on", "step, s", "interval", "compute, s", "read, s", "write, s", "of default", "of DRAM")
_SWAP = ("states on", "read, GB/s", "aio, GB/s", "share", "write, GB/s", "aio, GB/s", "share")
_COLOURS = {
    "step": "#1f6feb",
    "compute": "#8c959f",
    "read": "#2da44e",
    "write": "#bf8700",
    "bandwidth": "#1f6feb",
    "rung": "#8c959f",
}
_DEFAULT = "default"


@dataclass(frozen=True)
class Line:
    """The figures of one row, by what follows its place and block in their names. Each has a step."""

    key: str
    figures: Mapping[str, Measurement]

    @property
    def step(self) -> Measurement:
        """Seconds of a step."""
        return self.figures["step"]

    @property
    def block(self) -> str:
        """``default``, ``tuned``, or empty for DRAM."""
        return str(self.step.parameters.get("block", ""))

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.step.medium}, {self.block}" if self.block else self.step.medium

    def shown(self, name: str, unit: float = 1.0) -> str:
        """The median."""
        figure = self.figures.get(name)
        return "-" if figure is None else number(figure.value / unit)

    def ratio(self, name: str) -> str:
        """The median, in brackets where the rounds do not decide it."""
        figure = self.figures.get(name)
        if figure is None:
            return "-"
        return number(figure.value) if figure.parameters["decided"] else f"({number(figure.value)})"

    def decided(self, name: str) -> Measurement | None:
        """The ratio, where the rounds decide it."""
        figure = self.figures.get(name)
        return figure if figure is not None and figure.parameters["decided"] else None

    def step_cells(self) -> list[str]:
        """The row of the first table: that of the columns ``_STEP``."""
        interval = self.step.confidence
        spread = f"{number(interval.low)} to {number(interval.high)}" if interval else "-"
        waits = [self.shown(name) for name in ("compute", "read.wait", "write.wait")]
        return [self.name, self.shown("step"), spread, *waits, self.ratio("gain"), self.ratio("against_dram")]

    def swap_cells(self) -> list[str]:
        """The row of the second table: that of the columns ``_SWAP``."""
        cells = [self.name]
        for direction in ("read", "write"):
            speeds = [self.shown(f"{direction}.{name}", 1e9) for name in ("bandwidth", "rung")]
            cells += [*speeds, self.ratio(f"{direction}.share")]
        return cells


def lines(record: Record) -> list[Line]:
    """The rows of the record, in its order."""
    by_key: dict[str, dict[str, Measurement]] = {}
    for each in chosen(record.measurements, subject="offload"):
        key = ".".join(each.labels[name] for name in ("place", "block") if name in each.labels)
        direction = each.labels.get("direction")
        by_key.setdefault(key, {})[f"{direction}.{each.figure}" if direction else each.figure] = each
    return [Line(key, figures) for key, figures in by_key.items() if "step" in figures]


def view(record: Record, directory: Path | None = None) -> View:
    """What is shown; of a record without figures only its checks."""
    known = lines(record)
    return View(
        f"Offload of ZeRO-3 on {record.node.host}",
        head=list(_head(known)),
        sections=list(_sections(known, Notes(list(_checks(record)), on="terminal"))),
        advice=advice(record, known),
        checks=bool(known),
    )


def _head(known: Sequence[Line]) -> Iterator[str]:
    """What was trained and moved."""
    if not known:
        return
    parameters = known[0].step.parameters
    swapped = "optimizer and parameters" if parameters["parameters_on"] == "nvme" else "the optimizer"
    yield (
        f"{parameters['model']}: {int(parameters['parameters']):,} parameters, "
        f"{format_count(int(parameters['ranks']), 'rank')} on {parameters.get('device', 'the device')}, "
        f"{parameters['tokens']} tokens a sequence; {swapped} in swap files of "
        f"{format_size(float(parameters['swap_bytes']))}"
    )
    settings = {line.block: line.step.parameters["settings"] for line in known if line.block}
    if settings:
        yield "aio blocks: " + "; ".join(f"{name} {shown}" for name, shown in settings.items())


def _sections(known: Sequence[Line], checks: Notes) -> Iterator[Section]:
    if not known:
        yield Section("checks", [checks], on="terminal")
        return
    parts = [
        bar for line in known for bar in _bars(line, {name: name for name in ("step", "compute", "read", "write")})
    ]
    steps: list[Block] = [
        Plot(bars("a step and its parts, seconds", parts)),
        Table(_STEP, [line.step_cells() for line in known]),
    ]
    swapped = [line for line in known if "read.bandwidth" in line.figures or "read.rung" in line.figures]
    swap: list[Block] = [*_swap_plots(known), Table(_SWAP, [line.swap_cells() for line in swapped])]
    (swap if swapped else steps).extend([Notes(list(_notes(known))), checks])
    yield Section("a step", steps)
    if swapped:
        yield Section("the swap", swap)


def _swap_plots(known: Sequence[Line]) -> Iterator[Block]:
    for direction in ("read", "write"):
        titles = {f"{direction}.bandwidth": "swap", f"{direction}.rung": "aio alone"}
        if drawn := [bar for line in known for bar in _bars(line, titles, 1e9)]:
            yield Plot(bars(f"{direction}s, GB/s", drawn))


def _bars(line: Line, titles: Mapping[str, str], unit: float = 1.0) -> Iterator[Bar]:
    for name, title in titles.items():
        if name in line.figures:
            yield bar_of(f"{line.name}: {title}", line.figures[name], _COLOURS[name.rpartition(".")[2]], unit)


def _notes(known: Sequence[Line]) -> Iterator[str]:
    """What the columns mean, and the evidence."""
    yield (
        f"medians of {format_count(len(known[0].step.samples or []), 'round')}; read and write: seconds for which a "
        "step waits for them; compute: all the rest; GB/s: while transfers are in flight, beside computation; aio: the "
        "handle alone, on a file beside the swap files in the same round; of default, of DRAM: its speed; in brackets: "
        "not decided"
    )
    yield from _evidence(known)


def _checks(record: Record) -> Iterator[str]:
    """The checks, those that were left out last."""
    for check in sorted(record.checks, key=lambda each: each.status == "skip"):
        word = "left out" if check.status == "skip" else check.status
        remedy = f"; {check.remedy}" if check.status == "skip" and check.remedy else ""
        yield f"{check.id}: {word}, {check.found}{remedy}"


def _evidence(known: Sequence[Line]) -> Iterator[str]:
    proofs = [figure.evidence for line in known for figure in line.figures.values() if figure.evidence is not None]
    ratios = [proof.ratio for proof in proofs if proof.kind == "block" and proof.ratio is not None]
    if ratios:
        yield f"evidence: block, {min(ratios):.4f} to {max(ratios):.4f} of the bytes that DeepSpeed's handles moved"
    if any(proof.kind == "memory" for proof in proofs):
        yield "what lies in memory is proven by no drive"


def advice(record: Record, known: Sequence[Line]) -> list[str]:
    """The sentence where to offload to, by which block, and when DRAM suffices. Empty without a figure."""
    swapped = [line for line in known if line.block]
    if not swapped:
        return []
    return [f"advice: {_where(known, swapped)}; {_which_block(swapped)}{_dram_room(record, known[0])}."]


def _where(known: Sequence[Line], swapped: Sequence[Line]) -> str:
    if not any(line.step.medium == DRAM for line in known):
        media = " or ".join(dict.fromkeys(line.step.medium for line in swapped))
        return f"offload to {media}: DRAM was not measured beside it"
    speeds = {line.step.medium: line.decided("against_dram") for line in swapped if line.block == _DEFAULT}
    slower = {medium: speed for medium, speed in speeds.items() if speed is not None and speed.value < 1}
    open_ones = [medium for medium, speed in speeds.items() if speed is None]
    parts = [f"{medium} has {_times(speed)} its speed" for medium, speed in slower.items()]
    if open_ones:
        parts.append(f"these rounds do not decide whether DRAM is faster than {' and '.join(open_ones)}")
    faster = [medium for medium in speeds if medium not in slower and medium not in open_ones]
    parts += [f"{medium} is faster than DRAM, which something else must have slowed" for medium in faster]
    drives = next((line.step.medium for line in swapped if line.step.parameters["place"] == TARGET), None)
    if drives is None:
        head = "offload to DRAM: a tmpfs is memory too, and saves none"
    elif drives in slower:
        head = f"offload to DRAM while the states fit there, else to {drives}"
    else:
        head = f"offload to {drives} where memory is short"
    return f"{head}: {'; '.join(parts)}"


def _which_block(swapped: Sequence[Line]) -> str:
    """The block to use, by the ratio of the first place that has one: that on drives."""
    gains = [line for line in swapped if "gain" in line.figures]
    if not gains:
        return "use DeepSpeed's default `aio` block, the only one that was measured"
    line = gains[0]
    gain = line.decided("gain")
    shown = line.step.parameters["settings"]
    if gain is None:
        return f"keep the default `aio` block on {line.step.medium}: these rounds do not decide that {shown} is faster"
    if gain.value < 1:
        return f"keep the default `aio` block on {line.step.medium}: {shown} has {_times(gain)} its speed"
    return f"use the tuned block, {shown}, on {line.step.medium}: {_times(gain)} the default's speed"


def _dram_room(record: Record, line: Line) -> str:
    """When DRAM suffices, by what DeepSpeed keeps there for each parameter."""
    memory = record.node.memory_bytes
    if not memory:
        return ""
    kept = sum(ON_HOST.values()) - (ON_HOST["parameters"] if line.step.parameters["parameters_on"] != "nvme" else 0)
    most = MEMORY_SHARE * memory / kept
    return (
        f"; DRAM suffices on this node up to {number(most / 1e9)} billion parameters ({kept} bytes each, in "
        f"{MEMORY_SHARE:.0%} of {format_size(memory)})"
    )


def _times(ratio: Measurement) -> str:
    interval = ratio.confidence
    spread = f" ({number(interval.low)} to {number(interval.high)})" if interval else ""
    return f"{number(ratio.value)} times{spread}"
