"""What `bench inference` shows: what was measured, what was published, and where to keep the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tunetool.advise import zero
from tunetool.advise.shapes import preset
from tunetool.bench.inference.model import BYTES
from tunetool.bench.inference.predict import Work
from tunetool.bench.inference.samples import PLACES, SCRIPTS, TITLES
from tunetool.node.units import format_count, format_size
from tunetool.record import CheckResult, Measurement, Record, chosen
from tunetool.view.model import Block, Cell, Cells, Notes, Plot, Section, Table, Verbatim, View
from tunetool.view.plots import bar_of, bars
from tunetool.view.text import number

SOURCE = "DeepSpeed blog, `DeepNVMe: Affordable I/O scaling for Deep Learning Applications`, 2025"
MODEL = "LLAMA-3-70B"
BATCH, PROMPT, NEW_TOKENS = 96, 512, 32
HARDWARE = "one GPU; Gen4 on an Azure NC_A100_v4, Gen5 on an ND-H200-v5; with GDS"


@dataclass(frozen=True)
class Result:
    """One configuration of drives, as one RAID0."""

    drives: str
    tokens: float
    """Tokens per second."""
    read: float
    """Bytes per second of its ds_io, 1 GB from the drives to HBM."""

    @property
    def predicted(self) -> float:
        """Tokens per second by the bytes of the weights and ``read``, without a floor by compute."""
        return work().rate(self.read)


RESULTS: Sequence[Result] = (
    Result("4 x Gen4", 7, 10e9),
    Result("4 x Gen5", 17, 27e9),
    Result("8 x Gen5", 26, 48e9),
)


def work() -> Work:
    """The generation that was measured: weights in 2 bytes, all tensors that DeepSpeed swaps read by each pass."""
    swapped = zero.swapped_tensors(preset("70b"), 1, zero.MIN_AIO_BYTES)
    return Work(BATCH, NEW_TOKENS, sum(tensor.numel for tensor in swapped) * BYTES)


def remarks() -> list[str]:
    """Where the numbers are from, and what follows from them."""
    first, last = RESULTS[0], RESULTS[-1]
    return [
        f"published: {SOURCE}; {MODEL}, prompt {PROMPT}, {NEW_TOKENS} new tokens, batch {BATCH}; {HARDWARE}",
        f"published: a pass of 70b reads {work().read_bytes / 1e9:.0f} GB, so its own ds_io figures predict "
        + ", ".join(f"{each.predicted:.1f}" for each in RESULTS)
        + f" tokens/s: {first.drives} reaches all of it, {last.drives} {last.tokens / last.predicted:.0%}",
    ]


_TITLES = (
    *("weights", "tokens/s", "interval", "first, s", "next, s", "MB/token", "GB/s", "of handle", "predicted"),
    "same",
)
_PUBLISHED = ("drives", "tokens/s", "ds_io, GB/s", "predicted", "of predicted")
_SCRIPT = SCRIPTS["aio"]
_DRIVES, _OTHER = "#1f6feb", "#8c959f"
_SAME: Mapping[str, Cell] = {"pass": Cell("yes"), "fail": Cell("NO", mark="fail")}


@dataclass(frozen=True)
class Line:
    """The figures of one place of the weights, by the last part of their names."""

    key: str
    figures: Mapping[str, Measurement]
    check: CheckResult | None

    @property
    def title(self) -> str:
        """For people."""
        titles: Mapping[str, str] = {place: TITLES[place] for place in PLACES}
        return titles.get(self.key, self.key)

    @property
    def tokens(self) -> Measurement:
        """Tokens per second."""
        return self.figures["tokens"]

    def shown(self, name: str, unit: float = 1.0) -> str:
        """The median."""
        figure = self.figures.get(name)
        return "-" if figure is None else number(figure.value / unit)

    def cells(self) -> Cells:
        """Of the columns ``_TITLES``."""
        interval = self.tokens.confidence
        share = self.figures.get("read_share")
        return (
            self.title,
            self.shown("tokens"),
            f"{number(interval.low)} to {number(interval.high)}" if interval else "-",
            self.shown("first_pass"),
            self.shown("next_pass"),
            self.shown("bytes_per_token", 1e6),
            self.shown("read", 1e9),
            "-" if share is None else f"{share.value:.0%}",
            self.shown("predicted"),
            _SAME.get(self.check.status if self.check else "", "-"),
        )


def lines(record: Record) -> list[Line]:
    """The places that were measured, in the record's order, and SGLang's modes."""
    by_key: dict[str, dict[str, Measurement]] = {}
    for each in chosen(record.measurements, subject="inference"):
        by_key.setdefault(each.labels["place"], {})[each.figure] = each
    checks = {check.labels.get("place"): check for check in record.checks}
    return [Line(key, figures, checks.get(key)) for key, figures in by_key.items() if "tokens" in figures]


def _left_out(record: Record, known: Sequence[Line]) -> Iterator[str]:
    """What was not measured, the reason, and what helps."""
    measured = {line.key for line in known}
    reasons: dict[str, list[str]] = {}
    for check in record.checks:
        key = check.labels.get("place", check.id)
        if key not in measured and check.status in ("skip", "unknown"):
            text = f"{check.found}; {check.remedy}" if check.remedy else check.found
            reasons.setdefault(text, []).append(key)
    for text, keys in reasons.items():
        yield f"left out: {', '.join(keys)}: {text}"


def view(record: Record, directory: Path | None = None) -> View:
    """What is shown; without figures there is no page."""
    known = lines(record)
    on = "" if known else "terminal"
    theirs: list[Block] = [Table(_PUBLISHED, list(_published_rows())), Notes(remarks())]
    return View(
        f"Generating on {record.node.host}",
        sections=[
            Section("Measured", list(_measured(record, known, directory)), on),
            Section("Published", theirs, on),
        ],
        advice=advice(known),
    )


def _measured(record: Record, known: Sequence[Line], directory: Path | None) -> Iterator[Block]:
    if known:
        drawn = [bar_of(each.key, each.tokens, _DRIVES if each.key == "nvme" else _OTHER) for each in known]
        yield Plot(bars("tokens/s", drawn))
        yield Table(_TITLES, [line.cells() for line in known], numbers=_TITLES[1:-1])
        yield Notes(list(_notes(known)))
    yield Notes(list(_left_out(record, known)))
    if directory is not None and (directory / _SCRIPT).is_file():
        yield Verbatim(f"SGLang's benchmark: sh {directory / _SCRIPT}", on="terminal")


def _published_rows() -> Iterator[Cells]:
    for each in RESULTS:
        share = f"{each.tokens / each.predicted:.0%}"
        yield (
            f"{MODEL}, {each.drives}",
            f"{each.tokens:g}",
            number(each.read / 1e9),
            number(each.predicted),
            share,
        )


def _notes(known: Sequence[Line]) -> Iterator[str]:
    """Lines under the table: what was generated, on which media, and its evidence."""
    first = known[0].tokens
    size = {name: int(first.parameters[name]) for name in ("batch", "prompt", "new_tokens", "weight_bytes")}
    yield (
        f"medians of {format_count(len(first.samples or []), 'round')}; `{first.parameters['model']}`, "
        f"{format_size(size['weight_bytes'])} of random weights in bf16, on {first.parameters['device']}; prompt "
        f"{size['prompt']}, {size['new_tokens']} new tokens, batch {size['batch']}; first and next: seconds of the "
        "pass over the prompts and of one after it; MB/token: read from the drives; weights on drives and in host "
        "memory by DeepSpeed's ZeRO-Inference"
    )
    yield "; ".join(f"{line.key}: {line.tokens.medium}" for line in known)
    for line in known:
        predicted = line.figures.get("predicted")
        if predicted is None:
            continue
        floor = str(predicted.parameters["floor"])
        least = f"the times of `{floor}` as the least" if floor != "none" else "without the time to compute"
        handle = float(predicted.parameters["handle"])
        share = line.figures["of_predicted"].value
        yield (
            f"predicted: a pass takes its bytes over the {number(handle / 1e9)} GB/s of DeepSpeed's handle here, "
            f"{least}; {share:.0%} of that was measured"
        )
        proof = line.tokens.evidence
        if proof is not None and proof.ratio is not None:
            yield f"evidence: {proof.kind}, the drives counted {proof.ratio:.4f} of the bytes of all passes"


def advice(known: Sequence[Line]) -> list[str]:
    """The sentence where to keep the weights, and how large the batch should be. Empty without weights on drives."""
    by_key = {line.key: line for line in known}
    drives = by_key.get("nvme")
    if drives is None:
        return []
    gains = [
        (by_key[place], by_key[place].figures.get("versus_nvme")) for place in ("device", "dram") if place in by_key
    ]
    better = [(line, gain) for line, gain in gains if gain is not None and gain.value > 1]
    if better:
        decided = all(bool(gain.parameters["decided"]) for _, gain in better)
        words = ", else in ".join(f"{line.title} ({gain.value:.2f} times the drives)" for line, gain in better)
        where = f"keep the weights in {words}" + ("" if decided else ", which these rounds do not decide")
    elif gains:
        where = "weights on drives cost nothing here: computing takes longer than reading"
    else:
        where = "where the weights belong is not decided: nothing was measured beside the drives"
    per_pass = float(drives.figures["bytes_per_token"].parameters["expected"]) * int(drives.tokens.parameters["batch"])
    how = f"each pass reads {format_size(int(per_pass))} whatever the batch is, so take the largest that fits"
    predicted = drives.figures.get("predicted")
    batch = predicted.parameters.get("balanced_batch") if predicted is not None else None
    if batch is not None and int(batch) > int(drives.tokens.parameters["batch"]):
        how += f": up to about {int(batch)} reading takes longer than computing"
    return [f"{where}; from drives {how}"]
