"""Does `tunetool tune` choose as well as trying everything, in a tenth of `ds_nvme_tune`'s time?

    .venv/bin/python perf/tune.py --target DIR [--only tune,sweep,exhaustive,compare] [--state FILE] [--space FILE]

Four parts, each kept in the state file, so that they can be run apart on a machine that others use as well:

- tune: the default budget, timed as a user would see it; what it found for reads, for writes and for the mix
- sweep: `ds_nvme_tune` over the same space, timed, in an empty log directory (it trusts logs that it finds), once its
  op is compiled (TORCH_EXTENSIONS_DIR says where, if not in the cache that everybody uses)
- exhaustive: `tunetool tune --exhaustive` over the same space: the best setting of each direction
- compare: all of these settings and the default, one after the other in random order, round after round, by the same
  process; the ratio of each to the exhaustive best is the median over rounds, with an interval of 99 %

Asked for: tune takes at most a tenth of sweep, and what it chose reaches 97 % of the exhaustive best for reads and for
writes. A ratio whose interval holds 97 % is `not decided`, whatever its median, and so is the time, of which there is a
single sample. Ends with 1 where a goal is missed, else with 3 where one is not decided or not measured.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from entry import program
from goals import OPEN, figure, line, status
from tunetool.measure import aio, rundir
from tunetool.node.machine.block_stack import read_stack
from tunetool.tune.pool import Pool
from tunetool.tune.samples import Samples
from tunetool.tune.settings import DEFAULTS, SWEEP, AioSettings, from_block, read_space

PARTS = ("tune", "sweep", "exhaustive", "compare")
WANTED_SHARE, WANTED_TIME = 0.97, 0.1
THEIRS = "400M"
"""ds_nvme_tune's own default transfer: everything is tried, and all are compared, by it."""


def tune(options: argparse.Namespace, directory: Path, mix: str, *more: str) -> tuple[dict[str, Any], float]:
    """The record of one run, and how many seconds it took."""
    command = [sys.executable, "-m", "tunetool", "tune", "--target", str(options.target)]
    command += ["--mix", mix, "--json", "-", *more]
    command += ["--runs-dir", str(directory / "runs"), "-o", str(directory / "aio.json"), "--device", options.device]
    command += ["--space", str(options.space)] if options.space else []
    command += ["--allow-busy"] if options.allow_busy else []
    for _ in range(60):
        began = time.monotonic()
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=7200)
        seconds = time.monotonic() - began
        if "another tunetool run is measuring" not in done.stdout:
            break
        time.sleep(5)
    if done.returncode != 0:
        raise SystemExit(f"error: `tunetool tune` ended with {done.returncode}\n{done.stdout[-2000:]}")
    return json.loads(done.stdout), seconds


def chosen(record: dict[str, Any], goal: str) -> dict[str, Any]:
    """The block of one goal."""
    parameters = next(
        m["parameters"] for m in record["measurements"] if m["figure"] == "gain" and m["labels"]["goal"] == goal
    )
    return {name: parameters[name] for name in DEFAULTS.block()}


def part_tune(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    record, seconds = tune(options, directory, "read=1,write=1", "--budget", options.budget)
    blocks = {f"tune, {goal}": chosen(record, goal) for goal in ("read", "write", "mix")}
    return {"seconds": seconds, "blocks": blocks}


def best_of(record: dict[str, Any], direction: str) -> dict[str, Any]:
    """The block whose median is highest."""
    figures = [m for m in record["measurements"] if m["labels"].get("block") and m["labels"]["direction"] == direction]
    parameters = max(figures, key=lambda m: m["value"])["parameters"]
    return {name: parameters[name] for name in DEFAULTS.block()}


def part_exhaustive(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    record, seconds = tune(options, directory, "read=1,write=1", "--exhaustive", "--io-size", THEIRS)
    return {
        "seconds": seconds,
        "blocks": {f"exhaustive, {direction}": best_of(record, direction) for direction in ("read", "write")},
    }


def sweep_config(space: dict[str, Any]) -> dict[str, Any]:
    """The space in ds_nvme_tune's words."""
    return {
        "block_size": [f"{size // 2**10}K" if size % 2**20 else f"{size // 2**20}M" for size in space["block_size"]],
        "queue_depth": list(space["queue_depth"]),
        "sequential_requests": [not value for value in space["overlap_events"]],
        "single_submit": list(space["single_submit"]),
        "io_parallel": list(space["intra_op_parallelism"]),
    }


def theirs(name: str) -> Path:
    """One of DeepSpeed's programs: beside this Python, or on the PATH."""
    program = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        raise SystemExit(f"error: no `{name}`\nhint: install DeepSpeed")
    return Path(program)


def part_sweep(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    program = theirs("ds_nvme_tune")
    config, data = directory / "sweep.json", directory / "data"
    space = {**{name: [value] for name, value in DEFAULTS.block().items()}, **options.values}
    config.write_text(json.dumps(sweep_config(space)))
    data.mkdir()
    logs = directory / "logs"
    command = [str(program), "--nvme_dir", str(data), "--log_dir", str(logs), "--sweep_config", str(config)]
    command += ["--gpu"] if options.device == "cuda" else []
    environment = {**os.environ, "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}"}
    # DeepSpeed's loader compiles anew where the op was built by another checkout: minutes that are not the sweep's.
    warm = [str(theirs("ds_io")), "--folder", str(data), "--io_size", "16M"]
    subprocess.run(warm, capture_output=True, check=True, env=environment, timeout=3600)
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=7200)
    seconds = time.monotonic() - began
    match = re.search(r"^\{.*^\}", done.stdout, re.MULTILINE | re.DOTALL)
    if done.returncode != 0 or not match:
        raise SystemExit(f"error: `ds_nvme_tune` failed\n{done.stdout[-1000:]}{done.stderr[-1000:]}")
    best = json.loads(match[0])["aio"]
    block = {
        "block_size": best["block_size"],
        "queue_depth": best["queue_depth"],
        "intra_op_parallelism": best["num_threads"],
        "single_submit": best["single_submit"] == "true",
        "overlap_events": best["overlap_events"] == "true",
        "use_gds": False,
    }
    runs = len(list(logs.glob("*/*.txt")))
    return {"seconds": seconds, "runs": runs, "blocks": {"ds_nvme_tune": block}}


def part_compare(options: argparse.Namespace, directory: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Each setting once a round, in random order, both directions; rates by name, direction and round."""
    blocks: dict[str, dict[str, Any]] = {"default": DEFAULTS.block()}
    for part in ("tune", "sweep", "exhaustive"):
        blocks.update(state.get(part, {}).get("blocks", {}))
    settings = {name: from_block(block) for name, block in blocks.items()}
    different = list(dict.fromkeys(settings.values()))
    stack = read_stack(str(options.target))
    installed = aio.probe(Path(sys.executable), os.environ)
    rates: dict[AioSettings, dict[str, list[float | None]]] = {each: {"read": [], "write": []} for each in different}
    target = directory / "data"
    target.mkdir()
    with rundir.run_directory(target, "compare") as inner:
        spec = aio.Spec(inner, 0, options.device, pinned_by="cuda" if options.device == "cuda" else "deepspeed")
        with Pool(spec, 1, different, installed, stack, os.environ, 400 * 2**20) as pool:
            pool.open()
            samples = Samples(pool, stack, time.monotonic)
            order = random.Random(0)  # an order, not a secret
            for _ in range(options.rounds):
                for direction in ("write", "read"):
                    order.shuffle(different)
                    for each in different:
                        rates[each][direction].append(samples.take(each, direction))
    return {
        "rates": {name: rates[each] for name, each in settings.items()},
        "same": {name: str(each) for name, each in settings.items()},
    }


def ratios(first: list[float | None], second: list[float | None]) -> list[float]:
    return [a / b for a, b in zip(first, second, strict=True) if a is not None and b is not None]


def report(state: dict[str, Any]) -> list[str]:
    """Print the results so far; the verdicts of the goals."""
    words = [] if all(part in state for part in PARTS) else [OPEN]
    for part in ("tune", "sweep", "exhaustive"):
        if part in state:
            print(f"{part:11} {state[part]['seconds']:7.1f} s")
    if "tune" in state and "sweep" in state:
        share = state["tune"]["seconds"] / state["sweep"]["seconds"]
        print(f"ds_nvme_tune: {state['sweep']['seconds'] / state['sweep']['runs']:.1f} s a run")
        words.append(line("seconds of `tunetool tune` over ds_nvme_tune's", [share], WANTED_TIME, at_least=False))
    if "compare" not in state:
        return words
    rates, same = state["compare"]["rates"], state["compare"]["same"]
    for direction in ("read", "write"):
        best = f"exhaustive, {direction}"
        if best not in rates:
            continue
        print(f"\n{direction}: against the exhaustive best, {same[best]}")
        for name, sides in rates.items():
            shares = ratios(sides[direction], rates[best][direction])
            if not shares or name == best:
                continue
            title = f"{direction}: {name}, {same[name]}"
            if name in (f"tune, {direction}", "tune, mix"):
                words.append(line(title, shares, WANTED_SHARE))
            else:
                print(figure(title, shares))
    return words


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, in this order")
    parser.add_argument("--state", type=Path, help="what earlier parts found; default: none is kept")
    parser.add_argument("--space", type=Path, help="as `tunetool tune` takes it; default: ds_nvme_tune's own")
    parser.add_argument("--budget", default="60s")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--allow-busy", action="store_true")
    options = parser.parse_args()
    options.target = options.target.resolve()
    options.values = read_space(options.space) if options.space else dict(SWEEP)
    wanted = options.only.split(",")
    if not set(wanted) <= set(PARTS):
        parser.error(f"--only knows {', '.join(PARTS)}")
    state: dict[str, Any] = {}
    if options.state and options.state.exists():
        state = json.loads(options.state.read_text())
    for part in PARTS:
        if part not in wanted:
            continue
        directory = Path(tempfile.mkdtemp(prefix="bench-tune-", dir=options.target))
        try:
            run = {"tune": part_tune, "sweep": part_sweep, "exhaustive": part_exhaustive}.get(part)
            state[part] = run(options, directory) if run else part_compare(options, directory, state)
        finally:
            shutil.rmtree(directory)
        if options.state:
            options.state.write_text(json.dumps(state, indent=2) + "\n")
    return status(report(state))


if __name__ == "__main__":
    program(main)
