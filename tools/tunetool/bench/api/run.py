"""``tunetool bench api``: make each documented call, time the transfers, keep the record."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunetool.bench.api import figures, preflight
from tunetool.bench.api.catalogue import ROWS, Row
from tunetool.bench.api.preflight import OP, Plan
from tunetool.bench.api.request import KIND, Request
from tunetool.bench.api.samples import Answer, Gathered, Transfer, raw_text
from tunetool.errors import CannotJudge
from tunetool.measure import aio, session
from tunetool.measure.aio import Probe
from tunetool.measure.aio.spec import script
from tunetool.measure.progress import Progress
from tunetool.measure.sequential import takes_direct_io
from tunetool.measure.session import Findings, Result, Session
from tunetool.measure.worker import Missing, Worker, child_command, foreign_code

_CHILD = Path(__file__).with_name("child.py")
_START, _ROW = 120.0, 60.0
"""Seconds that torch may take to be imported, and a row to be made."""
_ROW_GUESS = 0.5
_MODULES = {"call": "calls.py", "cast": "calls.py", "misuse": "misuses.py"}
_OPS = (OP, "gds", "utils")


def bench(request: Request, progress: Progress) -> Result:
    """Run it. Raises ``UsageProblem`` before any work when the call is wrong, ``CannotJudge`` when it cannot start."""
    return session.run(KIND, request.run, _Api(request), progress, request.training_python.environment(os.environ))


@dataclass
class _Api:
    request: Request
    gathered: Gathered = field(default_factory=Gathered)
    doubts: list[str] = field(default_factory=list)
    plan: Plan = field(init=False)

    def announce(self, session: Session) -> None:
        """See ``session.Work``."""
        self.plan = preflight.plan(self.request, session.environment)
        if self.plan.installed is None and self.request.dry_run:
            raise CannotJudge(f"nothing can be called: {self.plan.missing}", self.plan.remedy)
        for line in preflight.announcement(self.request, self.plan):
            session.progress.say(line)

    def measure(self, session: Session) -> None:
        """See ``session.Work``."""
        installed = self.plan.installed
        if installed is None:
            return
        self.doubts += foreign_code(session.environment)
        directory = session.directory(self.request.target, self.plan.stack)
        if not takes_direct_io(directory):
            raise CannotJudge(
                f"`{self.request.target}` takes no direct I/O", "choose a directory on another file system"
            )
        self._make_rows(installed, directory, session)
        for way in self.plan.ways:
            transfer = Transfer(way, self.plan.spec(self.request, way, directory))
            self.gathered.transfers[way.name] = transfer
            stack = self.plan.stack
            aio.run(transfer.spec, stack, session.environment, session.progress, transfer.outcome, installed)
            transfer.spec.file.unlink()

    def _make_rows(self, installed: Probe, directory: Path, session: Session) -> None:
        command = child_command(self.request.training_python.path, _CHILD)
        order = _common_order(installed, self.plan.sector)
        try:
            with (
                Worker(command, "the process that makes the calls", session.environment) as child,
                session.progress.step(f"{self.request.target}: calls", len(ROWS) * _ROW_GUESS) as tick,
            ):
                child.tick = tick
                child.ask({"do": "prepare"}, _START)
                for row in ROWS:
                    self.gathered.answers[row.id] = self._make(row, order, child, directory)
        finally:
            if text := raw_text(self.gathered.said):
                session.raw["calls.txt"] = text

    def _make(self, row: Row, order: Mapping[str, Any], child: Worker, directory: Path) -> Answer:
        files = directory / row.name
        files.mkdir()
        name = f"{row.group}.{row.name}"
        module = str(_CHILD.with_name(_MODULES[row.group]))
        own = {"name": name, "module": module, "directory": str(files), "seconds": _ROW}
        answer = child.ask({**order, **own}, 2 * _ROW)
        shutil.rmtree(files)
        self.gathered.said[row.id] = answer["said"]
        return Answer(row, answer["status"], answer["found"])

    def findings(self) -> Findings:
        """See ``session.Work``."""
        planned = self.plan
        return Findings(
            figures.case(planned, self.gathered, self.doubts),
            target=planned.stack.directory,
            stack=planned.stack,
            remarks=figures.checks(planned, self.gathered.answers, misuses=True),
        )


def _common_order(installed: Probe, sector: int) -> dict[str, Any]:
    """Of every row: the files of the ops that are built, and why others are not there."""
    ops: dict[str, list[str]] = {}
    missing: dict[str, str] = {}
    for op in _OPS:
        try:
            aio.need(installed, op)
        except Missing as error:
            missing[op] = f"{error.message}: {error.hint}"
        else:
            ops[op] = [str(installed.find(part)) for part in installed.parts(op)]
    if not installed.cuda:
        missing["cuda"] = f"torch in `{installed.python}` sees no GPU"
    return {
        "do": "row",
        "aio": str(script("child.py")),
        "byte_view": str(script("byte_view.py")),
        "sector": sector,
        "ops": ops,
        "missing": missing,
    }
