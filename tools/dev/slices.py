"""What .ci/run does: `make test`, then, if it passed, slices of the slow tests (tests/slices.toml), as many as surely
end in time.

The commit's hash names the first slice and the others follow in turn, so that every slow test runs again and again. A
slice may take twice its recorded time; none is started that might then end later than the limit.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parents[2]
START_WITHIN = 70 * 60.0
"""Seconds since the start within which every slice that is started must end, were it twice as slow as recorded."""
STOP_AFTER = 84 * 60.0
"""Seconds after which whatever runs is stopped: everything then ends within 90 minutes."""
SLOWER = 2
"""How many times slower than recorded a machine may be."""
CLEAN_UP_SECONDS = 120


@dataclass(frozen=True)
class Slice:
    """Files whose slow tests run together, and how long they take."""

    name: str
    paths: tuple[str, ...]
    seconds: float | None
    """Seconds that they took; None: never timed."""


@dataclass(frozen=True)
class Ran:
    """The outcome of a step."""

    name: str
    seconds: float
    expected: float | None
    status: str


def read(path: Path) -> list[Slice]:
    """The slices in the file's order."""
    table = tomllib.loads(path.read_text())
    return [
        Slice(name, tuple(row["paths"]), float(row["seconds"]) if "seconds" in row else None)
        for name, row in table.items()
    ]


def in_turn(slices: Sequence[Slice], commit: str) -> list[Slice]:
    """All slices, beginning with the one that the commit's hash selects."""
    first = int(commit, 16) % len(slices)
    return [*slices[first:], *slices[:first]]


def next_of(waiting: Sequence[Slice], elapsed: float, limit: float) -> Slice | None:
    """The first slice that surely ends within the limit, which needs its recorded time; None if there is none."""
    return next(
        (part for part in waiting if part.seconds is not None and elapsed + SLOWER * part.seconds <= limit), None
    )


def run(command: Sequence[str], seconds: float) -> str:
    """Run a step in its own session: `passed`, `FAILED` or, when its time was up, `stopped`."""
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True, stdin=subprocess.DEVNULL) as process:
        try:
            return "passed" if process.wait(timeout=max(seconds, 1)) == 0 else "FAILED"
        except subprocess.TimeoutExpired:
            end(process)
            return "stopped"
        except BaseException:
            end(process)
            raise


def end(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM, so that it cleans up, and SIGKILL if it does not end."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(timeout=CLEAN_UP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)


def head() -> str:
    """The commit that is checked out."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def work(slices: Sequence[Slice], commit: str, limit: float, stop: float) -> list[Ran]:
    """Run `make test`, then slices; returns what ran, in order, then what did not."""
    started = time.monotonic()
    ran = []

    def step(name: str, command: Sequence[str], expected: float | None = None) -> None:
        begun = time.monotonic()
        print(f"=== {name}", flush=True)
        status = run(command, stop - (begun - started))
        ran.append(Ran(name, time.monotonic() - begun, expected, status))

    step("make test", ["make", "test"])
    waiting = in_turn(slices, commit)
    # Nothing lands then, and the end of the log has to say why.
    while ran[0].status == "passed" and (part := next_of(waiting, time.monotonic() - started, limit)):
        waiting.remove(part)
        pytest = [str(ROOT / ".venv/bin/python"), "-m", "pytest", "-v", "--durations=0", *part.paths, "-m", "slow"]
        step(f"slice {part.name}", pytest, part.seconds)
    return [
        *ran,
        *(
            Ran(f"slice {part.name}", 0, part.seconds, "not run" if part.seconds else "not run: never timed")
            for part in waiting
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", help="hash that names the first slice (default: HEAD)")
    parser.add_argument("--limit", type=float, default=START_WITHIN, help="seconds in all")
    parser.add_argument("--stop", type=float, default=STOP_AFTER, help="seconds after which what runs is stopped")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    slices = read(ROOT / "tests/slices.toml")
    ran = work(slices, options.commit or head(), options.limit, options.stop)
    print(f"\n{'step':<32} {'used':>7} {'recorded':>9}  status")
    for step in ran:
        used = f"{step.seconds:.0f}s" if not step.status.startswith("not run") else "-"
        expected = f"{step.expected:.0f}s" if step.expected else "-"
        print(f"{step.name:<32} {used:>7} {expected:>9}  {step.status}")
    counts = [
        sum(step.status.startswith(statuses) for step in ran)
        for statuses in ("passed", ("FAILED", "stopped"), "not run")
    ]
    print("steps: {} passed, {} failed, {} not run".format(*counts), flush=True)
    return 1 if counts[1] else 0


if __name__ == "__main__":
    sys.exit(main())
