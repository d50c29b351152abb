"""``tunetool bench loading``: make the model, load it by every engine in every state, keep the record."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunetool.bench.loading import figures, preflight
from tunetool.bench.loading.engines import ENGINES, PLAIN
from tunetool.bench.loading.preflight import Medium
from tunetool.bench.loading.ranks import Ranks
from tunetool.bench.loading.request import KIND, Request
from tunetool.bench.loading.samples import Load, Matrix, Row, State
from tunetool.checkpoint import build_read_loop
from tunetool.loading.safetensors_files import files_of
from tunetool.measure import fio as programs
from tunetool.measure import page_cache, session
from tunetool.measure.evidence import Counted
from tunetool.measure.fio import Fio, FioFailed
from tunetool.measure.pace import rounds_of
from tunetool.measure.progress import Progress
from tunetool.measure.rounds import drawn_order, undecided
from tunetool.measure.sampling import Counting, again
from tunetool.measure.session import Findings, Result, Session
from tunetool.measure.worker import Failed, foreign_code
from tunetool.record import Scalar
from tunetool.training.model import reference_model

_SLOWEST = 10e6
"""Bytes per second, for the longest time that it may take."""


def read_by_fio(fio: Fio, model: Path, environment: Mapping[str, str], tick: Callable[[], None]) -> float:
    """Bytes per second of reads of all files at the same time, each once. Raises ``FioFailed``."""
    # Hugging Face's caches consist of links.
    paths = [(model / name).resolve() for name in files_of(model)]
    sizes = [path.stat().st_size for path in paths]
    job = programs.Job("read", 1, min(sizes), block_bytes=1 << 20 if min(sizes) >= 1 << 20 else 4096, queue_depth=16)
    argv = [
        fio.path,
        "--thread=1",
        "--group_reporting=1",
        "--readonly",
        f"--rw={job.direction}",
        f"--bs={job.block_bytes}",
        "--direct=1",
        f"--ioengine={job.engine}",
        f"--iodepth={job.queue_depth}",
        "--output-format=json",
    ]
    for number, path in enumerate(paths):
        # fio takes a colon for the end of a name.
        argv += [f"--name=file-{number}", "--filename=" + str(path).replace(":", "\\:")]
    done = programs.execute(fio, argv, model, environment, 60 + sum(sizes) / _SLOWEST, tick)
    return programs.parse(fio, job, *done).bandwidth


_FIO = "fio"
_PART = 16 << 20


def bench(request: Request, progress: Progress, environment: Mapping[str, str] | None = None) -> Result:
    """Run it. Raises ``UsageProblem`` before any work when the call is wrong, ``CannotJudge`` when it cannot start."""
    return session.run(KIND, request.run, _Loading(request), progress, environment)


@dataclass
class _Loading:
    request: Request
    media: Sequence[Medium] = ()
    names: Sequence[str] = ()
    size: int = 0
    fio: Fio | None = None
    matrices: list[Matrix] = field(default_factory=list)
    pinned: dict[int, float] = field(default_factory=dict)
    facts: dict[str, Scalar] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)

    def announce(self, session: Session) -> None:
        """See ``session.Work``."""
        request, self.environment = self.request, session.environment
        self.names = preflight.engine_names(request)
        self.media = preflight.media(request)
        preflight.need_torch()
        self.size = preflight.model_bytes(request)
        preflight.check_space(request, self.media)
        preflight.check_gpus(request)
        self.fio = preflight.fio(self.media, self.environment, session.progress.say)
        for line in preflight.announcement(request, self.size, self.names, self.media):
            session.progress.say(line)

    def measure(self, session: Session) -> None:
        """See ``session.Work``."""
        models = [self._model(medium, session) for medium in self.media]
        self._begin(models[0], session)
        gpu = preflight.on_gpu(self.request)
        work: list[tuple[Matrix, Path]] = []
        for medium, model in zip(self.media, models, strict=True):
            for state, gpus in itertools.product(medium.states, self.request.gpus):
                matrix = Matrix(state, medium.stack, gpus, pinned=self.pinned)
                matrix.rows = {name: Row(name, ENGINES[name].unavailable(gpu)) for name in self.names}
                self.matrices.append(matrix)
                work.append((matrix, model))
        pace = self.request.pace
        for number in rounds_of(pace, pace.deadline(session.began), self._undecided, session.progress.say):
            if gpu:
                self._copy_pinned(number, session)
            for matrix, model in drawn_order(work, self.request.seed, number):
                self._round(matrix, model, number, session)

    def _undecided(self) -> list[str]:
        return undecided(each for matrix in self.matrices for each in figures.measurements(matrix, {}))

    def _model(self, medium: Medium, session: Session) -> Path:
        if not medium.is_made:
            session.lock([medium.stack])
            session.look(medium.stack)
            return medium.directory
        directory = session.directory(medium.directory, medium.stack) / "model"
        directory.mkdir()
        with session.progress.step(
            f"{medium.directory}: the model `{self.request.model}` is made", self.size / 1e9
        ) as tick:
            reference_model.write(self.request.model, directory, self.request.seed, tick=lambda _: tick())
        return directory

    def _begin(self, model: Path, session: Session) -> None:
        """Learn what the files hold, by reads that nothing of an engine takes part in."""
        step = session.progress.step("what the files hold, by plain reads", self.size / 1e9)
        with step as tick, self._ranks("plain reads", 1, tick) as ranks:
            self.facts = {name: value for name, value in ranks.start().items() if value}
            self.digests = ranks.load(PLAIN, model, self.size)[0]

    def _ranks(self, what: str, count: int, tick: Callable[[], None]) -> Ranks:
        device = "cuda" if preflight.on_gpu(self.request) else "cpu"
        return Ranks(what, count, device, self.environment, tick)

    def _copy_pinned(self, number: int, session: Session) -> None:
        what = "copies from pinned memory"
        with session.progress.step(f"{what}-{number}", 0) as tick, self._ranks(what, 1, tick) as ranks:
            ranks.start()
            self.pinned[number] = ranks.copy_pinned()

    def _round(self, matrix: Matrix, model: Path, number: int, session: Session) -> None:
        runners = [name for name, row in matrix.rows.items() if row.left_out is None]
        # What reads second may find more in a cache of the drives, or of a hypervisor: fio has no place of its own.
        others = [_FIO] if self.fio is not None and matrix.state == "cold" else []
        for name in drawn_order([*others, *runners], self.request.seed, number, matrix.key):
            if name == _FIO:
                self._read_by_fio(matrix, model, number, session)
                continue
            row = matrix.rows[name]
            if row.failed is not None:
                continue
            try:
                self._sample(matrix, row, model, number, session)
            except Failed as error:
                row.failed = error.line
                session.raw[f"{matrix.key}-{name}.txt"] = error.raw
                session.progress.say(f"{matrix.key} {name}: {error.line}")

    def _read_by_fio(self, matrix: Matrix, model: Path, number: int, session: Session) -> None:
        assert self.fio is not None  # noqa: S101  (it has a turn only where it is there)
        bring_to("cold", model)
        try:
            with session.progress.step(f"{matrix.key} {_FIO}-{number}", self.size / 1e9) as tick:
                matrix.fio[number] = read_by_fio(self.fio, model, self.environment, tick)
        except FioFailed as error:
            self.fio = None
            session.raw["fio.txt"] = error.raw
            session.progress.say(f"cold loads are no longer compared with fio: {error.line}")

    def _sample(self, matrix: Matrix, row: Row, model: Path, number: int, session: Session) -> None:
        loads = again(
            f"{matrix.key} {row.name}-{number}",
            lambda label: self._loads(matrix, row.name, model, label, session),
            lambda taken: [judgement for load in taken for judgement in load.judgements],
            matrix.repeated,
            session.progress.say,
        )
        is_equal = all(load.is_equal for load in loads)
        if is_equal and not row.first and (why := figures.past_the_cache(matrix, loads[-1])):
            row.left_out = why
            return
        row.first[number] = loads[0]
        if len(loads) > 1:
            row.warm[number] = loads[1]

    def _loads(self, matrix: Matrix, name: str, model: Path, label: str, session: Session) -> list[Load]:
        """In a process of their own: the first, and where it changes nothing for the next, a warm one."""
        step = session.progress.step(label, self.size / 1e9)
        with step as tick, self._ranks(f"`{name}`", matrix.gpus, tick) as ranks:
            ranks.start()
            bring_to(matrix.state, model)
            with Counting(matrix.stack, f"a load by `{name}`") as counting:
                answers = ranks.load(name, model, self.size)
            if matrix.state == "cold":
                # Several processes, each by itself, may fetch the files as often as there are processes.
                claimed = max(answers[0]["bytes"], sum(answer["drives"] for answer in answers))
                return [self._load(name, answers, counting.count("read", claimed, slack=figures.SLACK_BYTES))]
            return [self._load(name, answers), self._load(name, ranks.load(name, model, self.size))]

    def _load(self, name: str, answers: Sequence[Mapping[str, Any]], counted: Counted | None = None) -> Load:
        which = "nameless" if ENGINES[name].renames else "named"
        equal = all(answer[which] == self.digests[which] for answer in answers)
        seconds, fetched = max(answer["seconds"] for answer in answers), sum(answer["drives"] for answer in answers)
        return Load(seconds, answers[0]["bytes"], equal, fetched, counted=counted)

    def findings(self) -> Findings:
        """See ``session.Work``."""
        conditions: dict[str, Scalar] = {
            "model": self.request.model,
            "model_bytes": self.size,
            "rounds": self.request.pace.rounds,
            "seed": self.request.seed,
            "compiled": build_read_loop.MADE.is_file(),
            **self.facts,
        }
        doubts = foreign_code(self.environment)
        return Findings(
            figures.case(self.matrices, conditions, doubts),
            target=", ".join(medium.stack.directory for medium in self.media),
            stack=self.media[0].stack,
        )


def bring_to(state: State, model: Path) -> None:
    """Drop the files from the page cache, or read them into it; a tmpfs is as it is."""
    for name in files_of(model):
        # Hugging Face's caches consist of links.
        path = (model / name).resolve()
        if state == "cold":
            page_cache.drop_file(path)
        elif state == "cached":
            with path.open("rb", buffering=0) as stream:
                while stream.read(_PART):
                    pass
