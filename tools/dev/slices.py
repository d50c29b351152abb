"""Slices of the slow tests (tests/slices.toml), in turn over the submissions.

    slices.py                what .ci/run does: `make test`, then, if it passed, as many slices as surely end in time
    slices.py NAME ...       these slices, one after another; nothing limits them
    slices.py --list         in the order in which CI takes them, and when each was seen to pass last
    slices.py --ran LOG      write what ran and passed in the output of such a run into tests/slices.toml
    slices.py --next-turn    let CI begin where the last submission should have ended: once for each submission

A slice may take twice its recorded time; none is started that might then end later than the limit. Two run at the same
time: a virtual node keeps about one core busy. CI writes nothing into the repository, and what it printed is not kept
where it passed. So a number in the table, the turn, says with which slice it begins.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

import tomllib

import steps
from steps import ROOT, Outcome

TABLE = ROOT / "tests/slices.toml"
START_WITHIN = 70 * 60.0
"""Seconds since the start within which every slice that is started must end, were it twice as slow as recorded."""
STOP_AFTER = 73 * 60.0
"""Seconds after which whatever runs is stopped: everything then ends within 75 minutes."""
SLOWER = 2
"""How many times slower than recorded a machine may be."""
CLEAN_UP_SECONDS = 120.0
"""`make test` gives its own steps half of it."""
ROWS = 2
"""How many slices run at the same time."""
TURN = "turn"
A_TURN = 4
"""Slices that each submission surely has time for, of the lengths that tests/slices.toml allows."""
PASSED, NOT_RUN, NEW = "passed", "not run", "and never passed before"
HEADER = re.compile(r"=== slices of ([0-9a-f]{8})[0-9a-f]* at (\d{4}-\d\d-\d\d \d\d:\d\d)")
ROW = re.compile(rf"\bslice (\S+) +(\d+)s +\S+  {PASSED}\s*$")


@dataclass(frozen=True)
class Slice:
    """Slow tests that run together."""

    name: str
    paths: tuple[str, ...]
    """Files, or single tests as pytest names them."""
    seconds: float | None = None
    """Seconds that they took; None: never timed, so nothing says that it ends in time."""
    ran: str = ""
    """When they passed last, in UTC, and at which commit; empty: never, so a failure says nothing about this commit."""


def read(path: Path) -> list[Slice]:
    """The slices in the order in which CI takes them."""
    rows = tomllib.loads(path.read_text())
    turn = rows.pop(TURN)
    return in_turn(
        [Slice(name, tuple(row["paths"]), row.get("seconds"), row.get("ran", "")) for name, row in rows.items()], turn
    )


def in_turn(slices: Sequence[Slice], turn: int) -> list[Slice]:
    """Those that have a time, from the one that a turn begins with around to the one before it; then the others."""
    timed = [part for part in slices if part.seconds is not None]
    first = turn * A_TURN % len(timed) if timed else 0
    return [*timed[first:], *timed[:first], *(part for part in slices if part.seconds is None)]


def next_turn(table: str) -> str:
    """The table with the next turn."""
    return re.sub(rf"(?m)^{TURN} = (\d+)$", lambda found: f"{TURN} = {int(found[1]) + 1}", table, count=1)


def next_of(waiting: Sequence[Slice], elapsed: float, limit: float) -> Slice | None:
    """The first slice that surely ends within the limit; None if there is none."""
    return next(
        (part for part in waiting if part.seconds is not None and elapsed + SLOWER * part.seconds <= limit), None
    )


def recorded(table: str, log: str) -> str:
    """The table with the seconds of what passed in the output of a run, and when that was; the rest stays as it was."""
    when = ""
    for line in log.splitlines():
        if header := HEADER.search(line):
            when = f"{header[2]} {header[1]}"
        elif (row := ROW.search(line)) and when:
            section = re.compile(rf"^\[{re.escape(row[1])}\]\n(?:seconds = .*\n|ran = .*\n)*", re.MULTILINE)
            table = section.sub(f'[{row[1]}]\nseconds = {row[2]}\nran = "{when}"\n', table)
    return table


async def step(
    name: str, command: Sequence[str], expected: float | None, seconds: float, beside: bool, new: bool = False
) -> Outcome:
    """Run a command for so many seconds at most; ``beside`` others its lines begin with its name."""
    print(f"=== {name}", flush=True)
    begun, why = time.monotonic(), deque[str](maxlen=steps.LINES_OF_WHY)
    each_line = steps.named(name.removeprefix("slice "), why) if beside else None
    code = await steps.run(command, seconds, each_line, CLEAN_UP_SECONDS)
    status = PASSED if code == 0 else "stopped" if code == steps.STOPPED else "FAILED"
    status += f", {NEW}" if code and new else ""
    return Outcome(name, time.monotonic() - begun, expected, status, tuple(why) if code else ())


async def work(slices: Sequence[Slice], test: bool, rows: int, limit: float, stop: float) -> list[Outcome]:
    """Run `make test` if asked, then slices; returns what ran, in order, then what did not."""
    started = time.monotonic()
    outcomes = [await step("make test", ["make", "test"], None, stop, beside=False)] if test else []
    waiting = list(slices)

    async def row() -> None:
        # After a failure of `make test` nothing lands, and the end of the log has to say why.
        while not (test and outcomes[0].status != PASSED) and (
            part := next_of(waiting, time.monotonic() - started, limit)
        ):
            waiting.remove(part)
            pytest = [str(ROOT / ".venv/bin/python"), "-m", "pytest", "-v", "--durations=0", *part.paths, "-m", "slow"]
            left = stop - (time.monotonic() - started)
            outcomes.append(await step(f"slice {part.name}", pytest, part.seconds, left, rows > 1, new=not part.ran))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(rows):
            tasks.create_task(row())
    return [
        *outcomes,
        *(
            Outcome(f"slice {part.name}", None, part.seconds, NOT_RUN if part.seconds else f"{NOT_RUN}: never timed")
            for part in waiting
        ),
    ]


async def run(options: argparse.Namespace) -> int:
    """The exit status of the slices that were named, or of all that CI runs."""
    slices = read(TABLE)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    print(f"=== slices of {commit.strip()} at {datetime.now(timezone.utc):%Y-%m-%d %H:%M}", flush=True)
    if options.names:
        known = {part.name: part for part in slices}
        wanted = [replace(known[name], seconds=known[name].seconds or 0) for name in options.names]
        outcomes = await work(wanted, test=False, rows=1, limit=math.inf, stop=math.inf)
    else:
        outcomes = await work(slices, test=True, rows=ROWS, limit=options.limit, stop=options.stop)
    steps.show(outcomes, "step", "recorded")
    passed = {each.name for each in outcomes if each.status == PASSED}
    timed = [part for part in slices if part.seconds and f"slice {part.name}" not in passed]
    left = [f"{part.name} ({part.ran or 'never'})" for part in sorted(timed, key=lambda part: part.ran)]
    print(f"seen longest ago: {', '.join(left[:6])}" if left else "all ran")
    failed = [each for each in outcomes if not each.status.startswith((PASSED, NOT_RUN))]
    not_run = len(outcomes) - len(passed) - len(failed)
    print(f"steps: {len(passed)} passed, {len(failed)} failed, {not_run} not run", flush=True)
    return 1 if (options.names and failed) or any(NEW not in each.status for each in failed) else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="these slices alone")
    parser.add_argument("--list", action="store_true", help="the order of CI, and when each was seen to pass last")
    parser.add_argument("--next-turn", action="store_true", help="begin further on, for the next submission")
    parser.add_argument("--ran", type=Path, metavar="LOG", help="record what ran in that output")
    parser.add_argument("--limit", type=float, default=START_WITHIN, help="seconds in all")
    parser.add_argument("--stop", type=float, default=STOP_AFTER, help="seconds after which what runs is stopped")
    options = parser.parse_args()
    if unknown := set(options.names) - {part.name for part in read(TABLE)}:
        parser.error(f"no slice is called {', '.join(sorted(unknown))}")
    if options.ran:
        TABLE.write_text(recorded(TABLE.read_text(), options.ran.read_text(errors="replace")))
    elif options.next_turn:
        TABLE.write_text(next_turn(TABLE.read_text()))
    elif options.list:
        with contextlib.suppress(BrokenPipeError):  # `head` has read what it wants
            for part in read(TABLE):
                print(f"{part.ran or 'never':<26} {steps.seconds(part.seconds):>6}  {part.name}", flush=True)
    else:
        return steps.finish(run(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
