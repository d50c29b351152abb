"""Runs DeepSpeed's handle over a file, sample by sample, and believes nothing that it says about itself."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunetool.measure import Direction, worker
from tunetool.measure.aio.ops import Probe, need, probe
from tunetool.measure.aio.spec import FILE, Spec, check_limits, check_shape, granule, script
from tunetool.measure.evidence import Claim, Counted, incomplete
from tunetool.measure.progress import Progress
from tunetool.measure.sampling import Counting, Repeats, collect, judgement
from tunetool.measure.sequential import free_bytes
from tunetool.measure.worker import Failed, Worker, child_command
from tunetool.node.common.commands import last_line
from tunetool.node.common.files import read_int, read_text
from tunetool.node.machine.block_stack import BlockStack
from tunetool.node.units import format_size

START_SECONDS = 180.0
"""The longest that torch may take to be imported, and memory to be locked and filled."""
SLOWEST = 20e6
"""Bytes per second below which a pass counts as stuck."""
_CAP_IPC_LOCK = 14


@dataclass(frozen=True)
class Pass(Claim):
    """One sample: whole passes over the file; ``seconds`` until the last pass was done, as ds_io counts."""

    durable_seconds: float
    """For a write: until it was synced as well."""
    passes: tuple[float, ...]
    counted: Counted | None
    moment: float
    cores: float | None = None
    """How many cores' worth of time the process spent until the last pass was done; None where it does not say."""

    @property
    def bandwidth(self) -> float:
        """Bytes per second, a write's sync included."""
        return self.claimed_bytes / self.durable_seconds


@dataclass
class Outcome:
    """Filled while measuring, so that what was measured before a failure is kept."""

    engine: str = ""
    samples: dict[Direction, list[Pass]] = field(default_factory=dict)
    repeated: dict[Direction, Repeats] = field(default_factory=lambda: defaultdict(Repeats))
    messages: str = ""
    """The end of what the child printed."""


def run(
    spec: Spec,
    stack: BlockStack,
    environment: Mapping[str, str],
    progress: Progress,
    outcome: Outcome | None = None,
    installed: Probe | None = None,
) -> Outcome:
    """Measure. Raises ``Missing`` without torch, DeepSpeed or its op, ``Failed`` if anything is not as claimed."""
    outcome = Outcome() if outcome is None else outcome
    installed = probe(spec.python, environment) if installed is None else installed
    need(installed, spec.op)
    sector = sector_bytes(stack)
    check_shape(spec, sector)
    check_limits(spec, free_bytes(spec.directory), memlock(), _limit(resource.RLIMIT_FSIZE))
    outcome.engine = f"{spec.handle} (deepspeed {installed.deepspeed}, torch {installed.torch})"
    what = f"the process that runs DeepSpeed's `{spec.handle}`"
    with Worker(child_command(spec.python, script("child.py")), what, environment) as child:
        try:
            _Run(spec, stack, progress, outcome, child, sector).execute(installed)
        finally:
            outcome.messages = child.messages()
    return outcome


@dataclass
class _Run:
    spec: Spec
    stack: BlockStack
    progress: Progress
    outcome: Outcome
    child: Worker
    sector: int
    stamp: int = 0
    pace: float = SLOWEST

    def execute(self, installed: Probe) -> None:
        with self._step("start", 5) as tick:
            self.child.tick = tick
            self._open(installed)
        self._pass("write", "layout", loops=1)
        self._stored()
        for direction in self.spec.directions:
            if direction == "write":
                self._warm_up("write")
                self._direction("write")
                self._stored()
        # By another process and past the cache, whatever is measured: reads of a file that is wrong prove nothing.
        expected = self._digest()
        self._read_back(expected)
        if "read" in self.spec.directions:
            self.child.ask({"do": "clear"}, START_SECONDS)
            self._warm_up("read", least=1)
            if self._digest() != expected:
                raise Failed(f"`{self.spec.handle}` read something else than what the file holds")
            self._direction("read")
            self._stored()

    def _open(self, installed: Probe) -> None:
        check_opened(self.spec, self.child.ask(open_order(self.spec, installed), START_SECONDS), self.sector)

    def _warm_up(self, direction: Direction, least: int = 0) -> None:
        for _ in range(max(least, self.spec.warm_ups)):
            self._pass(direction, f"{direction} warm-up", loops=1)

    def _direction(self, direction: Direction) -> None:
        collect(
            self.outcome.samples.setdefault(direction, []),
            direction,
            self.spec.samples,
            lambda name: self._pass(direction, name, loops=None if self.spec.seconds else 1),
            judgement,
            self.outcome.repeated[direction],
            lambda line: self.progress.say(f"deepspeed {line}"),
        )

    def _pass(self, direction: Direction, name: str, loops: int | None) -> Pass:
        self.stamp += 1
        seconds = self.spec.seconds if loops is None else None
        expected = seconds or self.spec.io_bytes / self.pace
        longest = 60 + 5 * (seconds or 0.0) + 10 * self.spec.io_bytes / self.pace
        order = {"do": "move", "direction": direction, "seconds": seconds, "loops": loops, "stamp": self.stamp}
        with self._step(name, expected if self.pace > SLOWEST else 1.0) as tick:
            self.child.tick = tick
            sample = take(self.child, self.stack, order, longest, name, self.spec.directory)
        self.pace = max(SLOWEST, self.spec.io_bytes / max(sample.passes))
        return sample

    def _stored(self) -> None:
        problems = incomplete(self.spec.directory, [FILE], self.spec.io_bytes)
        size = self.spec.file.stat().st_size if self.spec.file.exists() else 0
        if not problems and size != self.spec.io_bytes:
            problems = [f"`{FILE}` holds {format_size(size)}, {format_size(self.spec.io_bytes)} were written to it"]
        if problems:
            raise Failed(f"`{self.spec.handle}` reported success, but {problems[0]}", raw=self.child.messages())

    def _digest(self) -> str:
        answer: dict[str, Any] = self.child.ask({"do": "digest"}, START_SECONDS + self.spec.io_bytes / 100e6)
        return str(answer["sha256"])

    def _read_back(self, expected: str) -> None:
        with self._step("read-back", self.spec.io_bytes / 1e9) as tick:
            stored = read_back(self.spec.file, self.spec.io_bytes, tick)
        if stored["bytes"] != self.spec.io_bytes or stored["sha256"] != expected:
            raise Failed(
                f"`{self.spec.handle}` reported success, but the file does not hold what was written to it",
                "look for I/O errors: `dmesg | tail`",
            )

    def _step(self, name: str, seconds: float) -> Any:
        return self.progress.step(f"{self.spec.directory.parent}: deepspeed {self.spec.device} {name}", seconds)


def open_order(spec: Spec, installed: Probe) -> dict[str, Any]:
    """By which a child makes its handle and its buffer."""
    return {
        "do": "open",
        "files": [str(installed.find(part)) for part in installed.parts(spec.op)],
        "file": str(spec.file),
        **{name: getattr(spec, name) for name in ("io_bytes", "device", "block_bytes", "queue_depth")},
        **{name: getattr(spec, name) for name in ("single_submit", "overlap_events", "intra_op_parallelism")},
        **{name: getattr(spec, name) for name in ("pinned_by", "call", "pending")},
    }


def check_opened(spec: Spec, facts: Mapping[str, Any], sector: int) -> None:
    """Whether the answer to ``open_order`` is a buffer that can be moved. Raises ``Failed``."""
    unit = granule(1, sector)
    if facts["address"] % unit:
        raise Failed(f"`{spec.handle}` got memory at {facts['address']:#x}, which is not aligned to {unit} bytes")
    wanted = facts.get("alignment")
    if wanted and spec.io_bytes % int(wanted):
        raise Failed(f"`{spec.handle}` asks for multiples of {wanted} bytes, {spec.io_bytes} is none")


def take(
    child: Worker,
    stack: BlockStack,
    order: Mapping[str, Any],
    longest: float,
    name: str,
    direct: Path | None = None,
) -> Pass:
    """One sample by a child that answers ``move``, between two looks at the drives. Raises ``CannotJudge``.

    ``direct``: the directory of the files, where they are opened for direct I/O.
    """
    with Counting(stack, f"`{name}`", direct=direct) as counting:
        answer = child.ask(order, longest)
    claimed = int(answer["bytes"])
    counted = counting.count(order["direction"], claimed)
    spent = answer.get("cpu_seconds")
    return Pass(
        claimed,
        answer["seconds"],
        answer["durable_seconds"],
        tuple(answer["passes"]),
        counted,
        counting.moment,
        None if spent is None else spent / answer["seconds"],
    )


def read_back(file: Path, size: int, tick: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Checksum and size of the file, read by another process past the page cache. Raises ``Failed``."""
    limit = 60 + size / SLOWEST
    process = worker.start([sys.executable, str(script("readback.py")), str(file)], os.environ)
    try:
        done = worker.finish(process, limit, tick)
    except worker.Overdue as left:
        raise Failed(f"`{file}` could not be read back within {limit:.0f} s{left}", worker.STUCK_HINT) from None
    if done.code != 0:
        last = last_line(done.stderr, "no message")
        raise Failed(f"what was written cannot be read back: {last}", "look for I/O errors: `dmesg | tail`")
    stored: dict[str, Any] = json.loads(done.stdout)
    return stored


def sector_bytes(stack: BlockStack, root: str = "") -> int:
    """The largest logical block of the drives underneath: what direct I/O must be aligned to."""
    sizes = [read_int(f"{root}/sys/class/block/{leaf.name}/queue/logical_block_size") for leaf in stack.leaves]
    return max([512, *(size for size in sizes if size)])


def memlock(root: str = "") -> int | None:
    """How many bytes this process may lock; None: as many as it likes. A capability overrides the limit."""
    capabilities = 0
    for line in (read_text(f"{root}/proc/self/status") or "").splitlines():
        if line.startswith("CapEff:"):
            capabilities = int(line.split()[1], 16)
    return None if capabilities >> _CAP_IPC_LOCK & 1 else _limit(resource.RLIMIT_MEMLOCK)


def _limit(name: int) -> int | None:
    soft, _ = resource.getrlimit(name)
    return None if soft == resource.RLIM_INFINITY else soft
