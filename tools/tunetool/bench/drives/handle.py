"""DeepSpeed's handle in processes that start once: one for each drive, each with a file and a buffer of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tunetool.measure import Direction, tester
from tunetool.measure.aio.driver import START_SECONDS, check_opened, open_order, read_back
from tunetool.measure.aio.ops import Probe
from tunetool.measure.aio.spec import FILE, Spec, script
from tunetool.measure.evidence import incomplete
from tunetool.measure.worker import Failed, Worker, ask_all, child_command

_SLOWEST = 5e6
"""Bytes per second below which a sample counts as stuck."""
_HOLE = "hole.data"
"""A file that has a size and no blocks."""


@dataclass(frozen=True)
class Moved:
    """What all processes moved at the same time."""

    claimed_bytes: int
    seconds: float
    """Of the slowest; a write's until it was synced."""
    cores: float


@dataclass
class Handles:
    """As a context manager: no process outlives it."""

    spec: Spec
    """Of each process; its directory is that of no file."""
    installed: Probe
    environment: Mapping[str, str]
    sector: int
    tick: Callable[[], None] = lambda: None
    _children: list[Worker] = field(default_factory=list)
    _held: ExitStack = field(default_factory=ExitStack)
    _stamp: int = 0

    @property
    def program(self) -> str:
        """Name and version."""
        return f"{self.spec.handle} (deepspeed {self.installed.deepspeed}, torch {self.installed.torch})"

    def __enter__(self) -> Handles:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()
        self._children.clear()

    def start(self, processes: int) -> None:
        """Raises ``Failed``."""
        what = f"the process that runs DeepSpeed's `{self.spec.handle}`"
        command = child_command(self.spec.python, script("child.py"))
        for _ in range(processes - len(self._children)):
            self._children.append(self._held.enter_context(Worker(command, what, self.environment, self.tick)))
        # Each makes its own random bytes, so that no file can be taken for another.
        orders = [open_order(self.spec, self.installed)] * len(self._children)
        for facts in self._each(orders, START_SECONDS):
            check_opened(self.spec, facts, self.sector)

    def lay_out(self, directories: Sequence[Path]) -> None:
        """Write each file once. Raises ``Failed``."""
        self.move(directories, "write", None)
        self._stored(directories)

    def move(self, directories: Sequence[Path], direction: Direction, seconds: float | None, name: str = FILE) -> Moved:
        """Whole passes over a file in each directory for ``seconds``; None: one pass. Raises ``Failed``."""
        self._stamp += 1
        order = {"do": "move", "direction": direction, "stamp": self._stamp, "seconds": seconds}
        order["loops"] = None if seconds else 1
        orders = [{**order, "file": str(directory / name)} for directory in directories]
        answers = self._each(orders, self._longest() + 5 * (seconds or 0.0))
        # They start within a millisecond of each other: the slowest one determines the time of all.
        return Moved(
            sum(int(answer["bytes"]) for answer in answers),
            max(answer["durable_seconds"] for answer in answers),
            sum(answer["cpu_seconds"] / answer["seconds"] for answer in answers),
        )

    def prove(self, directories: Sequence[Path]) -> None:
        """Write and read once, and compare what is stored. Raises ``Failed``."""
        self.lay_out(directories)
        expected = self._digests(len(directories))
        for directory, sha256 in zip(directories, expected, strict=True):
            stored = read_back(directory / FILE, self.spec.io_bytes, self.tick)
            if stored["bytes"] != self.spec.io_bytes or stored["sha256"] != sha256:
                raise Failed(
                    f"`{self.spec.handle}` reported success, but `{directory / FILE}` does not hold what was written",
                    "look for I/O errors: `dmesg | tail`",
                )
        self._each([{"do": "clear"}] * len(directories), START_SECONDS)
        self.move(directories, "read", None)
        if self._digests(len(directories)) != expected:
            raise Failed(f"`{self.spec.handle}` read something else than what the files hold")

    def without_storage(self, directories: Sequence[Path], duration: float) -> list[float]:
        """Bytes per second of reads of files without a block, for which no drive is asked; none where that cannot be.

        No file can be written for nothing: the figure of the reads is that of both directions.
        """
        if self.spec.device == "gds":
            return []
        files = [directory / _HOLE for directory in directories]
        try:
            for file in files:
                file.touch()
                os.truncate(file, self.spec.io_bytes)
            if any(file.stat().st_blocks for file in files):
                return []
            seconds = min(tester.LONGEST_SAMPLE, tester.SAMPLE_SHARE * duration)
            moves = [self.move(directories, "read", seconds, _HOLE) for _ in range(tester.SAMPLES)]
            return [move.claimed_bytes / move.seconds for move in moves]
        finally:
            for file in files:
                with suppress(OSError):
                    file.unlink()

    def _stored(self, directories: Sequence[Path]) -> None:
        wrong = [line for directory in directories for line in incomplete(directory, [FILE], self.spec.io_bytes)]
        if wrong:
            raise Failed(f"`{self.spec.handle}` reported success, but {wrong[0]}", raw=self._children[0].messages())

    def _digests(self, count: int) -> list[str]:
        return [str(answer["sha256"]) for answer in self._each([{"do": "digest"}] * count, self._longest())]

    def _longest(self) -> float:
        return 60 + len(self._children) * self.spec.io_bytes / _SLOWEST

    def _each(self, orders: Sequence[Mapping[str, Any]], timeout: float) -> list[dict[str, Any]]:
        """One order for each of the first processes, at the same time."""
        return ask_all(self._children[: len(orders)], orders, timeout, self.tick)


def spec_of(spec: Spec, device: str) -> Spec:
    """The same for another memory."""
    return replace(spec, device=device)  # type: ignore[arg-type]  # one of ``Device``, from ``preflight.ENGINES``
