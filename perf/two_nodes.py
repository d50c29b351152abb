"""`tunetool bench strategies` between two nodes, namespaces of this machine joined by a link, judged by
two_nodes.toml.

    sudo .venv/bin/python perf/two_nodes.py [--rate 1gbit] [--rounds 6] [what else `bench strategies` takes]

A model of 24 million parameters with LoRA, gloo, one rank and two under ZeRO-2 and ZeRO-3; docs/concepts/fine-tune.md.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

# They follow the path above, by which the tests' own modules are found (E402).
import pytest  # noqa: E402

import wide_model  # noqa: E402
from cluster import cluster_of_two  # noqa: E402

TUNETOOL = [sys.executable, "-m", "tunetool"]


def main() -> int:
    """The exit status of the benchmark where that failed, else of its goals."""
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--rate", default="1gbit")
    reader.add_argument("--rounds", default="6", help="the first, of cold cells, is not judged")
    asked, more = reader.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="tunetool-cluster-") as folder, cluster_of_two(Path(folder)) as cluster:
        cluster.limit_network(asked.rate)
        bench = ["bench", "strategies", "-i", str(cluster.inventory), "--target", str(cluster.shared / "bulk")]
        bench += ["--model", str(wide_model.write(cluster.shared / "wide")), "--images", "16", "--device", "cpu"]
        bench += ["--matrix", "1x1:z2,1x1:z3,2x1:z2,2x1:z3", "--rounds", asked.rounds, "--steps", "8"]
        bench += ["--allow-busy", "--python", sys.executable]
        record = f"{folder}/record.json"
        code = subprocess.run([*TUNETOOL, *bench, "--json", record, *more], check=False).returncode
        judge = ["report", "judge", record, str(HERE / "two_nodes.toml")]
        return code or subprocess.run([*TUNETOOL, *judge], check=False).returncode


if __name__ == "__main__":
    try:
        sys.exit(main())
    except pytest.skip.Exception as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(3)
