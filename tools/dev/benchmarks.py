"""Run the benchmarks of perf/ that need no GPU and no other node, one after another, and say which goals are held.

    .venv/bin/python tools/dev/benchmarks.py [--target /var/tmp] [NAME ...]

First `tunetool accept perf/goals.toml`, then each line of perf/programs.toml. At the end a line for each: `held`,
`missed`, `not decided` or `broke`, and below it the goals that are not held. It broke where it ended in another way
than with 0, 1 or 3, with 1 and no missed goal, with 3 by a fault of its own, or not within its time. Ends with 1 where
one missed a goal or broke, else with 0.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import steps
from groups import VENV
from steps import ROOT

sys.path.insert(0, str(ROOT / "perf"))

from rounds import read_goals

HELD, MISSED, OPEN, BROKE = "held", "missed", "not decided", "broke"
NOT_HELD = re.compile(rf"\b({MISSED}|{OPEN})\b")
FAULT = "error: a fault of tunetool itself"
SECONDS = 3 * 3600.0
"""After which one is stopped: `tune` takes an hour."""
ACCEPT = "tunetool accept perf/goals.toml"


@dataclass(frozen=True)
class Program:
    """One thing to run, by the words that it is shown as."""

    shown: str
    command: Sequence[str]
    seconds: float = SECONDS


def programs(target: str) -> list[Program]:
    """All of them, on ``target``."""
    python = str(VENV / "python")
    accept = [python, "-m", "tunetool", "accept", str(ROOT / "perf/goals.toml"), "--set", f"target={target}"]
    known = read_goals({"target": target})
    needed = {goal.run for goal in known.goals if "gpu" not in goal.needs}
    lines = [line for line in known.runs if line in needed and "HOST" not in line]  # HOST: another node
    return [
        Program(ACCEPT, accept),
        # Unbuffered: who waits sees each line when it is printed.
        *(Program(" ".join(line), [python, "-u", str(ROOT / "perf" / f"{line[0]}.py"), *line[1:]]) for line in lines),
    ]


@dataclass(frozen=True)
class Outcome:
    """What a program said."""

    program: Program
    word: str
    seconds: float
    reasons: Sequence[str] = ()
    """Lines of goals that are not held, or why it broke."""


def judge(code: int, lines: Sequence[str], limit: float) -> tuple[str, list[str]]:
    """The word for an exit status and what was printed, and the reasons."""
    last = [line for line in lines if line.strip()][-1:]
    reasons = [line for line in lines if NOT_HELD.search(line)]
    if code == 0:
        return HELD, []
    if code == 1 and any(MISSED in line for line in reasons):
        return MISSED, reasons
    faults = [line for line in lines if line.startswith(FAULT)]
    if code == 3 and not faults:
        # Without such a line: this machine lacks what it needs, and its last line says so.
        return OPEN, reasons or last
    return BROKE, [f"stopped after {limit:.0f} s" if code == steps.STOPPED else f"ended with {code}", *(faults or last)]


async def run(program: Program, show: Callable[[str], None]) -> Outcome:
    lines: list[str] = []

    def take(line: str) -> None:
        lines.append(line.rstrip("\n"))
        show(lines[-1])

    started = time.monotonic()
    code = await steps.run(program.command, program.seconds, take)
    word, reasons = judge(code, lines, program.seconds)
    return Outcome(program, word, time.monotonic() - started, reasons)


def summary(outcomes: Sequence[Outcome], left: Sequence[Program] = ()) -> list[str]:
    """The lines at the end; ``left``: programs that did not run, because somebody interrupted."""
    lines = [""]
    for outcome in outcomes:
        lines.append(f"{outcome.word:<11} {outcome.seconds:6.0f} s  {outcome.program.shown}")
        lines += [f"{'':22}{reason}" for reason in outcome.reasons]
    return [*lines, *(f"{'not run':<20}  {program.shown}" for program in left)]


async def run_all(wanted: Sequence[Program], show: Callable[[str], None]) -> int:
    """Run them, show the summary, also after Ctrl-C; the exit status."""
    outcomes: list[Outcome] = []
    try:
        for number, program in enumerate(wanted, 1):
            show(f"--- [{number}/{len(wanted)}] {program.shown}")
            outcomes.append(await run(program, show))
            show(f"--- {outcomes[-1].word}, {outcomes[-1].seconds:.0f} s")
    finally:
        for line in summary(outcomes, wanted[len(outcomes) :]):
            show(line)
    return int(any(outcome.word in (MISSED, BROKE) for outcome in outcomes))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(dict.fromkeys(program.shown.split()[0] for program in programs("")))
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"these alone: {', '.join(names)}")
    parser.add_argument("--target", type=Path, default=Path("/var/tmp"), help="a directory on the disk to measure")
    options = parser.parse_args()
    if unknown := set(options.names) - set(names):
        parser.error(f"no program is called {', '.join(sorted(unknown))}")
    every = programs(str(options.target))
    wanted = [program for program in every if not options.names or program.shown.split()[0] in options.names]
    return steps.finish(run_all(wanted, lambda line: print(line, flush=True)))


if __name__ == "__main__":
    sys.exit(main())
