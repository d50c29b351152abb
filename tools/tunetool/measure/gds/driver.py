"""Moves bytes between a file and HBM, sample by sample: by the drives' counters, by cuFile's, and read back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunetool.measure import Direction
from tunetool.measure.aio.driver import Pass, read_back, take
from tunetool.measure.evidence import incomplete
from tunetool.measure.gds.counters import Counts, Moved, parse, version_of
from tunetool.measure.gds.spec import Spec
from tunetool.measure.progress import Progress
from tunetool.measure.sampling import Repeats, collect, judgement
from tunetool.measure.worker import Failed, Worker, child_command
from tunetool.node.machine.block_stack import BlockStack

START_SECONDS = 60.0
"""CUDA's start, the buffer, cuFile's look at the machine. Without a driver libcufile 1.20 never comes back at all."""
_SLOWEST = 20e6


@dataclass
class Outcome:
    """Filled while measuring, so that what was moved before a failure is kept."""

    samples: dict[Direction, list[Pass]] = field(default_factory=dict)
    repeated: dict[Direction, Repeats] = field(default_factory=lambda: defaultdict(Repeats))
    moved: dict[Direction, Moved] = field(default_factory=dict)
    """By cuFile's counters; empty where cuFile had no part in it."""
    counters: list[dict[str, Any]] = field(default_factory=list)
    """As libcufile wrote them down, each time that they were asked for."""


def start(python: Path, environment: Mapping[str, str]) -> Worker:
    """The process that holds CUDA, cuFile and kvikio."""
    return Worker(
        child_command(python, Path(__file__).with_name("child.py")), "the process that runs cuFile", environment
    )


@dataclass
class Run:
    """One run of ``spec`` in a child that was asked nothing else before but its settings."""

    spec: Spec
    stack: BlockStack
    progress: Progress
    outcome: Outcome
    child: Worker
    stamp: int = 0

    def execute(self) -> None:
        """Measure. Raises ``Failed`` if anything is not as claimed."""
        spec = self.spec
        order = {name: getattr(spec, name) for name in ("io_bytes", "threads", "task_bytes")}
        with self._step("start", 5) as tick:
            self.child.tick = tick
            self._counts(first=True)
            api = "cufile" if spec.cufile else "posix"
            self.child.ask({"do": "open", "file": str(spec.file), "way": api, **order}, START_SECONDS)
        self._pass("write", "layout", loops=1)
        for direction in spec.directions:
            if direction == "write":
                self._direction(direction)
            else:
                self._read(direction)

    def _read(self, direction: Direction) -> None:
        expected = self._digest()
        with self._step("read-back", self.spec.io_bytes / 1e9) as tick:
            stored = read_back(self.spec.file, self.spec.io_bytes, tick)
        short = incomplete(self.spec.directory, [self.spec.file.name], self.spec.io_bytes)
        if stored["sha256"] != expected or stored["bytes"] != self.spec.io_bytes or short:
            raise Failed(
                "kvikio reported success, but the file does not hold what was written to it",
                "look for I/O errors: `dmesg | tail`",
            )
        self.child.ask({"do": "clear"}, START_SECONDS)
        self._pass(direction, "read warm-up", loops=1)
        if self._digest() != expected:
            raise Failed("kvikio read something else than what the file holds")
        self._direction(direction)

    def _direction(self, direction: Direction) -> None:
        before, claimed = self._counts()[direction], 0

        def take(name: str) -> Pass:
            nonlocal claimed
            sample = self._pass(direction, name, loops=None)
            # Of those that are taken again too: cuFile counts them.
            claimed += sample.claimed_bytes
            return sample

        collect(
            self.outcome.samples.setdefault(direction, []),
            direction,
            self.spec.samples,
            take,
            judgement,
            self.outcome.repeated[direction],
            lambda line: self.progress.say(f"gds {line}"),
        )
        if self.spec.cufile:
            self.outcome.moved[direction] = Moved(claimed, self._counts()[direction].since(before))

    def _counts(self, first: bool = False) -> dict[Direction, Counts]:
        if not self.spec.cufile:
            return {"read": Counts(), "write": Counts()}
        answer = self.child.ask({"do": "count", "first": first}, START_SECONDS)
        self.outcome.counters.append(answer)
        raw, version = bytes.fromhex(answer["stats"]), version_of(answer["version"])
        return {"read": parse(raw, version, "read"), "write": parse(raw, version, "write")}

    def _pass(self, direction: Direction, name: str, loops: int | None) -> Pass:
        self.stamp += 1
        seconds = self.spec.seconds if loops is None else None
        order = {"do": "move", "direction": direction, "seconds": seconds, "loops": loops, "stamp": self.stamp}
        longest = 60 + 5 * (seconds or 0.0) + self.spec.io_bytes / _SLOWEST
        with self._step(name, seconds or 1.0) as tick:
            self.child.tick = tick
            return take(self.child, self.stack, order, longest, name)

    def _digest(self) -> str:
        answer: dict[str, Any] = self.child.ask({"do": "digest"}, START_SECONDS + self.spec.io_bytes / 100e6)
        return str(answer["sha256"])

    def _step(self, name: str, seconds: float) -> AbstractContextManager[Any]:
        api = "cuFile" if self.spec.cufile else "POSIX"
        return self.progress.step(f"{self.spec.directory.parent}: gds {api} {name}", seconds)
