"""What the health check costs a node in an hour: CPU time of whole processes, with all that they start.

The check on a made node whose array is absent, and then the checks of a recorded node with eight drives in the same
process, since this machine has no such drives. Left out are locks of memory, which are tried once a day, and the
drives' health log, which needs drives. An hour is by the role's default period.
"""

from __future__ import annotations

import json
import re
import resource
import sys
from pathlib import Path

from rounds import Arms, Call, Samples, keep_compiled, output, program, sample
from tunetool.node.machine import recording

ROOT = Path(__file__).resolve().parents[1]
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


def cpu_seconds() -> float:
    """Of all processes that this one has started and that have ended."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def prepare(call: Call) -> Arms:
    defaults = (ROOT / "roles/node_health/defaults/main.yml").read_text()
    period = int(re.findall(r"^node_health_period: (\d+)$", defaults, re.MULTILINE)[0])
    lay_out(call.folder)
    keep_compiled(call.folder)

    def check() -> Samples:
        before = cpu_seconds()
        output(sys.executable, "-c", MADE, call.folder)
        seconds = cpu_seconds() - before
        yield sample("cpu", seconds, part="a check")
        yield sample("cpu", seconds * 3600 / period, part="checks of an hour")

    list(check())  # its compiled files are there then
    return {"check": check}


if __name__ == "__main__":
    program(prepare)
