"""The curves of every worker of a fine-tune, drawn from the series files of its record."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tunetool.record import Record, Series
from tunetool.regular_files import below, read_json
from tunetool.training.rank.curve_files import finite, read_curve
from tunetool.view.curves import Line, Points, legend_of, plot
from tunetool.view.model import Plot, Section

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


def sections_of(record: Record, directory: Path) -> list[Section]:
    """The curves as sections of a page, for each run of the record.

    Raises ``UsageProblem`` where a file of it lies outside of ``directory``.
    """
    return [
        section for prefix, series in _runs(record.series).items() for section in _sections(prefix, series, directory)
    ]


def _runs(series: Sequence[Series]) -> dict[str, list[Series]]:
    """Group the series by run: a run's name is the part of a series' name before the last slash."""
    by_run: dict[str, list[Series]] = {}
    for each in series:
        by_run.setdefault(each.name.rpartition("/")[0], []).append(each)
    return by_run


def _sections(prefix: str, series: Sequence[Series], directory: Path) -> Iterator[Section]:
    read = [(each, points) for each in series if (points := _points(below(directory, each.file)))]
    until = max((points[-1][0] for _, points in read), default=0.0)
    workers = _workers([each for each, _ in read], directory)
    legend = legend_of([worker.name for worker in workers])
    for title, curves in _SECTIONS:
        plots: list[Plot] = []
        for name, label in curves:
            by_rank = {each.rank: (each, points) for each, points in read if each.name.rpartition("/")[2] == name}
            if by_rank:
                # Every worker keeps its colour, whether this plot shows it or not.
                lines = [
                    Line(worker.name, by_rank[worker.rank][1] if worker.rank in by_rank else []) for worker in workers
                ]
                drawn = plot(label, next(iter(by_rank.values()))[0].unit, lines, until)
                plots.append(Plot(drawn, legend if not plots else ()))
        if plots:
            yield Section(f"{prefix}: {title}" if prefix else title, plots)


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
