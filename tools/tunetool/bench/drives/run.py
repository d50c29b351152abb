"""``tunetool bench drives``: make layouts or take a standing volume, measure each in every round, keep the record."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tunetool.bench.drives import calls, figures, preflight
from tunetool.bench.drives.handle import Handles, spec_of
from tunetool.bench.drives.layouts import ARRAY, LAYOUTS, RAW
from tunetool.bench.drives.made import Made
from tunetool.bench.drives.preflight import DIRECTIONS, FIO, HANDLES, Plan
from tunetool.bench.drives.request import KIND, Request
from tunetool.bench.drives.samples import Cell, Reading, Row
from tunetool.bench.drives.volume import BareDrive, stack_of, virtual_drives, volume
from tunetool.errors import CannotJudge
from tunetool.measure import session, tester
from tunetool.measure.aio.driver import sector_bytes
from tunetool.measure.aio.spec import Spec, check_shape
from tunetool.measure.evidence import incomplete
from tunetool.measure.figures import ceiling_figures
from tunetool.measure.fio import Fio, find_fio
from tunetool.measure.ladder.calls import raw_reads
from tunetool.measure.ladder.raw import by_slot, sub_stack
from tunetool.measure.ladder.sampler import Call, Part, Sampler
from tunetool.measure.ladder.source import RawData, Span, raw_data, unmoved
from tunetool.measure.pace import rounds_of
from tunetool.measure.progress import Progress
from tunetool.measure.rounds import drawn_order, undecided
from tunetool.measure.sampling import Counting, again, judgement, judgement_of_fio
from tunetool.measure.sequential import Sample, takes_direct_io
from tunetool.measure.session import Findings, Result, Session
from tunetool.measure.worker import Failed, foreign_code
from tunetool.node.common.file_lock import Locked, only_one
from tunetool.node.machine.block_stack import BlockStack
from tunetool.node.machine.drives import read_drives
from tunetool.record import CheckResult, Scalar

_SLOW = 5e7
"""Bytes per second of a slow drive."""


def bench(request: Request, progress: Progress) -> Result:
    """Run it. Raises ``UsageProblem`` before any work when the call is wrong, ``CannotJudge`` when it cannot start."""
    # Without torch fio measures: the handles are left out.
    return session.run(KIND, request.run, _Drives(request), progress, request.training_python.environment(os.environ))


@dataclass(frozen=True)
class _Volume:
    """What is measured: files in a directory for each drive, or ranges of devices."""

    layout: str
    drives: int
    stack: BlockStack
    directories: Sequence[Path] = ()
    spans: Sequence[Span] = ()
    """Raw: read-only."""

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.layout} over {self.drives}"


@dataclass
class _Drives:
    request: Request
    rows: dict[Cell, Row] = field(default_factory=dict)
    doubts: list[str] = field(default_factory=list)
    left_behind: list[str] = field(default_factory=list)
    plan: Plan = field(init=False)
    fio: Fio = field(init=False)
    session: Session = field(init=False)
    base: Path = field(init=False)
    bare: Sequence[BareDrive] = ()
    handles: dict[str, Handles] = field(default_factory=dict)
    ceilings: dict[Cell, list[float]] = field(default_factory=dict)
    """Bytes per second without storage, which do not depend on the layout of files."""
    without: list[CheckResult] = field(default_factory=list)
    """Engines that turned out not to work here."""
    proven: set[Cell] = field(default_factory=set)
    """Volumes on which every byte of the handle's files was compared."""

    def announce(self, session: Session) -> None:
        """See ``session.Work``."""
        self.session = session
        self.plan = preflight.plan(self.request, session.environment)
        self.fio = find_fio(session.environment)
        for line in preflight.announcement(self.request, self.plan):
            session.progress.say(line)

    def measure(self, session: Session) -> None:
        """See ``session.Work``."""
        self.doubts += foreign_code(session.environment)
        # Without an engine nothing is written to a drive.
        if not (self.plan.volumes and self.plan.engines):
            return
        volumes = self._standing() if self.plan.mode == "standing" else self._to_be_made()
        self._start_handles()
        pace = self.request.pace
        for number in rounds_of(pace, pace.deadline(session.began), self._undecided, session.progress.say):
            for layout, drives in drawn_order(self.plan.volumes, self.request.seed, number):
                with volumes(layout, drives) as opened:
                    self._round(opened, number)

    def _undecided(self) -> list[str]:
        return undecided(figures.measurements(self.rows, {}))

    # -- what is measured

    def _standing(self) -> Callable[[str, int], contextlib.AbstractContextManager[_Volume]]:
        """Files on the target's file system, and where they lie on its drives."""
        stack, target = self.plan.stack, self.request.target
        assert stack is not None  # noqa: S101  (by the mode)
        assert target is not None  # noqa: S101
        self.base = self.session.directory(target, stack)
        directories = [self.base / f"part-{number}" for number in range(1, len(stack.leaves) + 1)]
        for directory in directories:
            directory.mkdir()
        self._lay_out(_Volume("files", len(directories), stack, directories))
        raw, obstacle = raw_data(stack, calls.paths(directories))
        if raw is None and any(layout == RAW for layout, _ in self.plan.volumes):
            raise CannotJudge(f"the drives cannot be read where the run's files lie: {obstacle}")

        @contextlib.contextmanager
        def opened(layout: str, drives: int) -> Iterator[_Volume]:
            if layout not in (RAW, ARRAY) or raw is None:
                yield _Volume(layout, drives, stack, directories)
                return
            yield self._raw(layout, drives, raw)
            if not unmoved(raw):
                raise CannotJudge("the file system moved the files meanwhile: what was read may not have been theirs")

        return opened

    def _raw(self, layout: str, drives: int, raw: RawData) -> _Volume:
        assert self.plan.stack is not None  # noqa: S101  (by the mode)
        stack = self.plan.stack
        if layout == ARRAY:
            return _Volume(layout, drives, stack, spans=raw.array)
        chosen = by_slot(raw, read_drives())[:drives]
        part = sub_stack(stack, chosen)
        medium = "nvme disk" if drives == 1 else f"{drives} x nvme"
        spans = [span for name in chosen for span in raw.members[name]]
        return _Volume(layout, drives, replace(part, medium=medium), spans=spans)

    def _to_be_made(self) -> Callable[[str, int], contextlib.AbstractContextManager[_Volume]]:
        """Layouts over blank drives, or over virtual ones."""
        if self.plan.mode == "virtual":
            assert self.request.target is not None  # noqa: S101  (by the mode)
            self.base = self.session.directory(self.request.target, self.plan.stack)
        else:
            # No run of a playbook takes the drives meanwhile, since that takes this lock too.
            self.session.hold(_node_lock())
            stacks = [stack_of([each.drive], "nvme disk") for each in self.plan.drives]
            self.session.lock(stacks)
            self.session.look(stack_of([each.drive for each in self.plan.drives], "nvme disks"))
            self.base = self.session.temporary()
        made = self.session.hold(Made(self.left_behind.append))
        self.bare = self.plan.drives
        if self.plan.mode == "virtual":
            self.bare = virtual_drives(made, self.base, self.request.virtual, self.request.virtual_bytes)

        @contextlib.contextmanager
        def opened(layout: str, drives: int) -> Iterator[_Volume]:
            chosen = self.bare[:drives]
            self.session.progress.say(f"{layout} over {drives}: is made")
            with volume(LAYOUTS[layout], chosen, made, self.base) as made_now:
                kind = "loop device on disk" if self.plan.mode == "virtual" else "nvme"
                medium = LAYOUTS[layout].medium(drives, kind)
                mirror = made_now.array if LAYOUTS[layout].copies(drives) > 1 else None
                directories = made_now.directories
                stack = stack_of([each.drive for each in chosen], medium, directories[0], mirror)
                held = _Volume(layout, drives, stack, directories)
                self._lay_out(held)
                yield held

        return opened

    # -- measuring

    def _start_handles(self) -> None:
        """DeepSpeed's processes, which stay while volumes come and go."""
        planned, request, installed = self.plan, self.request, self.plan.installed
        sector = max([512, *(each.drive.lba_bytes for each in self.bare)])
        if planned.stack is not None:
            sector = max(sector, sector_bytes(planned.stack))
        for engine in planned.engines:
            if engine not in HANDLES or installed is None:
                continue
            spec = Spec(
                self.base,
                planned.io_bytes,
                intra_op_parallelism=planned.parallelism,
                python=request.training_python.path,
            )
            check_shape(spec, sector)
            environment = self.session.environment
            handles = Handles(spec_of(spec, HANDLES[engine]), installed, environment, sector)
            self.handles[engine] = self.session.hold(handles)
            with self.session.progress.step(f"{engine}: starts", 5 * planned.most_drives) as tick:
                handles.tick = tick
                self._attempt(engine, lambda each=handles: each.start(planned.most_drives))  # type: ignore[misc]

    def _attempt(self, engine: str, act: Callable[[], None]) -> None:
        """What shows whether a handle works here at all, as cuFile may not; without that the others are measured."""
        try:
            act()
        except Failed as error:
            self.session.progress.say(f"{engine}: left out: {error.message}")
            self.without.append(
                preflight.skip(f"engine.{engine}", "this engine is measured", error.message, error.hint or "")
            )
            self.session.raw[f"{engine}.txt"] = error.raw
            # The answers of other processes to this order would be taken for those to the next one.
            self.handles.pop(engine).__exit__()

    def _round(self, opened: _Volume, number: int) -> None:
        """Each engine in each direction once, in an order that is drawn."""
        if not opened.spans:
            for engine in list(self.handles):
                self._lay_out_handle(opened, engine)
        usable = [*FIO] if opened.spans else [*FIO, *self.handles]
        engines = [engine for engine in self.plan.engines if engine in usable]
        directions = ("read",) if opened.spans else DIRECTIONS
        cells = [
            Cell(opened.layout, opened.drives, engine, direction)
            for engine, direction in itertools.product(engines, directions)
        ]
        for cell in drawn_order(cells, self.request.seed, number, opened.title):
            row = self._row(cell, opened)
            label = f"{cell.key}-{number}"
            say, repeats = self.session.progress.say, row.repeated
            if cell.engine in FIO:
                sample = again(label, lambda name, c=cell: self._fio(c, opened, name), judgement_of_fio, repeats, say)  # type: ignore[misc]
                outcome = sample.outcome
                reading = Reading(outcome.claimed_bytes, outcome.seconds, sample.counted, sample.moment, outcome.cores)
            else:
                reading = again(label, lambda name, c=cell: self._handle(c, opened, name), judgement, repeats, say)  # type: ignore[misc]
            row.readings[number] = reading

    def _row(self, cell: Cell, opened: _Volume) -> Row:
        """The row of a cell, once with what its program reaches without storage."""
        if cell in self.rows:
            return self.rows[cell]
        key = cell._replace(layout=RAW if opened.spans else "")
        if cell.engine in FIO:
            program, threads = f"fio {self.fio.version}", _fio_threads(opened)
        else:
            program = self.handles[cell.engine].program
            threads = opened.drives * self.plan.parallelism
        if key not in self.ceilings:
            self.ceilings[key] = self._without_storage(cell, opened)
        row = self.rows[cell] = Row(cell, opened.stack, program, threads, self.ceilings[key])
        return row

    def _without_storage(self, cell: Cell, opened: _Volume) -> list[float]:
        duration, name = self.request.duration, cell.key
        if cell.engine in HANDLES:
            with self.session.progress.step(f"{name}: the handle without storage", tester.seconds(duration)) as tick:
                handles = self.handles[cell.engine]
                handles.tick = tick
                return handles.without_storage(opened.directories, duration)
        load = tester.Load(
            self.fio, self._argv(cell, opened), cell.direction, duration, self.base, self.session.environment
        )
        kept: dict[str, str] = {}
        outcomes = tester.measure_ceiling(load, name, self.session.progress, kept)
        return [outcome.bandwidth for outcome in outcomes]

    def _argv(self, cell: Cell, opened: _Volume) -> list[str]:
        duration, engine = self.request.duration, FIO[cell.engine]
        if opened.spans:
            drives_each = opened.drives if opened.layout == ARRAY else 1
            return raw_reads(self.fio, [("raw", opened.spans)], duration, drives_each, engine)
        job = calls.file_job(cell.direction, self.plan.file_bytes, duration, engine)
        return calls.files(self.fio, job, opened.directories)

    def _fio(self, cell: Cell, opened: _Volume, name: str) -> Sample:
        part = Part("", opened.stack)
        return self._shoot(Call(name, self._argv(cell, opened), cell.direction, self.request.duration, [part]), opened)

    def _shoot(self, call: Call, opened: _Volume) -> Sample:
        raw: dict[str, str] = {}
        session = self.session
        sampler = Sampler(opened.stack, self.fio, self.base, session.environment, session.progress, raw)
        try:
            return sampler.sample(call)[""]
        except CannotJudge:
            # Of hundreds of samples, the output of the one that failed is kept.
            session.raw.update(raw)
            raise

    def _handle(self, cell: Cell, opened: _Volume, name: str) -> Reading:
        handles, duration = self.handles[cell.engine], self.request.duration
        step = self.session.progress.step(f"{opened.stack.directory}: {name}", duration)
        with step as tick, Counting(opened.stack, f"`{name}`", direct=self.base) as counting:
            handles.tick = tick
            moved = handles.move(opened.directories, cell.direction, duration)
        counted = counting.count(cell.direction, moved.claimed_bytes)
        return Reading(moved.claimed_bytes, moved.seconds, counted, counting.moment, moved.cores)

    def _lay_out(self, opened: _Volume) -> None:
        """Write fio's files once: what is read later was written, and writes are overwrites."""
        if not takes_direct_io(opened.directories[0]):
            raise CannotJudge(
                f"`{opened.directories[0]}` takes no direct I/O", "choose a directory on another file system"
            )
        size = self.plan.file_bytes
        files = calls.paths(opened.directories)
        argv = calls.files(self.fio, calls.file_job("write", size, None, "libaio"), opened.directories)
        seconds = len(files) * size / _SLOW
        self._shoot(Call(f"{opened.title}-layout", argv, "write", seconds, [Part("", opened.stack)]), opened)
        for directory in opened.directories:
            names = [path.name for path in files if path.parent == directory]
            self.doubts += incomplete(directory, names, size)

    def _lay_out_handle(self, opened: _Volume, engine: str) -> None:
        """The handle's files; in the first round of a volume every byte is compared."""
        handles, cell = self.handles[engine], Cell(opened.layout, opened.drives, engine, "write")
        size = opened.drives * handles.spec.io_bytes
        with self.session.progress.step(f"{opened.title}: {engine} writes its files", size / 1e9) as tick:
            handles.tick = tick
            if not any(each.engine == engine for each in self.proven):
                self._attempt(engine, lambda: handles.lay_out(opened.directories))
            if engine not in self.handles:
                return
            if cell in self.proven:
                handles.lay_out(opened.directories)
                return
            handles.prove(opened.directories)
            self.proven.add(cell)

    def findings(self) -> Findings | None:
        """See ``session.Work``."""
        request, planned = self.request, self.plan
        conditions: dict[str, Scalar] = {
            "mode": planned.mode,
            "block_bytes": 2**20,
            "queue_depth": 32,
            "file_bytes": planned.file_bytes,
            "handle_bytes": planned.io_bytes if self.handles else 0,
            "sample_seconds": request.duration,
            "rounds": request.pace.rounds,
            "seed": request.seed,
        }
        self.session.left_behind += self.left_behind
        checks = [
            *planned.skipped,
            *self.without,
            *figures.taken_down(planned.mode, len(self.bare), self.left_behind),
        ]
        stack = planned.stack
        if planned.mode == "blank":
            stack = stack_of([each.drive for each in planned.drives], "nvme")
        ceilings = ceiling_figures(stack) if stack is not None and planned.mode != "virtual" else []
        target = ", ".join(request.serials) or str(request.target and request.target.resolve())
        return Findings(figures.case(self.rows, conditions, checks, self.doubts, ceilings), target=target, stack=stack)


def _fio_threads(opened: _Volume) -> int:
    return len(opened.spans) or calls.JOBS_A_DRIVE * len(opened.directories)


@contextlib.contextmanager
def _node_lock() -> Iterator[None]:
    try:
        with only_one(patience=0.0):
            yield
    except Locked as error:
        message, _, hint = str(error).partition(". hint: ")
        raise CannotJudge(message, hint or None) from None
