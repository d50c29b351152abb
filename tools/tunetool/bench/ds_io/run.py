"""DeepSpeed's I/O handle over one file, as in its own ``ds_io``, with proof of what it claims."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tunetool.errors import CannotJudge, UsageProblem
from tunetool.measure import aio, session
from tunetool.measure.aio.driver import sector_bytes
from tunetool.measure.aio.spec import Device, granule, misfit
from tunetool.measure.direction import Direction
from tunetool.measure.evidence import obstacles
from tunetool.measure.progress import Progress
from tunetool.measure.session import Findings, Result, Run, Session
from tunetool.measure.target import check_target
from tunetool.measure.worker import foreign_code
from tunetool.node.machine.block_stack import BlockStack, read_stack
from tunetool.node.units import UnitError, format_size, parse_size
from tunetool.record import Measurement
from tunetool.verdict import Case
from tunetool.verify.ceiling import ceiling_figures

KIND = "bench.ds-io"
DURABLE = "durable_bandwidth"
"""The figure of a write until it is synced."""
_SIZE = re.compile(r"^([0-9]+)([KMG]?)$")
_FACTORS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True)
class Request:
    """The options of the call, with ds_io's names."""

    folder: Path
    io_size: int
    block_size: int = 2**20
    queue_depth: int = 32
    io_parallel: int = 1
    single_submit: bool = False
    sequential_requests: bool = False
    read: bool = False
    gpu: bool = False
    use_gds: bool = False
    use_accelerator_pin_memory: bool = False
    loops: int = 3
    warmup_loops: int = 1
    python: Path = Path(sys.executable)
    run: Run = field(default_factory=Run)

    @property
    def direction(self) -> Direction:
        """The direction that is timed."""
        return "read" if self.read else "write"

    @property
    def device(self) -> Device:
        """The memory that holds the data."""
        if not self.gpu:
            return "cpu"
        return "gds" if self.use_gds else "cuda"


def parse_io_size(text: str) -> int:
    """Bytes from ``1G`` (binary, as ds_io has it), ``1GiB`` or ``1GB``. Raises ``UsageProblem``."""
    match = _SIZE.match(text.strip())
    if match:
        return int(match[1]) * _FACTORS[match[2]]
    try:
        return parse_size(text)
    except UnitError as error:
        raise UsageProblem(error.message, "write `1G` or `1GiB` (2^30 bytes), or `1GB` (10^9)") from None


def ds_io(request: Request, progress: Progress, environment: Mapping[str, str] | None = None) -> Result:
    """Run it. Raises ``UsageProblem`` before any work when the call is wrong, ``CannotJudge`` when it cannot start."""
    return session.run(KIND, request.run, _Handle(request), progress, environment)


@dataclass
class _Handle:
    request: Request
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
        check_request(request, sector_bytes(stack))
        installed = self.probe = aio.probe(request.python, environment)
        aio.need(installed, "gds" if request.use_gds else "async_io")
        if request.gpu and not installed.cuda:
            raise CannotJudge(
                f"torch in `{installed.python}` sees no GPU", "leave out `--gpu`, or name another `--python`"
            )
        for line in announcement(request, stack):
            session.progress.say(line)

    def measure(self, session: Session) -> None:
        """See ``session.Work``."""
        self.doubts = _doubts(self.stack, session.environment)
        self.spec = _spec(self.request, session.directory(self.request.folder, self.stack))
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


def check_request(request: Request, sector: int) -> None:
    """Raises ``UsageProblem`` for what ds_io answers with silence, an abort or a division by zero."""
    for name in ("io_parallel", "queue_depth", "block_size", "loops"):
        if getattr(request, name) < 1:
            raise UsageProblem(f"`--{name} {getattr(request, name)}` is too small", "it must be at least 1")
    if request.use_gds and not request.gpu:
        raise UsageProblem("`--use_gds` needs `--gpu`", "add `--gpu`: cuFile moves between storage and GPU memory")
    hint = misfit(request.io_size, request.io_parallel, sector)
    if hint:
        raise UsageProblem(f"`--io_size {request.io_size}` cannot be moved exactly", hint)
    unit = granule(1, sector)
    if request.block_size % unit:
        near = max(unit, request.block_size // unit * unit)
        raise UsageProblem(
            f"`--block_size {request.block_size}` cannot be moved exactly", f"{near} is possible: a multiple of {unit}"
        )


def announcement(request: Request, stack: BlockStack) -> list[str]:
    """Lines that describe the run before it starts."""
    passes = request.loops + request.warmup_loops
    written = request.io_size * (1 if request.read else 1 + passes)
    return [
        f"writes to `{stack.directory}` ({stack.medium}): a file of {format_size(request.io_size)}, removed afterwards",
        f"{passes} {request.direction}s of it, {format_size(written)} written in all, without a time limit",
    ]


def _spec(request: Request, directory: Path) -> aio.Spec:
    return aio.Spec(
        directory=directory,
        io_bytes=request.io_size,
        device=request.device,
        block_bytes=request.block_size,
        queue_depth=request.queue_depth,
        intra_op_parallelism=request.io_parallel,
        single_submit=request.single_submit,
        overlap_events=not request.sequential_requests,
        python=request.python,
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
