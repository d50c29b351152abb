"""Run the benchmarks of perf/ that need no GPU, one after another, and say which goals are held.

    .venv/bin/python tools/dev/benchmarks.py [--target /var/tmp] [NAME ...]

A program prints a line for each goal and ends with 1 where one is missed, with 3 where one is not decided. At the end:
a line for each program, `held`, `missed`, `not decided` or `broke`, and below it the goals that are not held. A program
broke where it ended in another way, also with 1 and no missed goal, or did not end in time. Ends with 1 where a program
missed a goal or broke, else with 0.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import steps
from groups import VENV
from steps import ROOT

sys.path.insert(0, str(ROOT / "perf"))

from goals import HELD, MISSED, OPEN, VERDICT

BROKE = "broke"
MINUTE = 60


@dataclass(frozen=True)
class Program:
    """A program of perf/, its arguments, and the time after which it is stopped: some three times what it takes."""

    name: str
    seconds: float
    arguments: tuple[str, ...] = ()
    """`TARGET` is a directory on the disk that is measured."""

    def shown(self) -> str:
        return " ".join((self.name, *self.arguments))

    def command(self, target: str) -> list[str]:
        given = [target if each == "TARGET" else each for each in self.arguments]
        # Unbuffered: who waits sees each line when it is printed.
        return [str(VENV / "python"), "-u", str(ROOT / "perf" / f"{self.name}.py"), *given]


PROGRAMS = (
    Program("aggregate", 10 * MINUTE),
    Program("inspect_fleet", 10 * MINUTE),
    Program("fleet", 40 * MINUTE),
    Program("health", 10 * MINUTE),
    Program("host_memory", 15 * MINUTE),
    Program("checkpoint_shapes", 30 * MINUTE),
    Program("checkpoint_ranks", 60 * MINUTE),
    Program("stage", 30 * MINUTE, ("--source", "TARGET", "--model", "2GB", "--images", "200")),
    Program("stage", 60 * MINUTE, ("--source", "TARGET", "--small", "100000")),
    Program("export", 30 * MINUTE, ("--target", "TARGET")),
    Program("export", 15 * MINUTE, ("--target", "/dev/shm")),
    Program("against_fio", 20 * MINUTE, ("--target", "TARGET")),
    Program("against_ds_io", 60 * MINUTE, ("--target", "TARGET")),
    Program("tune", 180 * MINUTE, ("--target", "TARGET")),
    Program("strategies", 120 * MINUTE),
)


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
    open_goals, missed_goals = ([line for line in lines if of(line) == word] for word in (OPEN, MISSED))
    if code == 0 and not any(of(line) for line in lines):
        return BROKE, ["ended with 0 and judged no goal", *last]
    if code == 0:
        return HELD, []
    if code == 1 and missed_goals:
        return MISSED, [*missed_goals, *open_goals]
    if code == 3:
        # Without a goal's line: this machine lacks what the program needs, and its last line says so.
        return OPEN, open_goals or last
    if code == 124:
        return BROKE, [f"stopped after {limit:.0f} s", *last]
    return BROKE, [f"ended with {code}", *last]


def of(line: str) -> str | None:
    """The verdict at the end of a goal's line; None for another line."""
    match = VERDICT.search(line)
    return match[1] if match else None


async def run(program: Program, target: str, show: Callable[[str], None]) -> Outcome:
    lines: list[str] = []

    def take(line: str) -> None:
        lines.append(line.rstrip("\n"))
        show(lines[-1])

    started = time.monotonic()
    code = await steps.run(program.command(target), program.seconds, take)
    word, reasons = judge(code, lines, program.seconds)
    return Outcome(program, word, time.monotonic() - started, reasons)


def summary(outcomes: Sequence[Outcome], left: Sequence[Program] = ()) -> list[str]:
    """The lines at the end; ``left``: programs that did not run, because somebody interrupted."""
    lines = [""]
    for outcome in outcomes:
        lines.append(f"{outcome.word:<11} {outcome.seconds:6.0f} s  perf/{outcome.program.shown()}")
        lines += [f"{'':22}{reason}" for reason in outcome.reasons]
    return [*lines, *(f"{'not run':<20}  perf/{program.shown()}" for program in left)]


def status(outcomes: Sequence[Outcome]) -> int:
    return int(any(outcome.word in (MISSED, BROKE) for outcome in outcomes))


async def run_all(programs: Sequence[Program], target: str, show: Callable[[str], None]) -> int:
    """Run them, show the summary, also after Ctrl-C; the exit status."""
    outcomes: list[Outcome] = []
    try:
        for number, program in enumerate(programs, 1):
            show(f"--- [{number}/{len(programs)}] perf/{program.shown()}, at most {program.seconds / MINUTE:.0f} min")
            outcomes.append(await run(program, target, show))
            show(f"--- {outcomes[-1].word}, {outcomes[-1].seconds:.0f} s")
    finally:
        for line in summary(outcomes, programs[len(outcomes) :]):
            show(line)
    return status(outcomes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(dict.fromkeys(program.name for program in PROGRAMS))
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"these alone: {', '.join(names)}")
    parser.add_argument("--target", type=Path, default=Path("/var/tmp"), help="a directory on the disk to measure")
    options = parser.parse_args()
    unknown = set(options.names) - set(names)
    if unknown:
        parser.error(f"no program is called {', '.join(sorted(unknown))}")
    wanted = [program for program in PROGRAMS if not options.names or program.name in options.names]
    return steps.finish(run_all(wanted, str(options.target), lambda line: print(line, flush=True)))


if __name__ == "__main__":
    sys.exit(main())
