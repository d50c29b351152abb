"""`tunetool bench strategies` between two nodes, judged by two_nodes.toml.

    sudo .venv/bin/python perf/two_nodes.py [--rounds 6] [what else `bench strategies` takes]

They are namespaces of this machine, joined by a link of 1 Gbit/s. A model of 24 million parameters with LoRA, gloo, one
rank and two under ZeRO-2 and ZeRO-3; docs/concepts/fine-tune.md.
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


def main() -> int:
    """The exit status of the benchmark where that failed, else of its goals."""
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _, more = reader.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="tunetool-cluster-") as folder, cluster_of_two(Path(folder)) as cluster:
        cluster.limit_network("1gbit")
        bench = ["bench", "strategies", "-i", str(cluster.inventory), "--target", str(cluster.shared / "bulk")]
        bench += ["--model", str(wide_model.write(cluster.shared / "wide")), "--images", "16", "--device", "cpu"]
        bench += ["--matrix", "1x1:z2,1x1:z3,2x1:z2,2x1:z3", "--rounds", "6", "--steps", "8", "--allow-busy"]
        bench += ["--python", sys.executable, "--json", f"{folder}/record.json", *more]
        judge = ["report", "judge", f"{folder}/record.json", str(HERE / "two_nodes.toml")]
        tunetool = [sys.executable, "-m", "tunetool"]
        codes = (subprocess.run([*tunetool, *words], check=False).returncode for words in (bench, judge))
        return next(filter(None, codes), 0)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except pytest.skip.Exception as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(3)
