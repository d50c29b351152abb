"""How fast do a model's weights come to a GPU, by which loader, from drives, page cache and tmpfs?

    .venv/bin/python perf/loading.py [--model 7b] [--disk /var/tmp] [--media disk,tmpfs,huge] [--rounds 6]
                                     [--device cuda] [--gpus 1,2] [--engines direct,instanttensor,...] [--sweep]

Runs `tunetool bench loading` with the reference model (7b: 16.6 GB) on the disk and on two tmpfs that this program
mounts where only it sees them, with `huge=never` and `huge=within_size` (root, or a user who may make namespaces), and
prints its tables. See docs/guides/bench-loading.md for what `first` and `warm` mean and what is compared with what.

`--sweep` compares sizes of buffers and numbers of threads of `tunetool.loading` on the tmpfs, and judges nothing.

A line for each goal: the median over the rounds of a ratio within a round, its interval, the goal, and `held`,
`missed`, or `not decided` where the interval crosses the goal. Ends with 1 where a goal is missed or bytes differ, else
with 3 where one is not decided or could not be measured.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from entry import program
from goals import MISSED, OPEN, line, status
from tunetool.bench.loading.engines import DIRECT

PEER = "instanttensor"
POLICY = {"tmpfs": "never", "huge": "within_size"}
DISK = "disk"
SWEEP = tuple(itertools.product((4 << 20, 8 << 20, 16 << 20), (12, 16)))


@dataclass(frozen=True)
class Goal:
    """``figure`` over ``other`` in the same round."""

    title: str
    figure: str
    other: str
    goal: float

    def ratios(self, samples: Mapping[str, Sequence[float]]) -> list[float]:
        """One for each round; none where a round lacks a figure."""
        ours, others = samples.get(self.figure, ()), samples.get(self.other, ())
        return [each / other for each, other in zip(ours, others, strict=True)] if len(ours) == len(others) else []


MEMORY = {"tmpfs": "tmpfs", "huge": "tmpfs with huge pages"}


def of_memory(medium: str, title: str) -> tuple[Goal, ...]:
    warm, first = f"{medium}.{DIRECT}.warm", f"{medium}.{DIRECT}.first"
    return (
        Goal(f"{title}, warm, share of pinned copies", warm, f"{medium}.pinned", 0.9),
        Goal(f"{title}, warm, against InstantTensor", warm, f"{medium}.{PEER}.warm", 1),
        Goal(f"{title}, first in a process, against InstantTensor", first, f"{medium}.{PEER}.first", 1),
        Goal(f"{title}, first in a process, share of warm (1 / 1.2)", first, warm, 1 / 1.2),
    )


GOALS = (
    *(goal for medium, title in MEMORY.items() for goal in of_memory(medium, title)),
    Goal("cold from drives, share of fio's read", f"cold.{DIRECT}.first", "cold.fio", 0.95),
)


def judge(samples: Mapping[str, Sequence[float]]) -> list[str]:
    """Print a line for each goal; their verdicts."""
    words = []
    for goal in GOALS:
        ratios = goal.ratios(samples)
        if ratios:
            words.append(line(goal.title, ratios, goal.goal))
        else:
            print(f"{goal.title}: not measured here")
            words.append(OPEN)
    return words


def compare(options: argparse.Namespace, media: Mapping[str, Path]) -> int:
    from rich.console import Console  # noqa: PLC0415  --help needs none of these

    from tunetool.bench.loading.request import Request  # noqa: PLC0415
    from tunetool.bench.loading.run import bench  # noqa: PLC0415
    from tunetool.report.kinds import print_record  # noqa: PLC0415
    from tunetool.report.progress import PlainProgress  # noqa: PLC0415

    request = Request(
        model=options.model,
        target=media.get(DISK),
        memory_targets=tuple(path for medium, path in media.items() if medium != DISK),
        device=options.device,
        gpus=tuple(int(each) for each in options.gpus.split(",")),
        engines=tuple(options.engines.split(",")),
        rounds=options.rounds,
        runs_dir=options.runs_dir or options.inside / "runs",
        allow_busy=True,
    )
    result = bench(request, PlainProgress())
    record: Any = result.record
    print_record(record, result.path, Console(width=120))
    words = judge({each.name.partition(".")[2]: each.samples or [] for each in record.measurements})
    differs = any(check.status == "fail" for check in record.checks)
    return status([*words, MISSED] if differs else words)


def sweep(options: argparse.Namespace, directory: Path) -> int:
    from tunetool.bench.loading.ranks import Ranks  # noqa: PLC0415  --help needs none of these
    from tunetool.training.model import reference_model  # noqa: PLC0415

    model = directory / "model"
    reference_model.build(options.model, model, 0)
    size = reference_model.describe(options.model).bytes
    figures: dict[tuple[int, int], list[tuple[float, ...]]] = {}
    for _, (buffer_bytes, threads) in itertools.product(range(options.rounds), SWEEP):
        with Ranks("tunetool.loading", 1, options.device, os.environ, lambda: None) as ranks:
            ranks.start()
            settings = {"buffer_bytes": buffer_bytes, "threads": threads}
            loads = [ranks.load(DIRECT, model, size, settings)[0] for _ in range(2)]
        figures.setdefault((buffer_bytes, threads), []).append(
            tuple(load["bytes"] / load["seconds"] / 1e9 for load in loads)
        )
    for (buffer_bytes, threads), rows in figures.items():
        first, warm = (
            f"{median(speeds):.1f} [{min(speeds):.1f} to {max(speeds):.1f}]" for speeds in zip(*rows, strict=True)
        )
        print(f"buffers of {buffer_bytes >> 20} MiB, {threads} threads: first {first}, warm {warm} GB/s")
    return 0


def prepare(inside: Path, wanted: Sequence[str]) -> dict[str, Path]:
    """A directory on each medium."""
    if not {*wanted} <= {DISK, *POLICY}:
        raise SystemExit(f"error: media are {DISK}, {', '.join(POLICY)}")
    media = {}
    for medium in wanted:
        directory = inside / medium
        directory.mkdir()
        if medium in POLICY:
            mount = ["mount", "-t", "tmpfs", "-o", f"huge={POLICY[medium]},size=90%", "none", str(directory)]
            if subprocess.run(mount, check=False).returncode:
                print(f"skip {medium}: this machine mounts no tmpfs with huge={POLICY[medium]}")
                continue
        media[medium] = directory
    return media


def inside_a_namespace(arguments: Sequence[str], disk: str) -> int:
    """Run this program again where its mounts are seen by nobody else, and end with it."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    with tempfile.TemporaryDirectory(prefix="tunetool-loading-", dir=disk) as folder:
        command = ["unshare", *user, "--mount", "--propagation", "private", sys.executable, __file__, *arguments]
        return subprocess.run([*command, "--inside", folder], check=False).returncode


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="7b", help="size of the reference model that is made: 7b, 3b, tiny")
    parser.add_argument("--disk", default="/var/tmp", help="where the model is made: a directory on the drives")
    parser.add_argument("--media", default=",".join((DISK, *POLICY)))
    parser.add_argument("--device", default="auto", help="auto: cuda where there is a GPU, else cpu")
    parser.add_argument("--gpus", default="1", help="as for `bench loading`")
    parser.add_argument("--engines", default="*", help="as for `bench loading`")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--runs-dir", type=Path, help="directory where the record is kept")
    parser.add_argument("--sweep", action="store_true", help="buffers and threads of tunetool.loading, on the tmpfs")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside is None:
        return inside_a_namespace(arguments, options.disk)
    media = prepare(options.inside, ["tmpfs"] if options.sweep else options.media.split(","))
    return sweep(options, media["tmpfs"]) if options.sweep else compare(options, media)


if __name__ == "__main__":
    program(lambda: main(sys.argv[1:]))
