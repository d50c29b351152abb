"""How fast do a model's weights come to a GPU, by which loader, from drives, page cache and tmpfs?

    .venv/bin/python perf/loading.py [--model 7b | --directory DIR] [--disk /var/tmp] [--rounds 6] [--device cuda]
                                     [--loaders tunetool,instanttensor,...] [--media tmpfs,cold] [--sweep]

Makes the reference model (7b: 16.6 GB) on the disk and on two tmpfs that it mounts where only this program sees them,
with `huge=never` and `huge=within_size` (root, or a user who may make namespaces), or takes the files of DIR. In every
round each loader loads from each medium in a process of its own, each time another first: `first` is the load of a
fresh process with the import of the loader's library, `warm` the next one in the same process. torch's own import and
the set-up of the device count for nobody. Media: `cold` (out of the page cache, the drives read), `cache` (in the page
cache), `tmpfs`, `huge` (tmpfs with huge pages). All bytes are compared by checksums. Beside them: copies from pinned
memory to the GPU, which no loader can exceed, and fio's read of the same files past the page cache. A loader that is
not installed, or that needs a GPU, is left out with the line that installs it.

`--sweep` compares sizes of buffers and numbers of threads of `tunetool.loading` on the tmpfs, and judges nothing.

A line for each goal: the median over the rounds of a ratio within a round, its interval, the goal, and `held`,
`missed`, or `not decided` where the interval crosses the goal. Ends with 1 where a goal is missed or bytes differ, else
with 3 where one is not decided or could not be measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from goals import MISSED, OPEN, ROUNDS, line, status
from stage import cool, fio
from tunetool.measure.statistics import estimate

CHILD = Path(__file__).with_name("loading_child.py")
MEDIA = ("cold", "cache", "tmpfs", "huge")
OURS, PEER, PLAIN = "tunetool", "instanttensor", "plain"
POLICY = {"tmpfs": "never", "huge": "within_size"}
SWEEP = tuple(itertools.product((1 << 20, 2 << 20, 4 << 20, 8 << 20), (8, 16, 32)))
PATIENCE = 3600

Row = dict[str, float]
"""The figures of one round in bytes per second, by names such as ``tmpfs tunetool warm``, ``pinned`` and ``fio``."""


@dataclass(frozen=True)
class Goal:
    """``figure`` over ``other`` in the same round."""

    title: str
    figure: str
    other: str
    goal: float

    def ratios(self, rows: Sequence[Row]) -> list[float]:
        """One for each round that has both."""
        return [row[self.figure] / row[self.other] for row in rows if self.figure in row and row.get(self.other)]


GOALS = (
    Goal("tmpfs, warm, share of pinned copies", f"tmpfs {OURS} warm", "pinned", 0.9),
    Goal("tmpfs, warm, against InstantTensor", f"tmpfs {OURS} warm", f"tmpfs {PEER} warm", 1),
    Goal("tmpfs, first in a process, against InstantTensor", f"tmpfs {OURS} first", f"tmpfs {PEER} first", 1),
    Goal("tmpfs, first in a process, share of warm (1 / 1.2)", f"tmpfs {OURS} first", f"tmpfs {OURS} warm", 1 / 1.2),
    Goal("cold from drives, share of fio's read", f"cold {OURS} first", "fio", 0.95),
)


def child(order: Mapping[str, Any]) -> dict[str, Any]:
    """What the child answers, or its error."""
    done = subprocess.run(
        [sys.executable, str(CHILD), json.dumps(order)],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    try:
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        answer = {"error": f"ended with {done.returncode}: {done.stderr.strip()[-300:]}"}
    return answer


def usable(names: Sequence[str], device: str) -> list[str]:
    """Those of the loaders that can run here; says why another cannot."""
    from loading_child import LOADERS  # noqa: PLC0415  imports torch, which --help needs not

    kept = []
    for name in names:
        loader = LOADERS.get(name)
        if loader is None:
            raise SystemExit(f"error: `{name}` is not a loader; hint: use {', '.join(LOADERS)}")
        if importlib.util.find_spec(loader.module.partition(".")[0]) is None:
            print(f"skip {name}: not installed; hint: {sys.executable} -m pip install {loader.package}")
        elif loader.needs_gpu and not device.startswith("cuda"):
            print(f"skip {name}: it needs a GPU")
        else:
            kept.append(name)
    return kept


def weights(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def warm_up(directory: Path) -> None:
    """Bring the files into the page cache."""
    for path in weights(directory):
        with path.open("rb", buffering=0) as stream:
            while stream.read(16 << 20):
                pass


def read_by_fio(directory: Path) -> float:
    """Bytes per second of fio's reads of all files at the same time, past the page cache."""
    paths = weights(directory)
    # fio refuses files that are smaller than a block.
    block = "1M" if min(path.stat().st_size for path in paths) >= 1 << 20 else "4k"
    common = ["--ioengine=libaio", "--direct=1", f"--bs={block}", "--iodepth=16", "--rw=read", "--readonly"]
    return fio([*common, *(part for path in paths for part in (f"--name={path.name}", f"--filename={path}"))], "read")


class Run:
    """The rounds over ``directories``, by medium."""

    def __init__(self, directories: Mapping[str, Path], loaders: Sequence[str], device: str) -> None:
        self.directories, self.loaders, self.device = directories, loaders, device
        self.failed: dict[str, str] = {}
        whole = child(
            {"loader": PLAIN, "directory": str(next(iter(directories.values()))), "device": device, "loads": 1}
        )
        if "error" in whole:
            raise SystemExit(f"error: the files cannot be read: {whole['error']}")
        (self.digest,) = whole["digests"]

    def round(self, number: int) -> Row:
        row: Row = {}
        if self.device.startswith("cuda"):
            answer = child({"loader": "pinned", "device": self.device})
            row |= {"pinned": answer["speed"]} if "speed" in answer else {}
            self.failed |= {"pinned copies": answer["error"]} if "error" in answer else {}
        if "cold" in self.directories and shutil.which("fio"):
            cool(self.directories["cold"])
            row["fio"] = read_by_fio(self.directories["cold"])
        for medium in self.directories:
            first = number % len(self.loaders)
            for name in [*self.loaders[first:], *self.loaders[:first]]:
                row |= self._load(medium, name)
        return row

    def _load(self, medium: str, name: str, options: Mapping[str, Any] | None = None) -> Row:
        directory = self.directories[medium]
        if medium == "cold":
            cool(directory)
        elif medium == "cache":
            warm_up(directory)
        loads = 1 if medium == "cold" else 2
        order = {"loader": name, "directory": str(directory), "device": self.device, "loads": loads}
        answer = child({**order, "options": options or {}})
        if "error" in answer:
            self.failed[f"{medium} {name}"] = answer["error"]
            return {}
        if set(answer["digests"]) != {self.digest}:
            self.failed[f"{medium} {name}"] = "its tensors are not those of the files"
            return {}
        if medium == "cold" and answer["drives"][0] < 0.9 * answer["bytes"]:
            self.failed[f"{medium} {name}"] = (
                f"the drives read {answer['drives'][0]} of {answer['bytes']} bytes: not cold"
            )
            return {}
        return {
            f"{medium} {name} {which}": answer["bytes"] / seconds
            for which, seconds in zip(("first", "warm"), answer["seconds"], strict=False)
        }

    def sweep(self, rounds: int) -> None:
        medium = "tmpfs" if "tmpfs" in self.directories else next(iter(self.directories))
        for size, threads in SWEEP:
            rows = [self._load(medium, OURS, {"buffer_bytes": size, "threads": threads}) for _ in range(rounds)]
            speeds = {which: [row[f"{medium} {OURS} {which}"] for row in rows if row] for which in ("first", "warm")}
            text = ", ".join(f"{which} {median(values) / 1e9:.1f}" for which, values in speeds.items() if values)
            print(f"buffers of {size >> 20} MiB, {threads} threads: {text} GB/s", flush=True)


def report(rows: Sequence[Row], failed: Mapping[str, str]) -> int:
    """Print the table and the goals' lines; the exit status."""
    print(f"\nmedians of {len(rows)} rounds, GB/s")
    for name in dict.fromkeys(name for row in rows for name in row):
        print(f"{name:36} {median(row[name] for row in rows if name in row) / 1e9:6.2f}")
    words = []
    for goal in GOALS:
        ratios = goal.ratios(rows)
        if ratios:
            words.append(line(goal.title, ratios, goal.goal))
        else:
            print(f"{goal.title}: not measured here")
            words.append(OPEN)
    for name, reason in failed.items():
        print(f"{name}: {reason}")
    if any(name.split()[1] == OURS for name in failed):
        words.append(MISSED)
    print(which_to_use(rows))
    return status(words)


def which_to_use(rows: Sequence[Row]) -> str:
    """The sentence for each medium: the loader whose first load is fastest, if the rounds decide it."""
    sentences = []
    for medium in MEDIA:
        first = sorted(
            {name for row in rows for name in row if name.startswith(f"{medium} ") and name.endswith(" first")},
            key=lambda name: -median(row[name] for row in rows if name in row),
        )
        best, *others = [name.split()[1] for name in first] or [""]
        ratios = [row[first[0]] / row[first[1]] for row in rows if others and {*first[:2]} <= row.keys()]
        if len(ratios) >= ROUNDS and estimate(ratios).low > 1:
            sentences.append(f"{medium}: use {best}")
        elif others:
            sentences.append(f"{medium}: {best} or {others[0]}, these rounds do not decide which")
    return "; ".join(sentences) or "which to use: nothing was compared"


def make(directory: Path, size: str) -> Path:
    from tunetool.training.model import reference_model  # noqa: PLC0415  needs numpy, which --help does not

    print(f"making `{size}` in `{directory}`", file=sys.stderr, flush=True)
    reference_model.build(size, directory / "model", 0)
    return directory / "model"


def prepare(options: argparse.Namespace, inside: Path) -> dict[str, Path]:
    """The directory of each medium."""
    wanted = options.media.split(",")
    if not set(wanted) <= set(MEDIA):
        raise SystemExit(f"error: `{options.media}`: media are {', '.join(MEDIA)}")
    disk = Path(options.directory) if options.directory else make(inside / "disk", options.model)
    directories = {medium: disk for medium in ("cold", "cache") if medium in wanted}
    size = sum(path.stat().st_size for path in weights(disk))
    print(
        f"{os.uname().nodename}: Linux {os.uname().release}, {len(os.sched_getaffinity(0))} CPUs; {size / 1e9:.1f} GB"
    )
    for medium in ("tmpfs", "huge"):
        if medium in wanted:
            directory = inside / medium
            directory.mkdir()
            limit = size + (64 << 20) + size // 20
            mount = ["mount", "-t", "tmpfs", "-o", f"huge={POLICY[medium]},size={limit}", "none", str(directory)]
            if subprocess.run(mount, check=False).returncode:
                print(f"skip {medium}: this machine mounts no tmpfs with huge={POLICY[medium]}")
                continue
            # Not `cp`: a tmpfs gives huge pages only to what lies within the file's size when it is written.
            for path in disk.iterdir():
                if path.is_file():
                    copy(path, directory / path.name)
            directories[medium] = directory
    return directories


def copy(source: Path, target: Path) -> None:
    with source.open("rb", buffering=0) as read, target.open("wb", buffering=0) as write:
        os.ftruncate(write.fileno(), source.stat().st_size)
        while part := read.read(16 << 20):
            rest = memoryview(part)
            while rest:
                rest = rest[write.write(rest) :]


def inside_a_namespace(arguments: Sequence[str], disk: str) -> int:
    """Run this program again where its mounts are seen by nobody else, and end with it."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    with tempfile.TemporaryDirectory(prefix="tunetool-loading-", dir=disk) as folder:
        (Path(folder) / "disk").mkdir()
        command = ["unshare", *user, "--mount", "--propagation", "private", sys.executable, __file__, *arguments]
        return subprocess.run([*command, "--inside", folder], check=False).returncode


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="7b", help="size of the reference model that is made: 7b, 3b, tiny")
    parser.add_argument("--directory", help="a directory with .safetensors files, instead of --model")
    parser.add_argument("--disk", default="/var/tmp", help="where the model is made: a directory on the drives")
    parser.add_argument("--device", help="default: cuda where torch sees a GPU, else cpu")
    parser.add_argument(
        "--loaders", default="tunetool,instanttensor,fastsafetensors,runai,kvikio,safetensors,transformers"
    )
    parser.add_argument("--media", default=",".join(MEDIA))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--sweep", action="store_true", help="buffers and threads of tunetool.loading, on the tmpfs")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside is None:
        return inside_a_namespace(arguments, options.disk)
    import torch  # noqa: PLC0415  --help needs it not

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    loaders = usable(options.loaders.split(","), device)
    run = Run(prepare(options, options.inside), loaders, device)
    if options.sweep:
        run.sweep(options.rounds)
        return 0
    rows = []
    for number in range(options.rounds):
        rows.append(run.round(number))
        speeds = ", ".join(f"{name} {value / 1e9:.2f}" for name, value in rows[-1].items())
        print(f"round {number + 1} (load {os.getloadavg()[0]:.1f}): {speeds}", flush=True)
    return report(rows, run.failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
