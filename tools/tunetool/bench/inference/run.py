"""``tunetool bench inference``: make the model in each place, generate in turns, compare the tokens."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunetool.bench.inference import figures, preflight, sglang
from tunetool.bench.inference.preflight import Plan
from tunetool.bench.inference.request import KIND, Request
from tunetool.bench.inference.samples import MODES, Generation, Mode, Place, Row, Served
from tunetool.errors import CannotJudge
from tunetool.measure import aio, session
from tunetool.measure.aio import Probe
from tunetool.measure.pace import Pace, rounds_of
from tunetool.measure.progress import Progress
from tunetool.measure.rounds import drawn_order
from tunetool.measure.sampling import Counting, again, judgement
from tunetool.measure.session import Findings, Result, Session
from tunetool.measure.worker import Failed, Worker, child_command, foreign_code
from tunetool.node.units import format_size
from tunetool.record import Scalar

_CHILD = Path(__file__).with_name("child.py")
_PATIENCE, _SLOWEST = 600.0, 5e6
_SLOWEST_CPU, _SLOWEST_GPU = 1e8, 1e11
"""Seconds that an answer may take, and the slowest bytes and products per second, which add to them."""
_WARM_UP = 2
"""Tokens of the generation before the first round: DeepSpeed learns the order of the modules in its first pass."""
_SLACK = 8 << 20
"""Bytes that libraries, a journal and the system's log may read besides."""
_GUESS = 1e9


def bench(request: Request, progress: Progress, environment: Mapping[str, str] | None = None) -> Result:
    """Run it. Raises ``UsageProblem`` before any work when the call is wrong, ``CannotJudge`` when it cannot start."""
    return session.run(KIND, request.run, _Inference(request), progress, environment)


@dataclass
class _Inference:
    request: Request
    rows: list[Row] = field(default_factory=list)
    workers: dict[Place, Worker] = field(default_factory=dict)
    served: list[Served] = field(default_factory=list)
    rung: figures.Rung | None = None
    doubts: list[str] = field(default_factory=list)
    plan: Plan = field(init=False)
    installed: Probe = field(init=False)

    def announce(self, session: Session) -> None:
        """See ``session.Work``."""
        self.plan = preflight.plan(self.request)
        self.installed = preflight.need_libraries(self.plan, session.environment)
        for line in preflight.announcement(self.request, self.plan):
            session.progress.say(line)

    def measure(self, session: Session) -> None:
        """See ``session.Work``."""
        self.doubts += foreign_code(session.environment)
        directory = session.directory(self.plan.directory, self.plan.stack)
        for place in self.plan.places:
            why, remedy = self.plan.left_out.get(place, (None, ""))
            self.rows.append(Row(place, self.plan.stack, self._medium(place), why, remedy))
        if "nvme" in self.plan.places:
            self._measure_rung(directory, session)
        for row in self.rows:
            if row.left_out is None:
                self._try(row, session, lambda row: self._build(row, directory, session))
        for number in rounds_of(Pace(self.request.rounds)):
            for row in drawn_order([row for row in self.rows if row.place in self.workers], self.request.seed, number):
                if row.failed is None:
                    self._try(row, session, lambda row, number=number: self._sample(row, number, directory, session))
        # SGLang needs the memory that these have.
        for worker in self.workers.values():
            worker.end()
        for mode in MODES:
            self._serve(mode, directory, session)

    def _medium(self, place: Place) -> str:
        if place == "nvme":
            return self.plan.stack.medium
        return "HBM" if place == "device" and self.plan.gpu else "DRAM"

    def _try(self, row: Row, session: Session, act: Any) -> None:
        """What fails in one place is no reason to give up what the others show."""
        try:
            act(row)
        except Failed as error:
            row.failed = error.line
            session.raw[f"{row.place}.txt"] = error.raw
            if row.place in self.workers:
                # It may live, and hold memory that the others need.
                self.workers[row.place].end()
            session.progress.say(f"{row.place}: {error.line}")

    def _measure_rung(self, directory: Path, session: Session) -> None:
        spec = preflight.rung(self.plan, directory)
        outcome = aio.Outcome()
        try:
            aio.run(spec, self.plan.stack, session.environment, session.progress, outcome, self.installed)
        finally:
            with suppress(FileNotFoundError):
                spec.file.unlink()
        self.rung = figures.Rung(
            aio.measurements(spec, self.plan.stack, outcome), aio.unproven(spec, self.plan.stack, outcome)
        )

    def _build(self, row: Row, directory: Path, session: Session) -> None:
        size = self.plan.described.weight_bytes
        worker = session.hold(
            Worker(
                child_command(Path(sys.executable), _CHILD),
                f"the process with the weights in {row.medium}",
                self._environment(session.environment),
            )
        )
        self.workers[row.place] = worker
        order = {
            "do": "build",
            "config": dict(self.plan.described.config),
            "seed": self.request.seed,
            "device": "cuda" if self.plan.gpu else "cpu",
            "ds_config": self.plan.document(row.place, directory),
            "ops": self._ops(row.place),
        }
        with session.progress.step(f"{row.place}: the model is made", 20 + size / _GUESS) as tick:
            worker.tick = tick
            row.facts = worker.ask(order, _PATIENCE + size / _SLOWEST)
            if row.place == "nvme":
                self._require_swap_files(directory, int(row.facts["swapped_bytes"]))
            worker.ask(self._order(min(_WARM_UP, self.request.new_tokens)), self._patience())

    def _ops(self, place: Place) -> list[str]:
        if place != "nvme":
            return []
        return [str(self.installed.find(part)) for part in self.installed.parts(preflight.op(self.plan))]

    def _environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        whole = {
            **environment,
            # DeepSpeed looks for ninja on PATH even when nothing is to be compiled.
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', os.defpath)}",
            "HF_HUB_OFFLINE": "1",
            "DS_ACCELERATOR": "cuda" if self.plan.gpu else "cpu",
        }
        if not self.plan.gpu:
            # Some virtual machines advertise AMX and trap on it: a matrix product ends the process with SIGILL.
            whole.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
        return whole

    def _require_swap_files(self, directory: Path, expected: int) -> None:
        """DeepSpeed's handle reports no error of a write: what is not there was not written."""
        files = [path.stat() for path in directory.rglob("*.swp")]
        stored = sum(min(file.st_size, file.st_blocks * 512) for file in files)
        if stored < expected:
            raise CannotJudge(
                f"`{self.plan.directory}`: the swap files hold {format_size(stored)} of {format_size(expected)}, and "
                "DeepSpeed reports no error",
                "the disk is full, or a limit on file sizes is too low: see `df`, `ulimit -f` and `dmesg | tail`",
            )

    def _order(self, tokens: int) -> dict[str, Any]:
        request = self.request
        return {
            "do": "generate",
            "seed": request.seed,
            "vocabulary": self.plan.described.vocabulary,
            "batch": request.batch,
            "prompt": request.prompt,
            "new": tokens,
        }

    def _patience(self) -> float:
        request = self.request
        products = self.plan.described.model.numel * request.batch * (request.prompt + request.new_tokens)
        reading = request.new_tokens * self.plan.described.weight_bytes / _SLOWEST
        return _PATIENCE + reading + products / (_SLOWEST_GPU if self.plan.gpu else _SLOWEST_CPU)

    def _sample(self, row: Row, number: int, directory: Path, session: Session) -> None:
        row.readings[number] = again(
            f"{row.place}-{number}",
            lambda label: self._generate(row, label, directory, session),
            judgement,
            row.repeated,
            session.progress.say,
        )

    def _generate(self, row: Row, label: str, directory: Path, session: Session) -> Generation:
        read = int(row.facts["read_bytes"])
        worker = self.workers[row.place]
        counting = Counting(self.plan.stack, f"`{label}`", direct=directory if read else None)
        with session.progress.step(label, self.request.new_tokens * read / _GUESS) as tick, counting:
            worker.tick = counting.ticking(tick)
            answer = worker.ask(self._order(self.request.new_tokens), self._patience())
        claimed = read * len(answer["passes"])
        return Generation(
            answer["seconds"],
            answer["passes"],
            answer["tokens"],
            claimed,
            counting.count("read", claimed, slack=_SLACK),
            counting.moment,
            answer["peak_bytes"],
            answer["close"],
        )

    def _serve(self, mode: Mode, directory: Path, session: Session) -> None:
        """Keep the launch lines of SGLang, and run them where it is installed."""
        for name, text in sglang.files(self.request, self.plan, mode, self.plan.directory).items():
            session.raw[name] = text
        why = sglang.absent(self.request, self.plan, mode, self.installed)
        served = Served(mode, absent=why)
        self.served.append(served)
        if why is not None:
            return
        with session.progress.step(f"SGLang ({mode})", 300) as tick:
            folder = session.temporary()
            for name, text in sglang.files(self.request, self.plan, mode, directory).items():
                (folder / name).write_text(text)
            try:
                environment = self._environment(session.environment)
                served.result = sglang.run(folder, mode, environment, 2 * self._patience(), tick)
            except Failed as error:
                served.failed = error.line
                session.raw[f"sglang-{mode}.txt"] = error.raw

    def findings(self) -> Findings:
        """See ``session.Work``."""
        request, planned = self.request, self.plan
        conditions: dict[str, Scalar] = {
            "model": request.model,
            "weight_bytes": planned.described.weight_bytes,
            "batch": request.batch,
            "prompt": request.prompt,
            "new_tokens": request.new_tokens,
            "rounds": request.rounds,
            "seed": request.seed,
            "device": "cuda" if planned.gpu else "cpu",
            **planned.settings.block(),
        }
        work = planned.work(request)
        measured = figures.Measured(self.rows, self.served, self.rung, work)
        return Findings(
            figures.case(measured, conditions, self.doubts), target=str(planned.directory), stack=planned.stack
        )
