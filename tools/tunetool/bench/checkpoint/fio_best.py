"""The best that fio reaches on the medium with the state's bytes, for comparison with the engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tunetool.measure import Direction, tester
from tunetool.measure.evidence import Counted
from tunetool.measure.fio import DATA_FILE, Fio, FioFailed, Job, Outcome, arguments, run
from tunetool.measure.sampling import Counting
from tunetool.measure.sequential import MIB
from tunetool.node.machine.block_stack import BlockStack

COUNTS: Sequence[int] = (1, 2, 4, 8, 16)
"""Numbers of files to try; each file has its own job."""
LEAST_BYTES = 4 * MIB
LARGEST_REQUEST = 1024 * MIB
"""Of a read from memory, in bytes."""
SLACK_BYTES = 8 * MIB
"""Bytes that a journal, a superblock and the system's log may write besides a save."""
_CEILING_SECONDS = 2.0
"""Of a sample of fio, by which the length of those without storage is chosen."""
_PATIENCE, _SLOWEST = 120.0, 20e6
"""Seconds that a job may take, and the slowest bytes per second, which add to them."""


@dataclass(frozen=True)
class FioSample:
    """One fio process over the state's bytes."""

    bandwidth: float
    claimed_bytes: int
    counted: Counted | None
    cores: float = 0.0


@dataclass
class FioBest:
    """fio on one medium: tries the numbers of files once, then measures with the best one in every round."""

    fio: Fio
    directory: Path
    stack: BlockStack
    total_bytes: int
    direct: bool
    environment: Mapping[str, str]
    tick: Callable[[], None] = lambda: None
    ceilings: dict[Direction, list[Outcome]] = field(default_factory=dict)
    """Samples of fio without storage, by the best number of files; none where that failed."""
    searched: dict[Direction, dict[int, float]] = field(default_factory=lambda: {"write": {}, "read": {}})

    def search(self) -> None:
        """Try every number of files once, in both directions. Raises ``FioFailed``."""
        for files in counts(self.total_bytes):
            self.searched["write"][files] = self._run("write", files).bandwidth
            self.searched["read"][files] = self._run("read", files).bandwidth
            self.remove()
        for direction in self.searched:
            self.ceilings[direction] = self._ceiling(direction)

    def best(self, direction: Direction) -> int:
        """The number of files that was fastest."""
        rates = self.searched[direction]
        return max(rates, key=lambda files: rates[files])

    def sample(self) -> tuple[FioSample, FioSample]:
        """A write of fresh files and a read, each by the best number of files."""
        write = self._run("write", self.best("write"))
        if self.best("read") != self.best("write"):
            self.remove()
            self._run("write", self.best("read"))
        read = self._run("read", self.best("read"))
        self.remove()
        return write, read

    def remove(self) -> None:
        """Remove the files, so that the next write is to new ones."""
        for number in range(max(COUNTS)):
            (self.directory / DATA_FILE.format(number=number)).unlink(missing_ok=True)

    def job(self, direction: Direction, files: int) -> Job:
        """fio's arguments. On a memory file system, allocating space is part of the time, since it is most of the
        work; but files have their size from the start, as ours do, which ``huge=within_size`` asks for. Reads from
        there go to as much memory as the state has: into a buffer that stays in the cores' cache nobody restores."""
        job = Job(
            direction,
            files,
            self.total_bytes // files // MIB * MIB,
            direct=self.direct,
            fallocate="truncate" if self.stack.in_memory else "native",
        )
        if direction == "write" or not self.stack.in_memory:
            return job
        requests = -(-job.file_bytes // LARGEST_REQUEST)
        block = job.file_bytes // requests // MIB * MIB
        return replace(job, file_bytes=requests * block, block_bytes=block, queue_depth=1, touched=True)

    def _ceiling(self, direction: Direction) -> list[Outcome]:
        job = replace(self.job(direction, self.best(direction)), block_bytes=MIB, touched=False)
        argv = arguments(self.fio, job)
        load = tester.Load(self.fio, argv, direction, _CEILING_SECONDS, self.directory, self.environment)
        try:
            return load.sample_ceiling(self.tick)
        except FioFailed:
            # A figure less in the record: fio's own rows do not depend on it.
            return []

    def _run(self, direction: Direction, files: int) -> FioSample:
        job = self.job(direction, files)
        timeout = _PATIENCE + self.total_bytes / _SLOWEST
        with Counting(self.stack, f"fio's {direction}", direct=self.directory if self.direct else None) as counting:
            outcome = run(self.fio, job, self.directory, self.environment, timeout, self.tick)
        counted = counting.count(direction, outcome.claimed_bytes, slack=SLACK_BYTES)
        return FioSample(outcome.bandwidth, outcome.claimed_bytes, counted, outcome.cores)


def counts(total_bytes: int) -> list[int]:
    """Numbers of files that leave each a few requests at least."""
    return [files for files in COUNTS if total_bytes // files >= LEAST_BYTES]
