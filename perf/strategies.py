"""Is the step of each ZeRO stage predicted before it is run?

    .venv/bin/python perf/strategies.py [--rate 1gbit] [--rounds 6] [--steps 8]
    .venv/bin/python perf/strategies.py --gpus 2 --model 7b --target /var/tmp/ft [--rounds 6] [--steps 8]
    .venv/bin/python perf/strategies.py --record FILE

The first: two nodes as namespaces of this machine, joined by a link of that rate (tests/cluster.py; root), a model of
24 million parameters with LoRA, gloo. The second: the GPUs of this machine. The third judges a record that is there.
Each runs `tunetool bench strategies` with one rank and with two under ZeRO-2 and ZeRO-3, interleaved over the rounds.

Goal: of each cell the prediction is within 20 % of the step. A line for each cell: how far off the prediction of a
round is from that round's step (the median over the rounds after the first, and its interval), the goal, and `held`,
`missed`, or `not decided` where the interval crosses the goal. In two namespaces it is also asked that ZeRO-3's step is
at least 1.5 times ZeRO-2's, and predicted to be longer. Ends with 1 where something is missed, else with 3 where
something is not decided.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

# All of these follow the path above, by which the tests' own modules are found (E402).
import pytest  # noqa: E402

import wide_model  # noqa: E402
from cluster import cluster_of_two  # noqa: E402
from entry import program  # noqa: E402
from goals import HELD, MISSED, OPEN, status  # noqa: E402
from tunetool.measure.statistics import ENOUGH  # noqa: E402
from tunetool.record import Measurement, Record, chosen, parse  # noqa: E402

MATRIX = "1x1:z2,1x1:z3,{0}:z2,{0}:z3"
TIMES, WITHIN = 1.5, 0.20


def main() -> int:
    """Run the comparison; returns the exit status."""
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--rate", default="1gbit")
    reader.add_argument("--rounds", type=int, default=6, help="the first, of cold cells, is not judged")
    reader.add_argument("--steps", type=int, default=8)
    reader.add_argument("--gpus", type=int, help="of this machine, instead of two namespaces")
    reader.add_argument("--model", default="7b")
    reader.add_argument("--target", type=Path, default=Path("/var/tmp/tunetool-strategies"))
    reader.add_argument("--record", type=Path)
    asked = reader.parse_args()
    if asked.record is not None:
        return judge(parse(asked.record.read_text(), str(asked.record)), None)
    record = on_gpus(asked) if asked.gpus is not None else between_namespaces(asked)
    if isinstance(record, int):
        return record
    return judge(record, None if asked.gpus is not None else asked.rate)


def on_gpus(asked: argparse.Namespace) -> Record | int:
    """The record, or the status of a command that failed."""
    with tempfile.TemporaryDirectory(prefix="tunetool-strategies-") as folder:
        where = ["--model", asked.model, "--target", str(asked.target), "--device", "cuda", "--images", "100"]
        return bench(asked, Path(folder), [*where, "--ranks-per-node", str(asked.gpus)], f"1x{asked.gpus}")


def between_namespaces(asked: argparse.Namespace) -> Record | int:
    """The record, or the status of a command that failed."""
    with tempfile.TemporaryDirectory(prefix="tunetool-cluster-") as folder, cluster_of_two(Path(folder)) as cluster:
        model = wide_model.write(cluster.shared / "wide")
        cluster.limit_network(asked.rate)
        where = ["--model", str(model), "--images", "16", "--target", str(cluster.shared / "bulk")]
        return bench(asked, Path(folder), [*where, "-i", str(cluster.inventory), "--device", "cpu"], "2x1")


def bench(asked: argparse.Namespace, folder: Path, where: list[str], layout: str) -> Record | int:
    command = [sys.executable, "-m", "tunetool", "bench", "strategies", *where, "--matrix", MATRIX.format(layout)]
    command += ["--rounds", str(asked.rounds), "--steps", str(asked.steps), "--allow-busy"]
    command += ["--json", str(folder / "record.json"), "--runs-dir", str(folder / "runs")]
    done = subprocess.run(command, check=False)
    return done.returncode or parse((folder / "record.json").read_text(), "record.json")


def judge(record: Record, rate: str | None) -> int:
    """Prints the lines; the exit status."""
    steps, errors = (
        {f"{each.labels['layout']}.z{each.labels['stage']}": each for each in chosen(record.measurements, figure)}
        for figure in ("step", "prediction_error")
    )
    said = [line(name, each, errors.get(name)) for name, each in steps.items()]
    if rate is not None:
        said.append(ratio(steps, rate))
    return status(said)


def line(name: str, step: Measurement, error: Measurement | None) -> str:
    """Prints the line of a cell; the word at its end."""
    if error is None or "predicted_seconds" not in step.parameters:
        print(f"{name}: {step.value:.3f} s, not predicted; goal: within {WITHIN:.0%}: {OPEN}")
        return OPEN
    predicted = float(step.parameters["predicted_seconds"])
    low, high = (error.confidence.low, error.confidence.high) if error.confidence else (0.0, float("inf"))
    word = HELD if high <= WITHIN else MISSED if low > WITHIN else OPEN
    word = word if len(error.samples or []) >= ENOUGH else OPEN
    print(
        f"{name}: {step.value:.3f} s, predicted {predicted:.3f} s ({predicted / step.value - 1:+.0%}); off by "
        f"{error.value:.0%} [{low:.0%} to {high:.0%}], median of {len(error.samples or [])} rounds; goal: within "
        f"{WITHIN:.0%}: {word}"
    )
    return word


def ratio(steps: Mapping[str, Measurement], rate: str) -> str:
    """Prints what ZeRO-3 costs over the link; the word at its end."""
    second, third = steps["2x1.z2"], steps["2x1.z3"]
    bounds = [(each.confidence.low, each.confidence.high) if each.confidence else None for each in (second, third)]
    times = third.value / second.value
    predicted = float(third.parameters["predicted_seconds"]) / float(second.parameters["predicted_seconds"])
    if bounds[0] is None or bounds[1] is None:
        low, high = 0.0, float("inf")
    else:
        low, high = bounds[1][0] / bounds[0][1], bounds[1][1] / bounds[0][0]
    word = MISSED if high < TIMES or predicted <= 1 else HELD if low >= TIMES else OPEN
    word = word if min(len(each.samples or []) for each in (second, third)) >= ENOUGH else OPEN
    print(
        f"ZeRO-3 / ZeRO-2 over {rate}: {times:.2f} [{low:.2f} to {high:.2f}], predicted {predicted:.2f}; goal: "
        f"{TIMES:g} or more, predicted above 1: {word}"
    )
    return word


if __name__ == "__main__":
    try:
        program(main)
    except pytest.skip.Exception as reason:  # from the cluster, which the tests share
        print(f"error: {reason}", file=sys.stderr)
        sys.exit(3)
