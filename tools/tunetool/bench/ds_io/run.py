"""``tunetool bench ds-io``: move the file, let the counters prove it, keep the record."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tunetool.bench.ds_io import preflight
from tunetool.bench.ds_io.request import DURABLE, KIND, Request
from tunetool.errors import CannotJudge
from tunetool.measure import aio, session
from tunetool.measure.aio.driver import sector_bytes
from tunetool.measure.evidence import obstacles
from tunetool.measure.figures import ceiling_figures
from tunetool.measure.progress import Progress
from tunetool.measure.session import Findings, Result, Session
from tunetool.measure.target import check_target
from tunetool.measure.worker import foreign_code
from tunetool.node.machine.block_stack import BlockStack, read_stack
from tunetool.record import Measurement
from tunetool.training_python import choose
from tunetool.verdict import Case


def bench(request: Request, progress: Progress, environment: Mapping[str, str] | None = None) -> Result:
    """Run it. Raises ``UsageProblem`` before any work when the call is wrong, ``CannotJudge`` when it cannot start."""
    chosen = choose(request.python).need()
    given = chosen.environment(os.environ if environment is None else environment)
    return session.run(KIND, request.run, _Handle(request, chosen.path), progress, given)


@dataclass
class _Handle:
    request: Request
    python: Path
    outcome: aio.Outcome = field(default_factory=aio.Outcome)
    doubts: list[str] = field(default_factory=list)
    stack: BlockStack = field(init=False)
    probe: aio.Probe = field(init=False)
    spec: aio.Spec = field(init=False)

    def announce(self, session: Session) -> None:
        """See ``session.Work``."""
        request, environment = self.request, session.environment
        check_target(request.folder)
        stack = self.stack = read_stack(str(request.folder.resolve()))
        preflight.check_request(request, sector_bytes(stack))
        installed = self.probe = aio.probe(self.python, environment)
        aio.need(installed, "gds" if request.use_gds else "async_io")
        if request.gpu and not installed.cuda:
            raise CannotJudge(
                f"torch in `{installed.python}` sees no GPU", "leave out `--gpu`, or name another `--python`"
            )
        for line in preflight.announcement(request, stack):
            session.progress.say(line)

    def measure(self, session: Session) -> None:
        """See ``session.Work``."""
        self.doubts = _doubts(self.stack, session.environment)
        self.spec = _spec(self.request, self.python, session.directory(self.request.folder, self.stack))
        try:
            aio.run(self.spec, self.stack, session.environment, session.progress, self.outcome, self.probe)
        finally:
            if self.outcome.messages:
                session.raw["deepspeed.txt"] = self.outcome.messages

    def findings(self) -> Findings:
        """See ``session.Work``."""
        stack, outcome = self.stack, self.outcome
        figures, doubts = [], list(self.doubts)
        if outcome.samples.get(self.request.direction):
            figures = [*_figures(self.request, self.spec, stack, outcome), *ceiling_figures(stack)]
            doubts = doubts or list(aio.unproven(self.spec, stack, outcome).values())
        return Findings(Case(figures, doubts=doubts, judged="work"), target=stack.directory, stack=stack)


def _spec(request: Request, python: Path, directory: Path) -> aio.Spec:
    return aio.Spec(
        directory=directory,
        io_bytes=request.io_size,
        device=request.device,
        block_bytes=request.block_size,
        queue_depth=request.queue_depth,
        intra_op_parallelism=request.io_parallel,
        single_submit=request.single_submit,
        overlap_events=not request.sequential_requests,
        python=python,
        pinned_by="cuda" if request.use_accelerator_pin_memory and request.gpu else "deepspeed",
        directions=(request.direction,),
        samples=request.loops,
        seconds=None,
        warm_ups=request.warmup_loops,
    )


def _figures(request: Request, spec: aio.Spec, stack: BlockStack, outcome: aio.Outcome) -> list[Measurement]:
    """As ds_io counts, until the handle's ``wait`` returns; for a write also until it was synced."""
    direction = request.direction
    samples = outcome.samples[direction]
    plain = [sample.claimed_bytes / sample.seconds for sample in samples]
    figures = [aio.figure("ds_io.{direction}", spec, stack, outcome, direction, plain)]
    if not request.read:
        durable = [sample.bandwidth for sample in samples]
        form = "ds_io.{direction}_durable"
        figures.append(aio.figure(form, spec, stack, outcome, direction, durable, figure=DURABLE))
    return figures


def _doubts(stack: BlockStack, environment: Mapping[str, str]) -> list[str]:
    return [*obstacles(stack), *foreign_code(environment)]
