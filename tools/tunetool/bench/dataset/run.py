"""``tunetool bench dataset``: make the files, read them by every engine in every state, keep the record."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunetool.bench.dataset import figures, files, huge_pool, megatron, preflight
from tunetool.bench.dataset.corpus import Extent
from tunetool.bench.dataset.engines import (
    BatchEngine,
    DaliEngine,
    Engine,
    FioEngine,
    ImageEngine,
    RecordEngine,
    TokenEngine,
    missing_for_images,
    rows_with_workers,
)
from tunetool.bench.dataset.files import Images
from tunetool.bench.dataset.megatron import TokenFiles
from tunetool.bench.dataset.request import KIND, Request
from tunetool.bench.dataset.samples import EngineRow, Pass, State, StateTable
from tunetool.measure import page_cache, session
from tunetool.measure.evidence import LOWEST, incomplete
from tunetool.measure.pace import rounds_of
from tunetool.measure.progress import MovingProgress
from tunetool.measure.residency import resident_bytes
from tunetool.measure.rounds import drawn_order, undecided
from tunetool.measure.sampling import Counting, again
from tunetool.measure.session import Findings, Result, Session
from tunetool.measure.worker import Failed, Worker, child_command, foreign_code
from tunetool.node.machine.block_stack import BlockStack, read_stack
from tunetool.node.machine.container import device_nodes
from tunetool.record import Scalar

_PROGRAMS: Mapping[type, str] = {
    TokenEngine: "token_child.py",
    ImageEngine: "loader_child.py",
    BatchEngine: "batch_child.py",
    FioEngine: "fio_child.py",
    RecordEngine: "tf_child.py",
    DaliEngine: "dali_child.py",
}
_PATIENCE = 600.0
"""Seconds that an answer may take on a busy machine, a pass beside its time."""
_DROPS, _BETWEEN_DROPS = 40, 0.05
_PART = 16 << 20
_WRITTEN = 50e6
"""Bytes of TFRecord shards per second on a slow machine."""


class _LeftOutError(Exception):
    """The engine cannot run on this machine. As text: why."""


def bench(request: Request, progress: MovingProgress, environment: Mapping[str, str] | None = None) -> Result:
    """Run it. Raises ``UsageProblem`` before any work when the call is wrong, ``CannotJudge`` when it cannot start."""
    return session.run(KIND, request.run, _Dataset(request, progress), progress, environment)


@dataclass
class _Dataset:
    request: Request
    progress: MovingProgress
    engines: Mapping[str, Engine] = field(default_factory=dict)
    extent: Extent = field(default_factory=lambda: Extent(0, 0))
    samples: int = 0
    tables: list[StateTable] = field(default_factory=list)
    facts: dict[str, Scalar] = field(default_factory=dict)
    doubts: list[str] = field(default_factory=list)
    no_images: str | None = None
    tokens: TokenFiles | None = None
    images: Images | None = None
    records: Path | None = None
    no_records: str | None = None
    """Why they could not be made."""
    stack: BlockStack = field(init=False)

    def announce(self, session: Session) -> None:
        """See ``session.Work``."""
        request = self.request
        preflight.check_call(request)
        self.engines = preflight.chosen(request)
        self.stack = read_stack(str(request.target.resolve()))
        self.extent = files.extent_of(request)
        self.samples = preflight.check_samples(request, self.extent)
        self.no_images = missing_for_images()
        size = preflight.room(request, self.extent, self._with_images, self._with_records)
        preflight.check_space(request, size)
        for line in preflight.announcement(request, self.stack, size, len(self.engines)):
            session.progress.say(line)

    @property
    def _with_images(self) -> bool:
        return self.no_images is None and any(
            isinstance(each, ImageEngine | DaliEngine) for each in self.engines.values()
        )

    @property
    def _with_records(self) -> bool:
        return any(isinstance(each, RecordEngine) and each.missing() is None for each in self.engines.values())

    def measure(self, session: Session) -> None:
        """See ``session.Work``."""
        request = self.request
        if preflight.fills_pool(request, self.engines) and os.geteuid() == 0:
            session.hold(huge_pool.pool_lock(session.environment))
        directory = session.directory(request.target, self.stack)
        self.doubts = [*foreign_code(session.environment)]
        tokens = directory / "tokens"
        tokens.mkdir()
        self.tokens = files.make_tokens(request, self.extent, tokens, self.progress)
        self.samples = preflight.samples_there(request, self.samples, self.tokens.tokens)
        self.doubts += incomplete(tokens, [self.tokens.tokens_file.name], self.tokens.tokens * megatron.TOKEN_BYTES)
        if self._with_images:
            self.images = files.make_images(request, directory, self.progress)
        if self._with_records:
            self._make_records(directory, session)
        self._make_tables()
        deadline = request.pace.deadline(session.began)
        for number in rounds_of(request.pace, deadline, self._undecided, session.progress.say):
            for table in drawn_order(self.tables, request.seed, number):
                for name in drawn_order(table.rows, request.seed, number, table.state):
                    self._measure_row(table, table.rows[name], number, session)

    def _undecided(self) -> list[str]:
        return undecided(self.findings().case.measurements)

    def _make_records(self, directory: Path, session: Session) -> None:
        self.records = directory / "records"
        self.records.mkdir()
        command = child_command(Path(sys.executable), Path(__file__).with_name(_PROGRAMS[RecordEngine]))
        size = files.room_for_records(self.samples, self._sample_bytes)
        with (
            session.progress.step("TFRecord shards are written", size / _WRITTEN) as tick,
            Worker(command, "TensorFlow", session.environment, tick) as worker,
        ):
            shards = files.record_shards(self.samples, self._sample_bytes)
            try:
                worker.ask({"do": "make", "shards": shards, **self._samples_order(0)}, _PATIENCE + size / _WRITTEN)
            except Failed as error:
                self.no_records = error.line
                session.raw["records.txt"] = error.raw
                session.progress.say(f"TFRecord shards: {error.line}")

    def _make_tables(self) -> None:
        rows = rows_with_workers(self.request.workers)
        for state in preflight.states(self.request, self.stack):
            table = StateTable(state, self.stack)
            self.tables.append(table)
            for name, engine in self.engines.items():
                if state in engine.states:
                    failed = self.no_records if isinstance(engine, RecordEngine) else None
                    table.rows[name] = EngineRow(engine, left_out=self._obstacle(engine), failed=failed)
        # Once: they have no figures in any state.
        self.tables[0].libraries = preflight.libraries(self.request, rows)

    def _obstacle(self, engine: Engine) -> str | None:
        if isinstance(engine, ImageEngine | DaliEngine) and self.no_images is not None:
            return self.no_images
        if isinstance(engine, BatchEngine | DaliEngine | RecordEngine):
            return engine.missing(self.request.device)
        if isinstance(engine, FioEngine | ImageEngine):
            return None
        if engine.pool and self.request.huge_pages is not None:
            return huge_pool.obstacle(self.request.huge_pages)
        return preflight.direct_obstacle(str(self._token_file.parent)) if engine.direct else None

    @property
    def _token_file(self) -> Path:
        assert self.tokens is not None  # noqa: S101  (they are made before anything is read)
        return self.tokens.tokens_file

    def _measure_row(self, table: StateTable, row: EngineRow, number: int, session: Session) -> None:
        if row.left_out is not None or row.failed is not None:
            return
        name = f"{table.state} {row.engine.name}-{number}"
        try:
            row.passes[number] = again(
                name,
                lambda label: self._take(table, row.engine, label, number, session),
                lambda taken: taken.judgements,
                table.repeated,
                session.progress.say,
            )
        except _LeftOutError as reason:
            row.left_out = str(reason)
        except Failed as error:
            row.failed = error.line
            session.raw[f"{table.state}-{row.engine.name}.txt"] = error.raw
            session.progress.say(f"{table.state} {row.engine.name}: {error.line}")

    def _take(self, table: StateTable, engine: Engine, label: str, number: int, session: Session) -> Pass:
        seconds = self.request.seconds
        command = child_command(Path(sys.executable), Path(__file__).with_name(_PROGRAMS[type(engine)]))
        with (
            session.progress.step(label, seconds) as tick,
            Worker(command, f"`{engine.name}`", session.environment, tick) as worker,
        ):
            started = worker.ask({"do": "start", "state": table.state, **self._order(engine, number)}, _PATIENCE)
            if "left_out" in started:
                raise _LeftOutError(started["left_out"])
            if "torch" in started:
                self.facts["torch"] = started["torch"]
            table.rows[engine.name].facts.update(started.get("facts", {}))
            with self._pool(engine, session):
                # A pool that grows takes pages from the page cache.
                bring_to(table.state, self._read_by(engine))
                with Counting(self.stack, f"a pass by `{engine.name}`") as counting:
                    done = worker.ask({"do": "pass", "seconds": seconds}, _PATIENCE + seconds)
            counted = None
            if table.state == "cold":
                # What the kernel reads ahead for the engine is its own, whether a sample needs it or not.
                ahead = max(0, (done["fetched"] or 0) - done["bytes"])
                counted = counting.count("read", done["bytes"], slack=figures.SLACK_BYTES + ahead)
            is_equal = self._is_equal(engine, worker.ask({"do": "check", "samples": done["samples"]}, _PATIENCE))
        return Pass(
            **{name: done[name] for name in ("seconds", "bytes", "samples", "fetched", "cores")},
            **{name: done[name] for name in ("major_faults", "minor_faults")},
            huge_bytes=done.get("huge_bytes", 0),
            pool_bytes=done.get("pool_bytes", 0),
            ended_by_read_ahead=done.get("ended_by_read_ahead", False),
            is_equal=is_equal,
            ceiling=started["ceiling"],
            counted=counted,
        )

    def _order(self, engine: Engine, number: int) -> dict[str, Any]:
        seed = self.request.seed * 1000 + number
        if isinstance(engine, DaliEngine):
            assert self.images is not None  # noqa: S101  (see below)
            on_gpu = self.request.device != "cpu" and bool(device_nodes("nvidia[0-9]*"))
            return {"images": str(self.images.directory), "device": "cuda" if on_gpu else "cpu", "seed": seed}
        if isinstance(engine, ImageEngine):
            assert self.images is not None  # noqa: S101  (without images the engine is left out)
            return {
                "images": str(self.images.directory),
                "shards": str(self.images.shards),
                "files": engine.files,
                "workers": engine.workers,
                "seed": seed,
            }
        tokens = self._samples_order(seed)
        if isinstance(engine, RecordEngine):
            return {**tokens, "engine": engine.name}
        if isinstance(engine, BatchEngine | FioEngine):
            # An `auto` that is no GPU was left out before.
            device = "cpu" if self.request.device == "cpu" else "cuda"
            return {**tokens, "engine": engine.name, "threads": self.request.threads, "device": device}
        how = {name: getattr(engine, name) for name in ("order", "advice", "direct", "opened")}
        return {**tokens, "engine": {**how, "threads": self.request.threads}}

    def _samples_order(self, seed: int) -> dict[str, Any]:
        return {
            "file": str(self._token_file),
            "directory": str(self.records),
            "sample_bytes": self._sample_bytes,
            "count": self.samples,
            "seed": seed,
        }

    def _read_by(self, engine: Engine) -> Path:
        """The directory with the files that the engine reads."""
        if isinstance(engine, RecordEngine):
            assert self.records is not None  # noqa: S101  (without TensorFlow the engine is left out)
            return self.records
        if not isinstance(engine, ImageEngine | DaliEngine):
            return self._token_file.parent
        assert self.images is not None  # noqa: S101  (see above)
        return (
            self.images.shards if isinstance(engine, ImageEngine) and engine.files == "tar" else self.images.directory
        )

    def _pool(self, engine: Engine, session: Session) -> contextlib.AbstractContextManager[None]:
        pages = self.request.huge_pages
        if isinstance(engine, TokenEngine) and engine.pool and pages is not None:
            # Somebody may have filled it since the last pass.
            if why := huge_pool.obstacle(pages):
                raise _LeftOutError(why)
            return huge_pool.huge_pool(pages, session.left_behind.append)
        return contextlib.nullcontext()

    def _is_equal(self, engine: Engine, answered: Mapping[str, Any]) -> bool | None:
        if isinstance(engine, ImageEngine | DaliEngine):
            return bool(answered["equal"])
        if isinstance(engine, FioEngine):
            return None
        return bool(answered["sha256"] == plain_sum(self._token_file, answered["numbers"], self._sample_bytes))

    @property
    def _sample_bytes(self) -> int:
        return self.request.sequence_length * megatron.TOKEN_BYTES

    def findings(self) -> Findings:
        """See ``session.Work``."""
        request = self.request
        conditions: dict[str, Scalar] = {
            "sequence_length": request.sequence_length,
            "tokens": self.tokens.tokens if self.tokens is not None else 0,
            "documents": self.tokens.documents if self.tokens is not None else 0,
            "images": request.images,
            "image_side": request.image_side,
            "threads": request.threads,
            "seconds": request.seconds,
            "rounds": request.pace.rounds,
            "seed": request.seed,
            **self.facts,
        }
        return Findings(
            figures.case(self.tables, conditions, self.doubts), target=self.stack.directory, stack=self.stack
        )


def bring_to(state: State, directory: Path) -> None:
    """Drop all files in a directory from the page cache, or read them into it."""
    paths = list(page_cache.files_under(directory))
    if state == "warm":
        for each in paths:
            with each.open("rb", buffering=0) as stream:
                while stream.read(_PART):
                    pass
        return
    for _ in range(_DROPS):
        for each in paths:
            page_cache.drop_file(each)
        # Pages that the kernel still reads ahead for the engine before this one cannot be dropped yet.
        resident, total = resident_bytes(directory)
        # Half of what the proof of a cold pass forgives.
        if resident <= (1 - LOWEST) / 2 * total:
            return
        time.sleep(_BETWEEN_DROPS)


def plain_sum(path: Path, numbers: list[int], size: int) -> str:
    """The sum over these samples by plain reads."""
    whole = hashlib.sha256()
    with path.open("rb", buffering=0) as stream:
        for number in numbers:
            stream.seek(number * size)
            whole.update(stream.read(size))
    return whole.hexdigest()
