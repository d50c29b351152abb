"""fio's read of the files of a model, past the page cache: what a load from cold drives can reach."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tunetool.loading.safetensors_files import files_of
from tunetool.measure import fio as programs
from tunetool.measure.fio import Fio

_SLOWEST = 10e6
"""Bytes per second, for the longest time that it may take."""


def read(fio: Fio, model: Path, environment: Mapping[str, str], tick: Callable[[], None]) -> float:
    """Bytes per second of reads of all files at the same time, each once. Raises ``FioFailed``."""
    # Hugging Face's caches consist of links.
    paths = [(model / name).resolve() for name in files_of(model)]
    sizes = [path.stat().st_size for path in paths]
    job = programs.Job("read", 1, min(sizes), block_bytes=1 << 20 if min(sizes) >= 1 << 20 else 4096, queue_depth=16)
    argv = [
        fio.path,
        "--thread=1",
        "--group_reporting=1",
        "--readonly",
        f"--rw={job.direction}",
        f"--bs={job.block_bytes}",
        "--direct=1",
        f"--ioengine={job.engine}",
        f"--iodepth={job.queue_depth}",
        "--output-format=json",
    ]
    for number, path in enumerate(paths):
        # fio takes a colon for the end of a name.
        argv += [f"--name=file-{number}", "--filename=" + str(path).replace(":", "\\:")]
    done = programs.execute(fio, argv, model, environment, 60 + sum(sizes) / _SLOWEST, tick)
    return programs.parse(fio, job, *done).bandwidth
