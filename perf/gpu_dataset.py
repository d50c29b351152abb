"""How fast do batches of training data come to a GPU by `tunetool.loading.GpuDirectDataset`, beside kvikio and fio?

    .venv/bin/python perf/gpu_dataset.py [--disk /var/tmp] [--memory /dev/shm] [--media disk,tmpfs] [--size 1GB]
                                         [--sequence-length 524288] [--threads 12] [--rounds 6] [--sweep]

Runs `tunetool bench dataset` with gpu-direct, kvikio and fio on one file of samples of 1 MiB, cold from the disk and on
the tmpfs, and prints its tables. `--device cpu` reads into the host's memory, without kvikio.

`--sweep` compares engines and numbers of threads of the dataset on both media in one process, warm on the tmpfs and
cold on the disk, and judges nothing.

Goal: at least 0.9 of the faster of kvikio and fio in the same round. Ends with 1 where it is missed or bytes differ,
else with 3 where it is not decided or could not be measured.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from entry import program
from goals import MISSED, OPEN, figure, line, status
from tunetool.bench.dataset.engines import FIO, GPU_DIRECT, KVIKIO
from tunetool.bench.dataset.figures import READ
from tunetool.node.units import parse_size
from tunetool.record import Record, chosen

GOAL = 0.9
STATES = {"disk": "cold", "tmpfs": "warm"}
SWEPT = (4, 8, 12, 16, 32)


def judge(record: Record, state: str, title: str) -> list[str]:
    """Print a line for the goal and one for each peer; the goal's verdict."""
    samples = {
        name: each.samples or []
        for name in (GPU_DIRECT, KVIKIO, FIO)
        for each in chosen(record.measurements, READ, state=state, engine=name)
    }
    ours = samples.pop(GPU_DIRECT, [])
    peers = {name: speeds for name, speeds in samples.items() if len(speeds) == len(ours)}
    if not ours or not peers:
        print(f"{title}, of the faster of kvikio and fio: not measured here")
        return [OPEN]
    for name, speeds in {GPU_DIRECT: ours, **peers}.items():
        print(figure(f"{title}, {name}, GB/s", [each / 1e9 for each in speeds]))
    for name, speeds in peers.items():
        print(figure(f"{title}, times {name}", [our / its for our, its in zip(ours, speeds, strict=True)]))
    best = [max(row) for row in zip(*peers.values(), strict=True)]
    ratios = [our / other for our, other in zip(ours, best, strict=True)]
    return [line(f"{title}, of the faster of {' and '.join(peers)}", ratios, GOAL)]


def compare(options: argparse.Namespace, medium: str, directory: Path) -> list[str]:
    from rich.console import Console  # noqa: PLC0415  --help needs none of these

    from tunetool.bench.dataset.request import Request  # noqa: PLC0415
    from tunetool.bench.dataset.run import bench  # noqa: PLC0415
    from tunetool.report.kinds import print_record  # noqa: PLC0415
    from tunetool.report.progress import PlainProgress  # noqa: PLC0415

    request = Request(
        target=directory,
        size=parse_size(options.size),
        sequence_length=options.sequence_length,
        threads=options.threads,
        device=options.device,
        workers=(0,),
        states=(STATES[medium],),
        seconds=options.duration,
        engines=(GPU_DIRECT, KVIKIO, FIO),
        rounds=options.rounds,
        runs_dir=options.runs_dir,
        allow_busy=True,
    )
    result = bench(request, PlainProgress())
    record: Any = result.record
    print_record(record, result.path, Console(width=120))
    differs = any(check.status == "fail" for check in record.checks)
    words = judge(record, STATES[medium], medium)
    return [*words, MISSED] if differs else words


def sweep(options: argparse.Namespace, medium: str, directory: Path) -> None:
    from tunetool.bench.dataset.batch_child import hand_out, in_batches  # noqa: PLC0415  --help needs none of these
    from tunetool.bench.dataset.run import bring_to  # noqa: PLC0415
    from tunetool.loading.gpu_direct import BouncingBytes, Engine, GpuDirectDataset  # noqa: PLC0415

    size, sample = parse_size(options.size), 2 * options.sequence_length
    file = directory / "samples.bin"
    with file.open("wb") as stream:
        for _ in range(size // sample):
            stream.write(os.urandom(sample))
        os.fsync(stream.fileno())
    warnings.simplefilter("ignore", BouncingBytes)
    speeds: dict[tuple[Engine, int], list[float]] = {}
    engines: tuple[Engine, ...] = ("threads",) if options.device == "cpu" else ("threads", "kvikio")
    for number, engine, threads in itertools.product(range(options.rounds), engines, SWEPT):
        with GpuDirectDataset(file, sample, device=options.device, threads=threads, engine=engine) as dataset:
            drawn = in_batches([(7 * each + number) % len(dataset) for each in range(len(dataset))], sample)
            if medium == "disk":
                bring_to("cold", directory)
            started = time.perf_counter()
            done = hand_out(dataset, drawn, options.duration, options.device)
            speeds.setdefault((engine, threads), []).append(done * sample / (time.perf_counter() - started) / 1e9)
    for (engine, threads), each in speeds.items():
        print(f"{medium}, {engine}, {threads} threads: {median(each):.2f} [{min(each):.2f} to {max(each):.2f}] GB/s")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--disk", default="/var/tmp", help="a directory on the drives")
    parser.add_argument("--memory", default="/dev/shm", help="a directory on a tmpfs")
    parser.add_argument("--media", default="disk,tmpfs")
    parser.add_argument("--size", default="1GB", help="of the file")
    parser.add_argument("--sequence-length", type=int, default=524288, help="tokens of two bytes in a sample")
    parser.add_argument("--threads", type=int, default=12)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--duration", type=float, default=2.0, help="the longest time of a pass in seconds")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--runs-dir", type=Path, help="directory where the records are kept")
    parser.add_argument("--sweep", action="store_true", help="numbers of threads")
    options = parser.parse_args(arguments)
    where = {"disk": options.disk, "tmpfs": options.memory}
    if not {*options.media.split(",")} <= {*where}:
        raise SystemExit(f"error: media are {', '.join(where)}")
    words: list[str] = []
    for medium in options.media.split(","):
        with tempfile.TemporaryDirectory(prefix="tunetool-dataset-", dir=where[medium]) as folder:
            if options.sweep:
                sweep(options, medium, Path(folder))
            else:
                words += compare(options, medium, Path(folder))
    return status(words)


if __name__ == "__main__":
    program(lambda: main(sys.argv[1:]))
