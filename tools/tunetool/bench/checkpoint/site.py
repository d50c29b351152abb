"""One medium: in every round, each engine in a random order saves, restores from a cold cache, and is cleaned up."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunetool.bench.checkpoint import figures
from tunetool.bench.checkpoint.fio_best import SLACK_BYTES, FioBest
from tunetool.bench.checkpoint.rank_processes import RankProcesses
from tunetool.bench.checkpoint.request import Request, Training
from tunetool.bench.checkpoint.samples import FioRows, Matrix, Moved, Row, Sample
from tunetool.launch.local import RankFailed
from tunetool.measure import Direction, page_cache
from tunetool.measure.evidence import Counted
from tunetool.measure.fio import FioFailed
from tunetool.measure.pace import rounds_of
from tunetool.measure.progress import Progress
from tunetool.measure.rounds import drawn_order, undecided
from tunetool.measure.sampling import Counting, again

FIO = "fio"
GUESS = 1e9
"""Assumed bytes per second before the first measurement."""
NO_LOOP = "no training loop with it: the time was up"
LATE = "the time was up before its turn: give a longer `--budget` or fewer `--engines`"


@dataclass
class Site:
    """The work on one medium, inside the run's directory there."""

    request: Request
    ranks: RankProcesses
    directory: Path
    names: Sequence[str]
    matrix: Matrix
    progress: Progress
    fio: FioBest | None = None
    deadline: float | None = None
    """Deadline on the monotonic clock: a round that would end later does not begin; where `--budget` was asked for,
    the first one stops there too."""
    _ready: set[tuple[int, str]] = field(default_factory=set)
    """Asynchronous engines that made their first save, by start of the ranks."""
    _settled: int = 0
    """Number of the start whose ranks have this directory."""

    def run(self) -> None:
        """Run all rounds. Raises ``RankFailed`` if the ranks cannot be started again, or ``CannotJudge``."""
        self._settle()
        if self.fio is not None:
            self._search()
        runners = [name for name, row in self.matrix.rows.items() if row.left_out is None]
        for number in rounds_of(self.request.pace, self.deadline, self._undecided, self.progress.say):
            for name in drawn_order([*runners, *([FIO] if self.fio else [])], self.request.seed, number):
                if name == FIO:
                    self._fio_sample(number)
                elif self.matrix.rows[name].failed is not None:
                    continue
                elif number == 1 and self._late():
                    self.matrix.rows[name].failed = LATE
                else:
                    self._guarded(self.matrix.rows[name], lambda row: self._round(row, number))  # noqa: B023  (called at once)
        if self.request.training is not None:
            self._train(self.request.training)
        for row in self.matrix.rows.values():
            if row.left_out is None and row.failed is None:
                self._guarded(row, lambda row: self._ask({"do": "close", "engine": row.name}))

    def _undecided(self) -> list[str]:
        return undecided(figures.measurements(self.matrix, {}))

    def _late(self) -> bool:
        asked = self.request.budget is not None
        return asked and self.deadline is not None and time.monotonic() > self.deadline

    def _settle(self) -> None:
        """Send the directory to the ranks, once for each start."""
        if self._settled == self.ranks.starts:
            return
        self._settled = self.ranks.starts
        # Each engine by itself: one whose library breaks at its import must not take the others' rows away.
        for name in self.names:
            row = self.matrix.rows.setdefault(name, Row(name))
            if row.left_out is None and row.failed is None:
                self._guarded(row, self._introduce)

    def _introduce(self, row: Row) -> None:
        share = self.matrix.state_bytes // self.request.ranks
        order = {"do": "place", "directory": str(self.directory), "bytes": share, "engines": [row.name]}
        answers = [each["engines"][row.name] for each in self._ask(order)]
        row.remark = answers[0]["remark"]
        row.left_out = next((each["unavailable"] for each in answers if each["unavailable"]), None)

    def _guarded(self, row: Row, act: Callable[[Row], Any]) -> None:
        """``act``; what goes wrong is the engine's row, and the others go on with new ranks where it took them down."""
        try:
            act(row)
        except RankFailed as error:
            row.failed = f"{error.message}; {error.hint}" if error.hint else error.message
            self.progress.say(f"{row.name}: {row.failed}")
            if self.ranks.usable_after(error):
                self._clear()
                return
            # Ranks that still wait for each other may write still.
            self.ranks.stop()
            self._clear()
            self.progress.say("starting the ranks again without it")
            self.ranks.start()
            self._settle()

    def _round(self, row: Row, number: int) -> None:
        if row.engine.asynchronous:
            self._warm_up(row)
        row.samples[number] = again(
            f"{row.name}-{number}",
            lambda name: self._sample(row, name, overwrite=False),
            lambda sample: sample.judgements,
            self.matrix.repeated,
            self.progress.say,
        )

    def _warm_up(self, row: Row) -> None:
        """The first save in these ranks: it makes buffers and processes, and the state is overwritten behind it."""
        if (self.ranks.starts, row.name) in self._ready:
            return
        self._ready.add((self.ranks.starts, row.name))
        sample = self._sample(row, f"{row.name}-first", overwrite=True)
        row.first = row.first or sample

    def _sample(self, row: Row, name: str, overwrite: bool) -> Sample:
        directory = self.directory / name
        with self.progress.step(f"{self.matrix.stack.directory}: {name}", self._expected(row)) as tick:
            self.ranks.tick = tick
            answers, counted = self._counted(
                "write",
                {"do": "save", "engine": row.name, "directory": str(directory), "overwrite": overwrite},
                directory,
            )
            began = min(each["began"] for each in answers)
            size = page_cache.size_of(directory)
            write = Moved(
                max(each["ended"] for each in answers) - began,
                size,
                sum(each["cpu_seconds"] for each in answers),
                counted=counted,
            )
            stall = max(each["returned"] - each["began"] for each in answers)
            peaks = [each["peak_bytes"] for each in answers]
            peak = None if None in peaks else sum(peaks)
            page_cache.drop(directory)
            answers, counted = self._counted(
                "read", {"do": "load", "engine": row.name, "directory": str(directory)}, directory
            )
            self._clear()
        read = Moved(
            max(each["ended"] for each in answers) - min(each["began"] for each in answers),
            size,
            sum(each["cpu_seconds"] for each in answers),
            counted=counted,
        )
        different = [f"rank {rank}: {each['different']}" for rank, each in enumerate(answers) if each["different"]]
        return Sample(stall, write, peak, read, different[0] if different else None)

    def _expected(self, row: Row) -> float:
        """Expected seconds: as the last time, or an estimate."""
        last = next(reversed(row.samples.values()), None)
        if last is None or last.read is None:
            return 2 * self.matrix.state_bytes / GUESS
        return last.write.seconds + last.read.seconds

    def _counted(
        self, direction: Direction, order: Mapping[str, Any], directory: Path
    ) -> tuple[list[dict[str, Any]], Counted | None]:
        with Counting(self.matrix.stack, f"a {direction} by `{order['engine']}`") as counting:
            answers = self._ask(order)
        return answers, counting.count(direction, page_cache.size_of(directory), slack=SLACK_BYTES)

    def _ask(self, order: Mapping[str, Any]) -> list[dict[str, Any]]:
        return self.ranks.ask(order)

    def _clear(self) -> None:
        """Remove every checkpoint, and let the file system finish with it outside of anybody's time."""
        for path in self.directory.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
        if not self.matrix.memory:
            os.sync()

    def _search(self) -> None:
        assert self.fio is not None  # noqa: S101  (asked before)
        rows = self.matrix.fio = FioRows(self.fio.fio.version, self.fio.direct)
        try:
            with self.progress.step(f"{self.matrix.stack.directory}: the best of fio", 0) as tick:
                self.fio.tick = tick
                self.fio.search()
        except FioFailed as error:
            self._fio_failed(error)
            return
        rows.searched, rows.ceilings = self.fio.searched, self.fio.ceilings
        rows.files = {"write": self.fio.best("write"), "read": self.fio.best("read")}

    def _fio_sample(self, number: int) -> None:
        rows, fio = self.matrix.fio, self.fio
        if fio is None or rows is None or rows.failed is not None:
            return
        try:
            with self.progress.step(f"{self.matrix.stack.directory}: fio-{number}", 0) as tick:
                fio.tick = tick
                rows.samples["write"][number], rows.samples["read"][number] = again(
                    f"{FIO}-{number}",
                    lambda _: fio.sample(),
                    lambda pair: [each.counted.judgement for each in pair if each.counted is not None],
                    self.matrix.repeated,
                    self.progress.say,
                )
        except FioFailed as error:
            self._fio_failed(error)

    def _fio_failed(self, error: FioFailed) -> None:
        assert self.matrix.fio is not None  # noqa: S101  (made before fio runs)
        self.matrix.fio.failed = error.message
        self.matrix.errors.append(f"{error.message}; {error.hint}" if error.hint else error.message)
        self.ranks.raw[f"fio-{self.matrix.stack.medium}.txt".replace("/", "-")] = error.raw

    def _train(self, training: Training) -> None:
        """Run loops with an engine's saves, each between two loops without saves."""
        loops = min(self.request.pace.rounds, training.loops)
        runners = [row for row in self.matrix.rows.values() if row.left_out is None and row.different is None]
        for number in range(loops):
            for name in drawn_order([row.name for row in runners], self.request.seed, -1 - number):
                row = self.matrix.rows[name]
                if row.failed is not None or not training.saves(training.every(row.name)):
                    continue
                if self._late():
                    if not row.lost and NO_LOOP not in row.remark:
                        row.remark = "; ".join([*([row.remark] if row.remark else []), NO_LOOP])
                else:
                    self._guarded(row, lambda row: self._loops(row, training))

    def _loops(self, row: Row, training: Training) -> None:
        if self.ranks.calibrated != self.ranks.starts:
            self._ask({"do": "calibrate", "step_seconds": training.step_seconds})
            self.ranks.calibrated = self.ranks.starts
        if row.engine.asynchronous:
            self._warm_up(row)
        every = training.every(row.name)
        count = training.saves(every)
        directories = [str(self.directory / f"{row.name}-train-{number}") for number in range(count)]
        bare: dict[str, Any] = {"do": "train", "steps": training.steps, "every": every, "directories": []}
        with self.progress.step(f"{self.matrix.stack.directory}: training with {row.name}", 0) as tick:
            self.ranks.tick = tick
            before = _loop_seconds(self._ask(bare))
            answers = self._ask({**bare, "engine": row.name, "directories": directories})
            self._clear()
            after = _loop_seconds(self._ask(bare))
        self.matrix.baseline += [before, after]
        row.every = every
        row.lost.append((_loop_seconds(answers) - (before + after) / 2) / count)
        row.held += [max(each["held"][number] for each in answers) for number in range(count)]


def _loop_seconds(answers: Sequence[Mapping[str, Any]]) -> float:
    return float(max(each["ended"] for each in answers) - min(each["began"] for each in answers))
