"""fio's command lines for the ladder. Raw reads are read-only twice over: for fio, and so for what it opens."""

from __future__ import annotations

from collections.abc import Sequence

from tunetool.measure import Direction
from tunetool.measure.fio import Fio, Job, arguments
from tunetool.measure.ladder.budget import RAW_BLOCK, RAW_DEPTH
from tunetool.measure.ladder.source import Span
from tunetool.measure.metrics import Metric

BANDWIDTH_LOG = "bandwidth"


def raw_reads(
    fio: Fio,
    groups: Sequence[tuple[str, Sequence[Span]]],
    seconds: float,
    drives_each: int = 1,
    engine: str = "libaio",
) -> list[str]:
    """Read the spans of each group at once and the groups one after the other, each for ``seconds``.

    ``drives_each``: number of drives behind a device of the groups; an array needs every drive's queue filled.
    """
    argv = [
        fio.path,
        "--readonly",
        # A drive that has just gone must not become a file of its name in /dev.
        "--allow_file_create=0",
        "--thread=1",
        "--rw=read",
        f"--bs={RAW_BLOCK}",
        "--direct=1",
        f"--ioengine={engine}",
        "--time_based=1",
        f"--runtime={round(seconds * 1000)}ms",
        "--output-format=json",
    ]
    for group, (name, spans) in enumerate(groups):
        for number, span in enumerate(spans):
            argv.append(f"--name={name}")
            if group and not number:
                argv.append("--stonewall=1")
            argv += [
                f"--filename=/dev/{span.device}",
                f"--offset={span.offset}",
                f"--size={span.length}",
                f"--iodepth={depth(span, spans, drives_each)}",
            ]
    return argv


def depth(span: Span, spans: Sequence[Span], drives_each: int = 1) -> int:
    """The span's share of its device's queue."""
    return max(1, RAW_DEPTH * drives_each // sum(each.device == span.device for each in spans))


def random_io(fio: Fio, metric: Metric, engine: str, jobs: int, file_bytes: int, seconds: float) -> list[str]:
    """Random requests to the run's files."""
    direction, block = metric.direction, metric.block_bytes
    job = Job(direction, jobs, file_bytes, seconds, block_bytes=block, queue_depth=metric.queue_depth, engine=engine)
    # Without a map of what was touched: it would cost memory and cores, and nothing depends on it.
    argv = [*_replaced(arguments(fio, job), f"--rw={direction}", f"--rw=rand{direction}"), "--norandommap=1"]
    return argv if direction == "write" else [*argv, "--readonly"]


def sustained(fio: Fio, jobs: int, file_bytes: int, seconds: float, interval: float) -> list[str]:
    """One long write over the run's files, with its bandwidth every ``interval`` seconds in a log of each job."""
    argv = arguments(fio, Job("write", jobs, file_bytes, seconds))
    return [*argv, f"--write_bw_log={BANDWIDTH_LOG}", f"--log_avg_msec={round(interval * 1000)}"]


def sequential(fio: Fio, direction: Direction, engine: str, jobs: int, file_bytes: int, seconds: float) -> list[str]:
    """As level quick does it, by another engine."""
    return arguments(fio, Job(direction, jobs, file_bytes, seconds, engine=engine))


def _replaced(argv: list[str], old: str, new: str) -> list[str]:
    return [new if word == old else word for word in argv]


def intervals(logs: Sequence[str]) -> list[float]:
    """Bytes per second of all jobs together, interval by interval, as long as every job has one.

    A line of fio's log is: milliseconds, KiB/s, direction, block, offset.
    """
    columns = [[float(line.split(",")[1]) * 1024 for line in text.splitlines() if line.strip()] for text in logs]
    return [sum(row) for row in zip(*columns, strict=False)]
