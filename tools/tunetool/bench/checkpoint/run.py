"""``tunetool bench checkpoint``: look, start the ranks once, measure every engine on every medium, keep the record."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from tunetool import record as records
from tunetool.bench.checkpoint import figures, preflight
from tunetool.bench.checkpoint.fio_best import FioBest
from tunetool.bench.checkpoint.request import KIND, Request, Result
from tunetool.bench.checkpoint.samples import Matrix
from tunetool.bench.checkpoint.session import Session
from tunetool.bench.checkpoint.site import Site
from tunetool.bench.checkpoint.states import Shape
from tunetool.errors import CannotJudge, ExitCode
from tunetool.measure import busy, page_cache, rundir
from tunetool.measure.facts import node_facts
from tunetool.measure.fio import Fio, find_fio
from tunetool.measure.progress import Progress
from tunetool.measure.sequential import takes_direct_io
from tunetool.measure.worker import preloads
from tunetool.node.machine.block_stack import BlockStack
from tunetool.node.machine.drives import read_drives
from tunetool.record import Record, Scalar
from tunetool.verdict import exit_code

REPORT = "report.html"


def bench(request: Request, progress: Progress, environment: Mapping[str, str] | None = None) -> Result:
    """Run it. Raises ``UsageProblem`` before any work when the call is wrong, ``CannotJudge`` when it cannot start."""
    environment = os.environ if environment is None else environment
    started = records.utc_now()
    places = preflight.places(request)
    names = preflight.engines(request)
    shape = preflight.state(request)
    for path, _ in places:
        preflight.check_space(request, path, shape.bytes)
    preflight.check_memory(request, shape.bytes, names, [stack for _, stack in places], preflight.available_memory())
    fio = find_fio(environment) if request.against_fio else None
    for line in preflight.announcement(request, shape, names, [stack for _, stack in places]):
        progress.say(line)
    if request.dry_run:
        return Result(None, None, ExitCode.OK)
    runs_dir = request.runs_dir or records.default_runs_dir()
    records.prepare_runs_dir(runs_dir)
    run = _Run(request, places, names, shape, fio, environment, progress)
    errors: list[str] = []
    try:
        run.run()
    except CannotJudge as error:
        errors.append(f"{error.message}; {error.hint}" if error.hint else error.message)
    except OSError as error:
        errors.append(f"`{error.filename or 'system call'}`: {error.strerror or error}; see `dmesg | tail`")
    record = run.record(started, [*errors, *run.left_behind])
    path = records.write(record, runs_dir, run.raw)
    assert record.verdict is not None  # noqa: S101  (made above)
    return Result(record, path, exit_code([record.verdict.status]))


@dataclass
class _Run:
    request: Request
    places: Sequence[tuple[Path, BlockStack]]
    names: Sequence[str]
    shape: Shape
    fio: Fio | None
    environment: Mapping[str, str]
    progress: Progress
    matrices: list[Matrix] = field(default_factory=list)
    left_behind: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    raw: dict[str, str] = field(default_factory=dict)
    told: dict[str, Scalar] = field(default_factory=dict)

    def run(self) -> None:
        """Everything that needs the drives and GPUs for itself. Raises ``CannotJudge``."""
        with ExitStack() as held:
            directories = [self._hold(held, path, stack) for path, stack in self.places]
            logs = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="tunetool-")))
            held.enter_context(rundir.janitor(logs))
            session = held.enter_context(Session(self.request, self.shape.bytes, self.environment, logs, raw=self.raw))
            with self.progress.step(f"{self.request.ranks} rank(s) start, and make the state", 0) as tick:
                session.tick = tick
                session.start()
            self.told = {name: session.told[name] for name in ("device", "gpu", "torch") if session.told.get(name)}
            for left, ((_, stack), place) in enumerate(zip(self.places, directories, strict=True)):
                matrix = Matrix(stack, stack.in_memory, self.shape.bytes)
                self.matrices.append(matrix)
                fio = self._fio_best(place, stack)
                deadline = self._deadline(len(self.places) - left)
                Site(self.request, session, place, self.names, matrix, self.progress, fio, deadline).run()
            session.end()

    def _deadline(self, media: int) -> float | None:
        """An equal share of what is left of the time for each medium that is left."""
        if self.request.budget is None:
            return None
        now = time.monotonic()
        return now + (self.began + self.request.budget - now) / media

    def _hold(self, held: ExitStack, path: Path, stack: BlockStack) -> Path:
        """The run's own directory there, once nobody else is at work."""
        key = stack.device_number or f"dev-{path.stat().st_dev}"
        held.enter_context(busy.device_lock(key, busy.lock_directory(self.environment, os.geteuid() == 0)))
        rundir.remove_stale(rundir.stale_directories(path))
        if not self.request.allow_busy:
            with self.progress.step("looking for other work", busy.LOOK_SECONDS) as tick:
                busy.refuse(busy.look(stack, tick))
        place = held.enter_context(rundir.run_directory(path, records.new_id(), self.left_behind.append))
        held.enter_context(rundir.janitor(place))
        return place

    def _fio_best(self, place: Path, stack: BlockStack) -> FioBest | None:
        if self.fio is None:
            return None
        direct = takes_direct_io(place)
        return FioBest(self.fio, place, stack, self.shape.bytes, direct, self.environment)

    def record(self, started: datetime, errors: Sequence[str]) -> Record:
        """The record, for a run that failed as well."""
        request = self.request
        conditions: dict[str, Scalar] = {
            "model": request.model,
            "state": self.shape.describe(),
            "ranks": request.ranks,
            "rounds": request.rounds,
            "seed": request.seed,
            "cold": page_cache.HOW,
            **self.told,
        }
        if request.training:
            loop = request.training
            conditions |= {
                "steps": loop.steps,
                "sharded_every": loop.sharded_every,
                "consolidated_every": loop.consolidated_every,
                "step_seconds": loop.step_seconds,
            }
        doubts = [
            f"`{name}` was set, so foreign code ran in tunetool itself: unset it" for name in preloads(self.environment)
        ]
        stack = self.places[0][1]
        return Record(
            kind=KIND,
            id=records.new_id(),
            started=started,
            finished=records.utc_now(),
            node=node_facts(read_drives(), stack),
            command=list(request.command),
            target=", ".join(stack.directory for _, stack in self.places),
            measurements=[each for matrix in self.matrices for each in figures.measurements(matrix, conditions)],
            checks=[each for matrix in self.matrices for each in figures.checks(matrix)],
            verdict=figures.verdict(self.matrices, errors, doubts),
        )
