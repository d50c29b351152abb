"""`tunetool bench strategies` between two nodes, namespaces of this machine with a link of 1 Gbit/s, and its goals.

    sudo .venv/bin/python perf/two_nodes.py [--rounds 6] [what else `bench strategies` takes]

A model of 24 million parameters with LoRA, gloo, one rank and two under ZeRO-2 and ZeRO-3; docs/concepts/fine-tune.md.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

# They follow the path above, by which the tests' own modules are found.
import pytest

import wide_model
from cluster import cluster_of_two

GOALS = (
    "prediction_error,layout=1x1,stage=3<=0.2",
    "prediction_error,layout=2x1,stage=2<=0.2",
    "prediction_error,layout=2x1,stage=3<=0.2",
    "versus_zero2,layout=2x1,stage=3>=1.5",  # what ZeRO-3 gathers is seen
)


def main() -> int:
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _, more = reader.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="tunetool-cluster-") as folder, cluster_of_two(Path(folder)) as cluster:
        cluster.limit_network("1gbit")
        bench = ["bench", "strategies", "-i", cluster.inventory, "--target", cluster.shared / "bulk"]
        bench += ["--model", wide_model.write(cluster.shared / "wide"), "--images", "16", "--device", "cpu"]
        bench += ["--matrix", "1x1:z2,1x1:z3,2x1:z2,2x1:z3", "--rounds", "6", "--steps", "8", "--allow-busy"]
        bench += [*(f"--expect={each}" for each in GOALS), "--python", sys.executable, *more]
        return subprocess.run([sys.executable, "-m", "tunetool", *map(str, bench)], check=False).returncode


if __name__ == "__main__":
    try:
        sys.exit(main())
    except pytest.skip.Exception as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(3)
