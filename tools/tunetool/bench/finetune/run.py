"""``tunetool bench finetune``: model and data, ranks, figures, the record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tunetool.bench.finetune import figures
from tunetool.bench.finetune.request import KIND, Request
from tunetool.measure import session
from tunetool.measure.progress import MovingProgress
from tunetool.measure.session import Findings, Result, Session
from tunetool.node.machine.block_stack import read_stack
from tunetool.node.units import format_count
from tunetool.record import CheckResult
from tunetool.training.cluster import Machines, find_machines, need_gpus, prepare_nodes, ranks_here, ranks_per_host
from tunetool.training.model import reference_model
from tunetool.training.preflight import need_absent, need_memory
from tunetool.training.preparation import Ready, prepare, stacks_of
from tunetool.training.rank.curve_files import Gathered, gather
from tunetool.training.run_workload import run_workload
from tunetool.training.trainers.llamafactory_files import LOG, LOGS
from tunetool.training.workload import RankResult
from tunetool.verdict import Case


def bench(request: Request, progress: MovingProgress, environment: Mapping[str, str] | None = None) -> Result:
    """Run it. Raises ``UsageProblem`` before any work when the call is wrong, ``CannotJudge`` when it cannot start."""
    return session.run(KIND, request.run, _FineTune(request, progress), progress, environment)


def announcement(request: Request, machines: Machines) -> list[str]:
    """What the run will do, a line each."""
    material, settings = request.material, request.settings
    hosts = format_count(machines.nodes, "host")
    where = f"on {hosts} by `{machines.launcher.name}`" if machines.hosts else "on this machine"
    data = f"`{material.dataset}`" if material.dataset else f"{material.images} synthetic images"
    length = f"{settings.steps} steps" if settings.steps else f"{settings.epochs} epoch(s)"
    tuning = "all parameters" if settings.full else f"LoRA of rank {settings.lora_rank}"
    return [f"fine-tunes `{material.model}` ({tuning}, ZeRO-{settings.zero_stage}) on {data}: {length} {where}"]


def _say_what_is_missing(request: Request, progress: MovingProgress) -> None:
    """Check the request. Raises the same errors as the run."""
    prepare(request.material, progress, dry_run=True)


@dataclass
class _FineTune:
    request: Request
    progress: MovingProgress
    machines: Machines = field(init=False)
    ready: list[Ready] = field(default_factory=list)
    results: list[RankResult] = field(default_factory=list)
    measured: figures.Run | None = None
    directory: Path | None = None
    """Directory of the ranks' results."""
    raw: dict[str, str | bytes] = field(default_factory=dict)

    def announce(self, session: Session) -> None:
        """See ``session.Work``."""
        request, environment = self.request, session.environment
        need_gpus(request.cluster, environment)
        # Check the settings before anything is made.
        request.settings.workload("", "", request.cluster.device, request.material.seed)
        machines = self.machines = find_machines(request.cluster, self.progress)
        if not machines.hosts:
            check_here(request, *ranks_here(request.cluster, environment))
        for line in announcement(request, machines):
            self.progress.say(line)
        if request.run.dry_run and not machines.hosts:
            _say_what_is_missing(request, self.progress)

    def measure(self, session: Session) -> None:
        """See ``session.Work``."""
        request, self.raw = self.request, session.raw
        directory = session.temporary()
        look = not request.run.allow_busy and not request.prepare_only
        self.ready = prepare_nodes(request.material, self.machines, directory / "prepare", self.progress, look)
        first = self.ready[0]
        for path in (first.model, first.dataset):
            self.progress.say(f"ready: `{path}`")
        if request.prepare_only:
            return
        ranks = ranks_per_host(request.cluster, self.machines.hosts, self.ready)
        material = request.material
        workload = request.settings.workload(
            first.model, first.dataset, request.cluster.device, material.seed, material.entry
        )
        self.directory = directory / "run"
        job = self.machines.job(ranks, self.directory, first.model_bytes)
        if not self.machines.hosts:
            session.lock(stacks_of(first))
        what = f"{ranks * self.machines.nodes} rank(s) train"
        self.results = run_workload(workload, self.machines.launcher, job, self.progress, what)
        self.measured = figures.Run(workload, self.ready, self.results, self.machines.launcher.name)

    def findings(self) -> Findings | None:
        """See ``session.Work``."""
        if self.request.prepare_only:
            return None
        gathered = Gathered()
        if self.directory is not None:
            gathered = gather(self.directory)
            self.raw |= gathered.raw
            for file in sorted(self.directory.glob("rank-*/stack.txt")):
                if text := file.read_text(errors="replace"):
                    self.raw[f"stacks/{file.parent.name}.txt"] = text
            for file in sorted(self.directory.glob(f"rank-*/{LOG}")):
                self.raw[f"{LOGS}/{file.parent.name}.log"] = file.read_text(errors="replace")
        local = bool(self.ready) and not self.machines.hosts
        return Findings(
            figures.case(self.measured) if self.measured is not None else Case(judged="checks"),
            target=self.ready[0].model if self.ready else None,
            stack=read_stack(str(Path(self.ready[0].model).resolve())) if local else None,
            series=gathered.series,
            remarks=[*gathered.checks, *self._notes()],
        )

    def _notes(self) -> list[CheckResult]:
        notes = dict.fromkeys(note for result in self.results for note in result.notes)
        return [
            CheckResult(id="finetune.note", status="skip", expected="the run as it was asked for", found=note)
            for note in notes
        ]


def check_here(request: Request, ranks: int, on_cpu: bool) -> None:
    """Check what a run on this machine needs. Raises ``TunetoolError``."""
    checkpoint = request.settings.checkpoint
    if checkpoint is not None:
        need_absent(checkpoint)
    if on_cpu and not request.prepare_only:
        need_memory(reference_model.describe(request.material.model).parameters, request.settings.full, ranks)
