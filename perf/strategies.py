"""Is the step of ZeRO-2 and ZeRO-3 over two nodes predicted before it is run?

    .venv/bin/python perf/strategies.py [--rate 1gbit] [--rounds 5] [--steps 8]

Two nodes as namespaces of this machine, joined by a link of that rate (tests/cluster.py; root), a model of 24 million
parameters with LoRA, gloo. `tunetool bench strategies` runs 1x1 and 2x1 under both stages, interleaved over the rounds.
It is asked that ZeRO-3's step is at least 1.5 times ZeRO-2's, that the prediction, made before the first round, ranks
them so, and that it lies within 30 % of the median of the rounds. Ends with 1 where it does not.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import pytest  # noqa: E402

import wide_model  # noqa: E402  (found by the path above)
from cluster import cluster_of_two  # noqa: E402
from tunetool.record import parse  # noqa: E402

MATRIX = "1x1:z2,1x1:z3,2x1:z2,2x1:z3"
TIMES, WITHIN = 1.5, 0.30


def main() -> int:
    """Run the comparison; returns the exit status."""
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--rate", default="1gbit")
    reader.add_argument("--rounds", type=int, default=5)
    reader.add_argument("--steps", type=int, default=8)
    asked = reader.parse_args()
    with tempfile.TemporaryDirectory(prefix="tunetool-cluster-") as folder, cluster_of_two(Path(folder)) as cluster:
        model = wide_model.write(cluster.shared / "wide")
        cluster.limit_network(asked.rate)
        command = [sys.executable, "-m", "tunetool", "bench", "strategies", "--model", str(model), "--images", "16"]
        command += ["--target", str(cluster.shared / "bulk"), "-i", str(cluster.inventory), "--device", "cpu"]
        command += ["--matrix", MATRIX, "--rounds", str(asked.rounds), "--steps", str(asked.steps), "--allow-busy"]
        command += ["--json", str(Path(folder) / "record.json"), "--runs-dir", str(Path(folder) / "runs")]
        done = subprocess.run(command, check=False)
        if done.returncode:
            return done.returncode
        record = parse((Path(folder) / "record.json").read_text(), "record.json")
    steps = {each.name.removeprefix("strategies.step."): each for each in record.measurements if ".step." in each.name}
    good = True
    for name, each in steps.items():
        if name.startswith("2x1"):
            error = float(each.parameters["prediction_error"])
            good = good and abs(error) <= WITHIN
            predicted = float(each.parameters["predicted_seconds"])
            print(f"{name}: {each.value:.3f} s, predicted {predicted:.3f} s, {error:+.0%}")
    second, third = steps["2x1.z2"], steps["2x1.z3"]
    times = third.value / second.value
    predicted_times = float(third.parameters["predicted_seconds"]) / float(second.parameters["predicted_seconds"])
    print(f"ZeRO-3 / ZeRO-2 over {asked.rate}: {times:.2f}, predicted {predicted_times:.2f}")
    good = good and times >= TIMES and predicted_times > 1
    print("holds" if good else "does not hold")
    return 0 if good else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except pytest.skip.Exception as reason:  # from the cluster, which the tests share
        print(f"error: {reason}", file=sys.stderr)
        sys.exit(3)
