"""What the health check costs a node in an hour.

    .venv/bin/python perf/health.py [--rounds 5] [--node]

CPU time of whole processes, with all that they start. Without --node: the check on a made node whose array is absent,
and then the checks of a recorded node with eight drives in the same process, since this machine has no such drives.
Left out are locks of memory, which are tried once a day, and the drives' health log, which needs drives. With --node,
as root on a node with `node_health_enabled`: the very command of the timer. `verify --level config` and Slurm's program
are timed beside it, interleaved. Goal: at most 2 s an hour by the role's default period. Ends with 1 where it is
missed, with 3 where that is not decided.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import goals
from entry import program
from installed import keep_compiled
from tunetool.node.machine import recording

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 2.0
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
    """A node with a manifest and nothing else, and a recorded one."""
    machines = ROOT / "tests/data/machines"
    recording.lay_out(json.loads((machines / "built.json").read_text()), str(root / "recorded"))
    manifest = json.loads((machines / "built-manifest.json").read_text())
    manifest["memory"]["memlock"] = None
    path = root / "made/etc/tunetool/node.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(manifest))


def cpu_seconds(argv: Sequence[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "Traceback" not in done.stderr, done.stderr
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def shown(samples: Sequence[float]) -> str:
    return f"{statistics.median(samples):.3f} s [{min(samples):.3f} to {max(samples):.3f}]"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--node", action="store_true")
    options = parser.parse_args()
    defaults = (ROOT / "roles/node_health/defaults/main.yml").read_text()
    period = int(re.findall(r"^node_health_period: (\d+)$", defaults, re.MULTILINE)[0])
    python = sys.executable
    with tempfile.TemporaryDirectory(prefix="tunetool-perf-") as folder:
        root = Path(folder)
        lay_out(root)
        keep_compiled(root / "compiled")
        verify = ["verify", "--level", "config", "--runs-dir", str(root / "runs")]
        commands = {
            "check": [STARTER, "check"] if options.node else [python, "-c", MADE, folder],
            "verify --level config": [python, "-m", "tunetool", *verify],
            "Slurm's program": [STARTER] if options.node else [python, "-m", "tunetool.health", "slurm"],
        }
        if not options.node:
            commands["verify --level config"] += ["--manifest", str(root / "made/etc/tunetool/node.json")]
        for argv in commands.values():
            cpu_seconds(argv)
        taken: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(options.rounds):
            for name, argv in commands.items():
                taken[name].append(cpu_seconds(argv))
    for name, samples in taken.items():
        print(f"{name}: {shown(samples)} of CPU, {options.rounds} rounds")
    hour = [sample * 3600 / period for sample in taken["check"]]
    return goals.status(
        [goals.line(f"seconds of CPU an hour, a check every {period} s", hour, SECONDS, at_least=False)]
    )


if __name__ == "__main__":
    program(main)
