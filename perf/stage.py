"""Is `tunetool stage` quicker than `cp -r`, `rsync -a` and `rclone copy --transfers 8`, and how near to the storage?

    .venv/bin/python perf/stage.py --source DIR [--target /dev/shm] [--model 16GB] [--images 2000] [--rounds 6]
    .venv/bin/python perf/stage.py --source DIR [--target /dev/shm] --small 100000 [--small-bytes 4096] [--rounds 6]

The first makes a model of four files and images of 3 MB under DIR, then copies both to the target by each program in
turn, the source out of the page cache before each (posix_fadvise, DONTNEED). In every round, each program once, each
time another first. Seconds are those of the whole process, Python's start included, with compiled files as in an
installed package. fio reads the same model files past
the page cache and writes new files to the target in every round too: the slower of both is what a copy can reach.

The second copies so many small files in 100 directories, out of the page cache too, in turn by `tunetool stage`, by a
stream of tar (`tar -c | tar -x`) and by `cp -r`; then `tunetool stage` once more, to the copy that is there.

A line for each goal: the figure's median, its interval over the rounds, the goal, and `held`, `missed`, or `not
decided` where the interval crosses the goal. What binds is named, as `tunetool stage` found it. Ends with 1 where a
goal is missed, else with 3 where one is not decided. How many times the best other program it is, and how many times
the storage itself allows, is said without a goal: no program copies faster than fio reads.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from entry import program
from goals import figure, line, status
from installed import keep_compiled
from tunetool.measure.statistics import estimate
from tunetool.node.units import parse_size

IMAGE_BYTES = 3_000_000
MODEL_FILES = 4
SHARE = 0.9
TAR_TIMES, THERE_TIMES = 1.5, 1.0
OURS = "tunetool stage"
BLOCK = 64 * 2**20


def make(directory: Path, model_bytes: int, images: int) -> int:
    """Write the data; returns its bytes. Random, each block marked, so that nothing can compress or deduplicate it."""
    block = bytearray(os.urandom(BLOCK))
    jobs = [
        (directory / f"model/part-{number}.safetensors", model_bytes // MODEL_FILES) for number in range(MODEL_FILES)
    ]
    jobs += [(directory / f"images/{number:05}.jpg", IMAGE_BYTES) for number in range(images)]
    for count, (path, size) in enumerate(jobs):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb", buffering=0) as stream:
            for at in range(0, size, BLOCK):
                block[:16] = count.to_bytes(8, "little") + at.to_bytes(8, "little")
                stream.write(memoryview(block)[: min(BLOCK, size - at)])
            os.fsync(stream.fileno())
    return sum(size for _, size in jobs)


def cool(directory: Path) -> None:
    """Drop the source from the page cache."""
    for path in directory.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def programs(runs: Path, extra: Sequence[str]) -> dict[str, Callable[[Path, Path], list[str]]]:
    """By name, the command line of each program that is installed."""
    tunetool = [sys.executable, "-m", "tunetool", "stage", "--runs-dir", str(runs), *extra]
    commands: dict[str, Callable[[Path, Path], list[str]]] = {
        OURS: lambda source, target: [*tunetool, str(source), str(target)],
        "cp -r": lambda source, target: ["cp", "-r", str(source), str(target)],
    }
    if shutil.which("rsync"):
        commands["rsync -a"] = lambda source, target: ["rsync", "-a", f"{source}/", f"{target}/"]
    if shutil.which("rclone"):
        commands["rclone copy --transfers 8"] = lambda source, target: [
            "rclone", "copy", "--transfers", "8", str(source), str(target),
        ]  # fmt: skip
    return commands


def start_once(directory: Path, target: Path) -> None:
    """Start `tunetool stage` before the rounds: its compiled files are there then."""
    source, copy = directory / "empty", target / "empty"
    source.mkdir()
    timed(programs(directory / "first-run", [])[OURS](source, copy))
    shutil.rmtree(copy)


def timed(command: list[str]) -> float:
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - started
    if done.returncode != 0:
        raise SystemExit(f"error: `{' '.join(command)}` ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return seconds


def fio(arguments: list[str], direction: str) -> float:
    """Bytes per second over all jobs."""
    done = subprocess.run(
        ["fio", "--output-format=json", "--group_reporting", "--thread", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"error: `fio` ended with {done.returncode}\n{done.stdout[-500:]}{done.stderr[-500:]}")
    return float(json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][direction]["bw_bytes"])


def read_of_source(model: Path) -> float:
    """Read all model files at the same time, once, past the page cache; bytes per second."""
    common = ["--ioengine=libaio", "--direct=1", "--bs=1M", "--iodepth=16", "--rw=read", "--readonly"]
    jobs = [part for path in sorted(model.iterdir()) for part in (f"--name={path.name}", f"--filename={path}")]
    return fio([*common, *jobs], "read")


def write_to_target(target: Path, size: int, jobs: int) -> float:
    """Bytes per second at which fio writes ``jobs`` new files until they are on the medium."""
    directory = Path(tempfile.mkdtemp(prefix="stage-fio-", dir=target))
    common = ["--ioengine=psync", "--rw=write", "--bs=1M", "--fallocate=truncate", "--end_fsync=1"]
    try:
        share = max(2**20, size // jobs // 2**20 * 2**20)
        return fio([*common, f"--directory={directory}", "--name=w", f"--numjobs={jobs}", f"--size={share}"], "write")
    finally:
        shutil.rmtree(directory)


def spread(values: Sequence[float], unit: float = 1e9) -> str:
    interval = estimate(values)
    level = f", {interval.level:.0%}" if len(values) >= 6 else ""
    return f"{interval.value / unit:6.2f} [{interval.low / unit:.2f} to {interval.high / unit:.2f}{level}]"


def figures(runs: Path) -> list[dict[str, Any]]:
    """The figures of tunetool's runs, from their records."""
    measurements = [json.loads(path.read_text())["measurements"][0] for path in sorted(runs.glob("*/record.json"))]
    return [{"value": measurement["value"], **measurement["parameters"]} for measurement in measurements]


def measure(
    options: argparse.Namespace, directory: Path, target: Path, runs: Path
) -> tuple[int, dict[str, list[float]], list[float], list[float]]:
    """Size, bytes per second of each program by rounds, fio's read and write."""
    data = directory / "data"
    size = make(data, parse_size(options.model), options.images)
    print(f"{size / 1e9:.2f} GB under {directory}, copied to {target}; {os.cpu_count()} CPUs", flush=True)
    extra = [] if options.threads is None else ["--threads", str(options.threads)]
    commands = programs(runs, extra)
    names = list(commands)
    speeds: dict[str, list[float]] = {name: [] for name in names}
    reads: list[float] = []
    writes: list[float] = []
    for turn in range(options.rounds):
        load = os.getloadavg()[0]
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            cool(data)
            copy = target / "copy"
            speeds[name].append(size / timed(commands[name](data, copy)))
            print(f"{name}: {speeds[name][-1] / 1e9:.2f} GB/s", file=sys.stderr, flush=True)
            shutil.rmtree(copy)
            (target / ".copy.tunetool-stage.json").unlink(missing_ok=True)
        cool(data)
        reads.append(read_of_source(data / "model"))
        writes.append(write_to_target(target, size, options.fio_jobs))
        speeds_text = ", ".join(f"{name} {speeds[name][-1] / 1e9:.2f}" for name in names)
        print(f"round {turn + 1} (load {load:.1f}): {speeds_text}; fio read {reads[-1] / 1e9:.2f}", end="")
        print(f", write {writes[-1] / 1e9:.2f} GB/s", flush=True)
    return size, speeds, reads, writes


def report(size: int, speeds: dict[str, list[float]], reads: list[float], writes: list[float], runs: Path) -> int:
    """Print the result; the exit status."""
    print(f"\nGB/s of {size / 1e9:.2f} GB, medians of {len(reads)} rounds")
    for name, values in speeds.items():
        print(f"{name:26} {spread(values)}")
    records = figures(runs)
    print(f"{'  by its own clock':26} {spread([record['value'] for record in records])}")
    print(f"{'fio read of the source':26} {spread(reads)}")
    print(f"{'fio write to the target':26} {spread(writes)}")
    best = max((name for name in speeds if name != OURS), key=lambda name: median(speeds[name]))
    times = [mine / theirs for mine, theirs in zip(speeds[OURS], speeds[best], strict=True)]
    shares = [mine / min(pair) for mine, *pair in zip(speeds[OURS], reads, writes, strict=True)]
    middle = sorted(records, key=lambda record: record["seconds"])[len(records) // 2]
    binds = {record["binds"] for record in records}
    print(
        f"binds: {', '.join(sorted(binds))}; in the median run of {middle['seconds']:.2f} s, {middle['threads']} "
        f"threads read for {middle['reading_seconds']:.2f} s, wrote for {middle['writing_seconds']:.2f} s, summed up "
        f"for {middle['checksum_seconds']:.2f} s; CPU {middle['cpu_seconds']:.2f} s on {middle['cpus']}, busy for "
        f"{middle['cpu_busy']:.0%}"
    )
    absent = [name for name in ("rsync", "rclone") if not shutil.which(name)]
    if absent:
        print(f"not installed, so not compared: {', '.join(absent)}")
    limits = [min(pair) / theirs for theirs, *pair in zip(speeds[best], reads, writes, strict=True)]
    print(figure(f"the slower of fio's read and write, times {best}", limits))
    print(figure(f"`{OURS}`, times the best other ({best})", times))
    return status([line("share of the slower of fio's read and write", shares, SHARE)])


def make_small(directory: Path, count: int, size: int) -> None:
    content = os.urandom(size)
    for number in range(count):
        path = directory / f"{number % 100:02}/{number:06}.txt"
        if number < 100:
            path.parent.mkdir(parents=True)
        path.write_bytes(content)
    os.sync()  # what is not on the disk yet stays in the page cache, whatever is asked for


def small(options: argparse.Namespace, directory: Path, target: Path) -> int:
    """Copy many small files; the exit status."""
    source, copy, runs = directory / "small", target / "copy", directory / "runs"
    make_small(source, options.small, options.small_bytes)
    print(
        f"{options.small} files of {options.small_bytes} bytes, {source} to {target}; {os.cpu_count()} CPUs", flush=True
    )
    again = "tunetool stage, there already"
    commands = {name: make(source, copy) for name, make in programs(runs, []).items() if name in (OURS, "cp -r")}
    whence, to = shlex.quote(str(source)), shlex.quote(str(copy))
    stream = f"mkdir {to} && tar -C {whence} -cf - . | tar -C {to} -xf -"
    commands["tar"] = ["sh", "-c", stream]
    names = list(commands)
    seconds: dict[str, list[float]] = {name: [] for name in (*names, again)}
    for turn in range(options.rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            cool(source)
            seconds[name].append(timed(commands[name]))
            if name == OURS:
                seconds[again].append(timed(commands[name]))
            shutil.rmtree(copy)
            (target / ".copy.tunetool-stage.json").unlink(missing_ok=True)
        row = ", ".join(f"{name} {values[-1]:.2f} s" for name, values in seconds.items())
        print(f"round {turn + 1} (load {os.getloadavg()[0]:.1f}): {row}", flush=True)
    print(f"\nseconds, medians of {options.rounds} rounds")
    for name, values in seconds.items():
        print(f"{name:32} {spread(values, 1)}")
    over_tar, over_cp = (
        [mine / theirs for mine, theirs in zip(seconds[ours], seconds[other], strict=True)]
        for ours, other in ((OURS, "tar"), (again, "cp -r"))
    )
    words = [line("seconds of `tunetool stage` over those of a stream of tar", over_tar, TAR_TIMES, at_least=False)]
    words.append(line("seconds to see that all is there over those of `cp -r`", over_cp, THERE_TIMES, at_least=False))
    return status(words)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="a directory on the storage that is read")
    parser.add_argument("--target", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--model", default="16GB")
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int, help="of ours; default: its own")
    parser.add_argument("--fio-jobs", type=int, default=min(8, 2 * (os.cpu_count() or 1)), help="that write")
    parser.add_argument("--small", type=int, help="copy so many small files instead")
    parser.add_argument("--small-bytes", type=int, default=4096)
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="stage-", dir=options.source))
    target = Path(tempfile.mkdtemp(prefix="stage-", dir=options.target))
    keep_compiled(directory / "compiled")
    try:
        start_once(directory, target)
        if options.small is not None:
            return small(options, directory, target)
        return report(*measure(options, directory, target, directory / "runs"), directory / "runs")
    finally:
        shutil.rmtree(directory)
        shutil.rmtree(target)


if __name__ == "__main__":
    program(main)
