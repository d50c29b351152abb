"""Commands that run at the same time, each within its time: what groups.py and slices.py have in common."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CLEAN_UP_SECONDS = 60.0
"""From SIGTERM to SIGKILL."""
STOPPED = 124
"""Exit status of what did not end in time."""
FAILURE = re.compile(
    r"E   |(FAILED|ERROR) |\S+\.py:\d+: |!+ \S*(KeyboardInterrupt|Interrupted)|(error|hint): |\[gw\d+\] node down"
)
"""What pytest prints of a failure: assertions, where they are, the summary, and where it was stopped."""
LINES_OF_WHY = 24
"""How many of these lines are printed again at the end, for each step that failed."""
LONGEST_LINE = 2**24


@dataclass(frozen=True)
class Outcome:
    """One step's row in the table at the end."""

    name: str
    used: float | None
    """Seconds; None: it did not run."""
    allowed: float | None
    """Seconds; None: nobody knows."""
    status: str
    why: tuple[str, ...] = ()
    """Lines of its output that say what failed."""


async def run(
    command: Sequence[str],
    seconds: float,
    each_line: Callable[[str], None] | None = None,
    clean_up: float = CLEAN_UP_SECONDS,
) -> int:
    """Exit status; 124 when it did not end in time. Its process group goes with it, also when the task is cancelled.

    ``each_line`` takes each line that it prints; without it they go where this program's own go.
    """
    if each_line is None:
        return await ended(await start(command, None), seconds, clean_up)
    # asyncio's own pipe would wait for whatever the command left behind.
    reading, writing = os.pipe()
    reader = asyncio.create_task(pass_on(reading, each_line))
    try:
        process = await start(command, writing)
    finally:
        os.close(writing)
    try:
        return await ended(process, seconds, clean_up)
    finally:
        await asyncio.wait([reader], timeout=5)
        reader.cancel()


async def start(command: Sequence[str], output: int | None) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *command,
        cwd=ROOT,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
    )


async def pass_on(descriptor: int, each_line: Callable[[str], None]) -> None:
    stream = asyncio.StreamReader(LONGEST_LINE)
    file = os.fdopen(descriptor, "rb")
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), file
    )
    try:
        async for line in stream:
            each_line(line.decode(errors="replace"))
    finally:
        transport.close()


async def ended(process: asyncio.subprocess.Process, seconds: float, clean_up: float) -> int:
    """Wait for it; SIGTERM, so that it cleans up, when its time is over, and SIGKILL if it does not."""
    try:
        async with asyncio.timeout(seconds):
            return await process.wait()
    except TimeoutError:
        return STOPPED
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), clean_up)


def named(name: str, why: deque[str]) -> Callable[[str], None]:
    """Prints a line after the step's name; ``why`` gets it too if it says what failed."""

    def take(line: str) -> None:
        print(f"{name:<11} | {line}", end="" if line.endswith("\n") else "\n", flush=True)
        if FAILURE.match(line):
            why.append(line.rstrip()[:300])

    return take


async def in_rows(rows: Iterable[Sequence[str]], run_one: Callable[[str], Awaitable[Outcome]]) -> list[Outcome]:
    """Run the steps of each row one after another, and the rows at the same time."""

    async def row(names: Sequence[str]) -> list[Outcome]:
        return [await run_one(name) for name in names]

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(row(names)) for names in rows]
    return [outcome for task in running for outcome in task.result()]


def finish(work: Coroutine[Any, Any, int]) -> int:
    """The exit status of ``work``. SIGTERM ends it with all its processes, as Ctrl-C does."""

    async def until_told() -> int:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work

    try:
        return asyncio.run(until_told())
    except asyncio.CancelledError:
        return 143
    except KeyboardInterrupt:
        return 130


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}s"


def show(outcomes: Sequence[Outcome], first: str, expected: str = "allowed") -> None:
    """The table, and what failed: where only the end of a long log is kept, it has to say this again."""
    print(f"\n{first:<32} {'used':>7} {expected:>8}  status")
    for each in outcomes:
        print(f"{each.name:<32} {seconds(each.used):>7} {seconds(each.allowed):>8}  {each.status}")
    for each in outcomes:
        for line in each.why:
            print(f"{each.name}: {line}", flush=True)
