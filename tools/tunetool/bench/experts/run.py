"""``tunetool bench experts``: write the experts, read them at random and by traces, keep the record."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunetool.bench.experts import blocks, figures, preflight
from tunetool.bench.experts.preflight import Place, Plan
from tunetool.bench.experts.request import KIND, Request
from tunetool.bench.experts.samples import MODES, TARGET, Mode, Reading, Row
from tunetool.bench.experts.trace import Demand
from tunetool.errors import CannotJudge
from tunetool.measure import session
from tunetool.measure.evidence import incomplete
from tunetool.measure.pace import Pace, rounds_of
from tunetool.measure.page_cache import drop_file
from tunetool.measure.progress import Progress
from tunetool.measure.residency import resident_bytes
from tunetool.measure.rounds import drawn_order
from tunetool.measure.sampling import Counting, again, judgement
from tunetool.measure.sequential import takes_direct_io
from tunetool.measure.session import Findings, Result, Session
from tunetool.measure.worker import Worker, child_command, foreign_code
from tunetool.record import Scalar

_CHILD = Path(__file__).with_name("child.py")
_PATIENCE, _SLOWEST = 120.0, 5e6
"""Seconds that an answer may take, and the slowest bytes per second, which add to them."""


def bench(request: Request, progress: Progress, environment: Mapping[str, str] | None = None) -> Result:
    """Run it. Raises ``UsageProblem`` before any work when the call is wrong, ``CannotJudge`` when it cannot start."""
    return session.run(KIND, request.run, _Experts(request), progress, environment)


@dataclass
class _Opened:
    """A directory with its file of experts, and the process that reads it."""

    place: Place
    directory: Path
    worker: Worker
    rows: dict[Mode, Row] = field(default_factory=dict)

    @property
    def data(self) -> Path:
        """The file."""
        return self.directory / blocks.DATA


@dataclass
class _Experts:
    request: Request
    rows: list[Row] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    plan: Plan = field(init=False)

    def announce(self, session: Session) -> None:
        """See ``session.Work``."""
        self.plan = preflight.plan(self.request)
        preflight.check_room(self.request, self.plan)
        for line in preflight.announcement(self.request, self.plan):
            session.progress.say(line)

    def measure(self, session: Session) -> None:
        """See ``session.Work``."""
        self.doubts += foreign_code(session.environment)
        session.lock([place.stack for place in self.plan.places])
        for place in self.plan.places:
            session.look(place.stack)
        opened = [self._open(place, session) for place in self.plan.places]
        if any(row.misread for row in self.rows):
            return
        traces = self._traces(opened[0])
        for number in rounds_of(Pace(self.request.rounds)):
            for each, mode in drawn_order(itertools.product(opened, MODES), self.request.seed, number):
                self._sample(each, each.rows[mode], None, number, session)
            for row, demand in drawn_order(traces, self.request.seed, number, "traces"):
                self._sample(opened[0], row, demand, number, session)

    def _open(self, place: Place, session: Session) -> _Opened:
        """Write the file, start its reader, and look at every page that either way of reading gives."""
        request, block = self.request, self.plan.block
        directory = session.directory(place.directory)
        if not takes_direct_io(directory):
            raise CannotJudge(f"`{place.directory}` takes no direct I/O", "choose a directory on another file system")
        size = request.experts * block
        path = directory / blocks.DATA
        with session.progress.step(f"{place.directory}: {request.experts} experts are written", size / 1e9) as tick:
            blocks.write(path, request.experts, block, request.seed, tick)
        self.doubts += incomplete(directory, [blocks.DATA], size)
        command = child_command(Path(sys.executable), _CHILD)
        worker = session.hold(Worker(command, f"the reader of `{place.directory}`", session.environment))
        opened = _Opened(place, directory, worker)
        slots = self.plan.slots(request, place.name)
        self._ask(opened, {"do": "open", "path": str(path), "block": block, "slots": slots, "threads": request.threads})
        for mode in MODES:
            row = opened.rows[mode] = Row(place.name, place.stack, mode)
            self.rows.append(row)
            with session.progress.step(f"{row.key}: every page is looked at", size / 1e9) as tick:
                worker.tick = tick
                drop_file(path)
                order = {"do": "random", "mode": mode, "order": list(range(request.experts)), "whole": True}
                row.misread = self._ask(opened, order)["wrong"]
        return opened

    def _traces(self, opened: _Opened) -> list[tuple[Row, Demand]]:
        """A row for each trace and each size of the cache."""
        traces = []
        for demand, slots in itertools.product(self.plan.demands(self.request), self.plan.cached):
            expected = demand.expected_hit_rate(slots)
            row = Row(TARGET, opened.place.stack, "direct", demand.pattern, slots, expected)
            self.rows.append(row)
            traces.append((row, demand))
        return traces

    def _sample(self, opened: _Opened, row: Row, demand: Demand | None, number: int, session: Session) -> None:
        def take(label: str) -> Reading:
            if demand is None:
                return self._pass(opened, row, number, label, session)
            return self._replay(opened, row, demand, number, label, session)

        row.readings[number] = again(f"{row.key}-{number}", take, judgement, row.repeated, session.progress.say)

    def _pass(self, opened: _Opened, row: Row, number: int, label: str, session: Session) -> Reading:
        """All experts once, in random order, out of a cold page cache."""
        experts = drawn_order(range(self.request.experts), self.request.seed, row.place, number)
        order = {"do": "random", "mode": row.mode, "order": experts, "whole": False}
        count = self.request.experts * self.plan.block
        with session.progress.step(label, count / 1e9) as tick:
            drop_file(opened.data)
            before, _ = resident_bytes(opened.directory)
            answer, counting = self._counted(opened, order, label, tick, row.mode == "direct")
        return Reading(
            answer["seconds"],
            claimed_bytes=count,
            wanted_bytes=count,
            latencies=answer["latencies"],
            counted=counting.count("read", count),
            moment=counting.moment,
            wanted=self.request.experts,
            wrong=answer["wrong"],
            cached_bytes=(before, resident_bytes(opened.directory)[0]),
        )

    def _replay(self, opened: _Opened, row: Row, demand: Demand, number: int, label: str, session: Session) -> Reading:
        """The trace of this round, with a cache as a long run leaves it."""
        block, cache = self.plan.block, demand.warm_cache(row.slots, number)
        held = cache.held()
        steps = [cache.take(step) for step in itertools.islice(demand.steps(number), self.plan.steps)]
        hits = sum(access.is_hit for step in steps for access in step)
        count = sum(map(len, steps))
        with session.progress.step(label, (count - hits + row.slots) * block / 1e9) as tick:
            opened.worker.tick = tick
            # Other rows read through the page cache.
            drop_file(opened.data)
            self._ask(opened, {"do": "fill", "held": held})
            answer, counting = self._counted(opened, {"do": "replay", "steps": steps}, label, tick, direct=True)
            wrong = self._ask(opened, {"do": "check", "held": cache.held()})["wrong"]
        read = (count - hits) * block
        return Reading(
            answer["seconds"],
            claimed_bytes=read,
            wanted_bytes=count * block,
            latencies=answer["latencies"],
            counted=counting.count("read", read),
            moment=counting.moment,
            hits=hits,
            wanted=count,
            wrong=answer["wrong"] + wrong,
        )

    def _counted(
        self, opened: _Opened, order: Mapping[str, Any], label: str, tick: Callable[[], None], direct: bool
    ) -> tuple[dict[str, Any], Counting]:
        """The reader's answer, and what the drives counted meanwhile."""
        counting = Counting(opened.place.stack, f"`{label}`", direct=opened.directory if direct else None)
        with counting:
            opened.worker.tick = counting.ticking(tick)
            answer = self._ask(opened, order)
        return answer, counting

    def _ask(self, opened: _Opened, order: Mapping[str, Any]) -> dict[str, Any]:
        most = max(self.request.experts, self.plan.steps * self.plan.top_k) * self.plan.block
        return opened.worker.ask(order, _PATIENCE + most / _SLOWEST)

    def findings(self) -> Findings:
        """See ``session.Work``."""
        request, planned, model = self.request, self.plan, self.plan.model
        conditions: dict[str, Scalar] = {
            "expert_bytes": planned.expert_bytes,
            "block_bytes": planned.block,
            "experts": request.experts,
            "threads": request.threads,
            "top_k": planned.top_k,
            "steps": planned.steps,
            "zipf_exponent": request.zipf,
            "rounds": request.rounds,
            "seed": request.seed,
        }
        if model is not None:
            conditions |= {
                "model": str(request.config),
                "model_type": model.model_type,
                "model_bytes": model.total_bytes,
            }
        return Findings(
            figures.case(self.rows, conditions, model, self.doubts),
            target=", ".join(place.stack.directory for place in planned.places),
            stack=planned.places[0].stack,
        )
