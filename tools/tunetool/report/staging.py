"""What `bench staging` found, for people: the published table with ours beside it, the summary, stage or not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tunetool.bench.staging import published
from tunetool.bench.staging.published import SCENARIOS, TITLES, Pair, Scenario
from tunetool.node.units import format_bandwidth, format_size
from tunetool.record import CheckResult, Measurement, Record
from tunetool.report.page import WIDTH, line_of, number, print_block, print_verdict_line

PREFIX = "staging."
_READ = ("model_read", "model_storage", "data_read", "data_storage")


@dataclass
class Found:
    """One scenario: figures by path and name, checks by their last name."""

    name: Scenario
    figures: Mapping[tuple[str, str], Measurement]
    checks: Mapping[str, CheckResult]
    ranks: list[Measurement] = field(default_factory=list)
    """Model load of each rank on path B."""

    def value(self, path: str, figure: str) -> float | None:
        """A figure's median."""
        found = self.figures.get((path, figure))
        return found.value if found else None

    def pair(self, figure: str) -> Pair | None:
        """Both paths' medians."""
        staged, bulk = self.value("memory", figure), self.value("bulk", figure)
        return Pair(staged, bulk) if staged is not None and bulk is not None else None

    @property
    def any(self) -> Measurement | None:
        """One figure, for what all of them were taken under."""
        return next(iter(self.figures.values()), None)

    @property
    def missing(self) -> str | None:
        """Why it was not measured, or not to its end."""
        check = self.checks.get("")
        return check.found if check else None


def scenarios(record: Record) -> list[Found]:
    """The record's figures by scenario, those that were asked for."""
    found = []
    for name in SCENARIOS:
        head = f"{PREFIX}{name}"
        figures: dict[tuple[str, str], Measurement] = {}
        ranks = []
        for each in record.measurements:
            if not each.name.startswith(head + "."):
                continue
            path, _, figure = each.name.removeprefix(head + ".").partition(".")
            if figure == "rank_model_load":
                ranks += [each] if path == "bulk" else []
            else:
                figures[path, figure] = each
        checks = {
            check.id.removeprefix(head).lstrip("."): check
            for check in record.checks
            if check.id == head or check.id.startswith(head + ".")
        }
        if figures or checks:
            found.append(Found(name, figures, checks, ranks))
    return found


def print_staging(record: Record, path: Path | None, console: Console) -> None:
    """A table for each scenario, the summary across them, what to do, the verdict."""
    found = scenarios(record)
    console.print(line_of(f"{record.node.host}: {record.target}"))
    for each in found:
        if each.any is None:
            print_block(console, f"{TITLES[each.name]}: {_word(each)}, {each.missing or 'nothing was measured'}", 2)
            continue
        for line in head(each):
            print_block(console, line, 2)
        console.print(_table(each))
        for line in notes(each):
            print_block(console, line, 2)
    if any(each.any for each in found):
        console.print(_summary(found))
        for line in closing(found):
            print_block(console, line, 2)
    if path is not None and (path.parent / "tensorboard").is_dir():
        # To be copied: never folded.
        console.print(Text(f"curves: tensorboard --logdir {path.parent / 'tensorboard'}"), soft_wrap=True)
    print_verdict_line(record, path, console)


def _word(found: Found) -> str:
    check = found.checks.get("")
    return "left out" if check is not None and check.status == "skip" else "failed"


def head(found: Found) -> Iterator[str]:
    """Under what it was measured."""
    first = found.any
    if first is None:
        return
    told = first.parameters
    staged, bulk = found.figures.get(("memory", "end_to_end")), found.figures.get(("bulk", "end_to_end"))
    media = f"{staged.medium if staged else '-'} against {bulk.medium if bulk else '-'}"
    size = format_size(float(told["model_bytes"]))
    yield (
        f"{TITLES[found.name]}: {told['ranks']} rank(s) on {told['nodes']} node(s), {told['device']}; {media}; model "
        f"`{told['model']}` of {size}, {told['images']} images of {format_size(float(told['data_bytes']))}; "
        f"{told['steps']} steps of {told['steps_per_epoch']} in an epoch, ZeRO-{told['zero_stage']}, {first.engine}"
    )
    if found.missing:
        yield f"failed: {found.missing}"


def rows(found: Found) -> Iterator[tuple[str, Sequence[str]]]:
    """Published memory and bulk, ours, and how many times as fast from memory."""
    first = found.any
    told = first.parameters if first else {}
    full = found.name == "nodes"
    yield (
        "Epoch",
        ("10", "10", *_both(f"{_epochs(told):.3g}"), "") if full else ("", "", *_both(f"{_epochs(told):.3g}"), ""),
    )
    images = f"{told['images']} images"
    yield "Dataset", ("2000+ images", "2000+ images", *_both(images), "") if full else ("", "", *_both(images), "")
    yield (
        "Batch size",
        ("2", "2", *_both(str(told["batch_size"])), "") if full else ("", "", *_both(str(told["batch_size"])), ""),
    )
    yield "Data load time / batch", _cells(published.DATA_PER_BATCH.get(found.name), found.pair("data_per_batch"))
    yield "  of which a step waited", _cells(None, found.pair("data_wait_per_batch"))
    yield "Model load time", _cells(published.MODEL_LOAD.get(found.name), found.pair("model_load"))
    yield "First epoch" + (" (extrapolated)" if told["extrapolated"] else ""), _cells(None, found.pair("first_epoch"))
    if found.pair("later_epoch"):
        yield "Later epoch", _cells(None, found.pair("later_epoch"))
    yield "Fine-tune time", _cells(published.FINE_TUNE.get(found.name), found.pair("fine_tune"))
    yield "  of which the first step's start-up", _cells(None, found.pair("first_step"))
    stage = found.value("memory", "stage")
    yield "Staging", ("", "", _seconds(stage), "-", "")
    yield "End to end, staging included", _cells(None, found.pair("end_to_end"))


def _both(text: str) -> tuple[str, str]:
    return text, text


def _epochs(told: Mapping[str, object]) -> float:
    return float(str(told["steps"])) / float(str(told["steps_per_epoch"]))


def _cells(theirs: Pair | None, ours: Pair | None) -> tuple[str, str, str, str, str]:
    before = (_seconds(theirs.staged), _seconds(theirs.bulk)) if theirs else ("", "")
    if ours is None:
        return (*before, "-", "-", "-")
    return (*before, _seconds(ours.staged), _seconds(ours.bulk), f"{ours.ratio:.2f}" if ours.staged > 0 else "-")


def _table(found: Found) -> Table:
    table = Table(box=box.SIMPLE_HEAD, width=WIDTH, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column(TITLES[found.name], overflow="fold")
    for title in ("published /dev/shm", "published bulk", "memory", "bulk", "bulk/memory"):
        table.add_column(title, justify="right")
    for name, cells in rows(found):
        table.add_row(Text(name), *map(Text, cells))
    return table


def notes(found: Found) -> Iterator[str]:
    """Staging's speed, bytes of each rank, and the checks."""
    stage, rate = found.figures.get(("memory", "stage")), found.figures.get(("memory", "stage_rate"))
    if stage is not None and rate is not None:
        yield f"staging: {stage.value:.2f} s at {format_bandwidth(rate.value)}, the slowest node"
    for rank in found.ranks:
        size = {name: format_size(float(rank.parameters[f"{name}_bytes"])) for name in _READ}
        yield (
            f"rank {rank.rank} on {rank.host}, path B, last round: model {size['model_read']}, "
            f"{size['model_storage']} of it from storage; data {size['data_read']}, {size['data_storage']} from storage"
        )
    for name in ("losses", "cold", "notes"):
        check = found.checks.get(name)
        if check is not None:
            yield f"{name}: {check.status.upper()}, {check.found}"


def summary(found: Sequence[Found]) -> Iterator[Sequence[str]]:
    """Model load as published and as here, then what the whole run gained, for every scenario there is."""
    mine = {each.name: each for each in found}
    for name in SCENARIOS:
        theirs = published.MODEL_LOAD[name]
        here = mine.get(name)
        load, whole = (here.pair("model_load"), here.pair("end_to_end")) if here else (None, None)
        yield (
            TITLES[name],
            f"{theirs.staged:g} / {theirs.bulk:g}",
            f"{theirs.ratio:.2f}",
            f"{_seconds(load.staged)} / {_seconds(load.bulk)}" if load else "-",
            f"{load.ratio:.2f}" if load else "-",
            f"{_seconds(whole.staged)} / {_seconds(whole.bulk)}" if whole else "-",
            f"{whole.ratio:.2f}" if whole else "-",
        )


def _summary(found: Sequence[Found]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, width=WIDTH, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("memory / bulk, s", overflow="fold")
    for title in ("published load", "x", "model load", "x", "end to end", "x"):
        table.add_column(title, justify="right")
    for cells in summary(found):
        table.add_row(*map(Text, cells))
    return table


def closing(found: Sequence[Found]) -> Iterator[str]:
    """What follows: of the published table, of sharding, and what to do."""
    yield f"published: {published.SOURCE}"
    yield from published.remarks()
    for name in ("sharding", "advice"):
        for each in found:
            check = each.checks.get(name)
            if check is not None:
                yield f"{TITLES[each.name]}: {check.found}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    if value >= 600:
        return f"{int(value // 3600)}:{int(value % 3600 // 60):02d}:{int(value % 60):02d}"
    return f"{number(value)} s"


__all__ = ["Found", "closing", "print_staging", "scenarios"]
