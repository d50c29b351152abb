"""What the health check costs a node in an hour: CPU time of whole processes, with all that they start.

    .venv/bin/python perf/health.py [--node]

Without --node: the check on a made node whose array is absent, and then the checks of a recorded node with eight
drives in the same process, since this machine has no such drives. Left out are locks of memory, which are tried once a
day, and the drives' health log, which needs drives. With --node, as root on a node with `node_health_enabled`: the
very command of the timer. An hour is by the role's default period.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from rounds import Arm, Sample, keep_compiled, program, sample
from tunetool.node.machine import recording

ROOT = Path(__file__).resolve().parents[1]
STARTER = "/opt/tunetool/bin/tunetool-health"
MADE = """
import json, sys
from pathlib import Path
from tunetool.health.check import check
from tunetool.health.results import Files
from tunetool.node.audit.manifest_checks import run_checks
root = Path(sys.argv[1])
settings = {"period_seconds": 900, "measure_seconds": 0, "textfile_directory": sys.argv[1], "ignored_checks": []}
check(settings, Files(root / "made"))
assert len(run_checks(json.loads((root / "made/etc/tunetool/node.json").read_text()), str(root / "recorded"))) > 20
"""


def lay_out(root: Path) -> None:
    """A recorded node, and one with a manifest and nothing else."""
    machines = ROOT / "tests/data/machines"
    recording.lay_out(json.loads((machines / "built.json").read_text()), str(root / "recorded"))
    manifest = json.loads((machines / "built-manifest.json").read_text())
    manifest["memory"]["memlock"] = None
    (path := root / "made/etc/tunetool/node.json").parent.mkdir(parents=True)
    path.write_text(json.dumps(manifest))


def cpu_seconds(argv: Sequence[object]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([*map(str, argv)], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if "Traceback" in done.stderr:
        raise RuntimeError(done.stderr)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def prepare(asked: argparse.Namespace, folder: Path, _: ExitStack) -> dict[str, Arm]:
    defaults = (ROOT / "roles/node_health/defaults/main.yml").read_text()
    period = int(re.findall(r"^node_health_period: (\d+)$", defaults, re.MULTILINE)[0])
    lay_out(folder)
    keep_compiled(folder)
    command = [STARTER, "check"] if asked.node else [sys.executable, "-c", MADE, folder]

    def check() -> Iterable[Sample]:
        seconds = cpu_seconds(command)
        yield sample("cpu", seconds, part="a check")
        yield sample("cpu", seconds * 3600 / period, part="checks of an hour")

    cpu_seconds(command)
    return {"check": check}


if __name__ == "__main__":
    program(prepare, node=False)
