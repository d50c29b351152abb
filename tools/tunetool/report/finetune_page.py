"""The record of a fine-tune as an HTML page: the curves of every worker, drawn from the series files of the record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunetool.node.common.files import replace_file
from tunetool.record import Record, Series
from tunetool.regular_files import below, read_json
from tunetool.report.html import render
from tunetool.report.page import REPORT
from tunetool.training.rank.curve_files import finite, read_curve
from tunetool.view.curves import Line, Points, legend_of, plot
from tunetool.view.text import format_value

_SECTIONS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    (
        "Training",
        (
            ("loss", "Loss"),
            ("learning_rate", "Learning rate"),
            ("step_time", "Step time"),
            ("data_time", "Wait for a batch"),
        ),
    ),
    (
        "Nodes",
        (
            ("node.cpu", "CPU of all cores"),
            ("node.memory", "Memory in use"),
            ("node.shared_memory", "Memory in tmpfs and shared memory"),
            ("node.memory_group", "Memory of the control group, without cache"),
            ("node.disk_read", "Read from drives"),
            ("node.disk_write", "Written to drives"),
            ("node.network_in", "Network, received"),
            ("node.network_out", "Network, sent"),
            ("node.rdma_in", "RDMA, received"),
            ("node.rdma_out", "RDMA, sent"),
        ),
    ),
    (
        "GPUs",
        (
            ("gpu.utilisation", "GPU utilisation"),
            ("gpu.memory", "GPU memory in use"),
            ("gpu.sm_clock", "SM clock"),
            ("gpu.memory_clock", "Memory clock"),
        ),
    ),
    ("Processes", (("rank.cpu", "CPU of a rank, of one core"), ("rank.memory", "Resident memory of a rank"))),
)


@dataclass(frozen=True)
class _Worker:
    rank: int
    host: str | None

    @property
    def name(self) -> str:
        return f"rank {self.rank}" + (f" on {self.host}" if self.host else "")


def write_page(record: Record, directory: Path) -> Path | None:
    """Write ``report.html`` to the record's ``directory`` by rename; returns None where the record has no curves."""
    text = page(record, directory)
    if text is None:
        return None
    path = directory / REPORT
    replace_file(str(path), text)
    return path


def page(record: Record, directory: Path) -> str | None:
    """The text of the page, from the record and its series files; None where there are no curves.

    Raises ``UsageProblem`` where a file of it lies outside of ``directory``.
    """
    runs = _runs(record.series)
    shown = [run for prefix, series in runs.items() if (run := _run(prefix, series, directory))]
    if not shown:
        return None
    return render(
        "finetune.html.j2",
        record=record,
        title=record.kind.removeprefix("bench.").replace("-", " ").capitalize(),
        runs=shown,
        figures=[
            {
                "name": figure.name,
                "value": format_value(figure.value, figure.unit),
                "where": _where(figure.rank, figure.host),
                "engine": figure.engine,
                "medium": figure.medium,
            }
            for figure in record.measurements
        ],
        left_out=[f"{check.id}: {check.found}" for check in record.checks if check.id.startswith("curves.")],
        tensorboard=(directory / "tensorboard").is_dir(),
    )


def _runs(series: Sequence[Series]) -> dict[str, list[Series]]:
    """Group the series by run: a run's name is the part of a series' name before the last slash."""
    by_run: dict[str, list[Series]] = {}
    for each in series:
        by_run.setdefault(each.name.rpartition("/")[0], []).append(each)
    return by_run


def _run(prefix: str, series: Sequence[Series], directory: Path) -> Mapping[str, Any] | None:
    read = [(each, points) for each in series if (points := _points(below(directory, each.file)))]
    if not read:
        return None
    until = max(points[-1][0] for _, points in read)
    workers = _workers([each for each, _ in read], directory)
    sections = []
    for title, curves in _SECTIONS:
        plots = []
        for name, label in curves:
            by_rank = {each.rank: (each, points) for each, points in read if each.name.rpartition("/")[2] == name}
            if by_rank:
                # Every worker keeps its colour, whether this plot shows it or not.
                lines = [
                    Line(worker.name, by_rank[worker.rank][1] if worker.rank in by_rank else []) for worker in workers
                ]
                plots.append(plot(label, next(iter(by_rank.values()))[0].unit, lines, until))
        if plots:
            sections.append({"title": title, "plots": plots})
    return {"title": prefix, "legend": legend_of([worker.name for worker in workers]), "sections": sections}


def _workers(series: Sequence[Series], directory: Path) -> list[_Worker]:
    files = {each.rank: each.file for each in series if each.rank is not None}
    abouts = {rank: below(directory, str(Path(file).with_name("about.json"))) for rank, file in files.items()}
    return [_Worker(rank, _host(about)) for rank, about in sorted(abouts.items())]


def _host(about: Path) -> str | None:
    try:
        return str(read_json(about)["host"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _points(file: Path) -> Points:
    curve = read_curve(file)
    return finite(curve) if curve is not None else []


def _where(rank: int | None, host: str | None) -> str:
    return " on ".join(part for part in (f"rank {rank}" if rank is not None else "", host or "") if part)
