"""``tunetool bench finetune``: model and data, ranks, figures, the record."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from tunetool import record as records
from tunetool.bench.finetune import figures
from tunetool.bench.finetune.request import KIND, Request, Result
from tunetool.errors import ExitCode
from tunetool.launch.local import RankFailed
from tunetool.measure import busy
from tunetool.measure.facts import node_facts
from tunetool.measure.progress import MovingProgress
from tunetool.measure.rundir import temporary
from tunetool.node.machine.block_stack import read_stack
from tunetool.node.machine.drives import read_drives
from tunetool.record import CheckResult, Measurement, Record, Series
from tunetool.training.cluster import Place, find_place, need_gpus, ranks_here, ranks_per_host
from tunetool.training.model import reference_model
from tunetool.training.preflight import need_absent, need_memory
from tunetool.training.preparation import Ready, locked, prepare, prepare_here, prepare_on_hosts
from tunetool.training.rank.curve_files import gather
from tunetool.training.run_workload import run_workload
from tunetool.training.workload import RankResult
from tunetool.verdict import exit_code

_MAKING = 200e6
"""Bytes per second at which a progress bar expects model and images to be made."""


def bench(request: Request, progress: MovingProgress, environment: Mapping[str, str] | None = None) -> Result:
    """Run it. Raises ``UsageProblem`` before any work when the call is wrong, ``CannotJudge`` when it cannot start."""
    environment = os.environ if environment is None else environment
    started = records.utc_now()
    need_gpus(request.cluster, environment)
    # What is wrong with the settings is said before anything is made.
    request.settings.workload("", "", request.cluster.device, request.material.seed)
    place = find_place(request.cluster, progress)
    if not place.hosts:
        check_here(request, *ranks_here(request.cluster, environment))
    for line in announcement(request, place):
        progress.say(line)
    if request.dry_run:
        if not place.hosts:
            _say_what_is_missing(request, progress)
        return Result(None, None, ExitCode.OK)
    runs_dir = request.runs_dir or records.default_runs_dir()
    records.prepare_runs_dir(runs_dir)
    run = _Run(request, place, progress, environment)
    with temporary() as directory:
        try:
            run.prepare(directory)
            if request.prepare_only:
                return Result(None, None, ExitCode.OK)
            run.train(directory)
        except RankFailed as error:
            run.failed(error)
        record = run.record(started, directory)
        path = records.write(record, runs_dir, run.raw)
    assert record.verdict is not None  # noqa: S101  (made above)
    return Result(record, path, exit_code([record.verdict.status]))


def announcement(request: Request, place: Place) -> list[str]:
    """What is about to happen, for people."""
    material, settings = request.material, request.settings
    where = f"on {place.nodes} hosts by `{place.launcher.name}`" if place.hosts else "on this machine"
    data = f"`{material.dataset}`" if material.dataset else f"{material.images} synthetic images"
    length = f"{settings.steps} steps" if settings.steps else f"{settings.epochs} epoch(s)"
    tuning = "all parameters" if settings.full else f"LoRA of rank {settings.lora_rank}"
    return [f"fine-tunes `{material.model}` ({tuning}, ZeRO-{settings.zero_stage}) on {data}: {length} {where}"]


def _say_what_is_missing(request: Request, progress: MovingProgress) -> None:
    """Raises as the run would."""
    material = request.material
    target = material.target or Path()
    prepare(material.model, material.dataset, material.images, target, material.seed, progress, dry_run=True)


@dataclass
class _Run:
    request: Request
    place: Place
    progress: MovingProgress
    environment: Mapping[str, str]
    ready: list[Ready] = field(default_factory=list)
    results: list[RankResult] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    raw: dict[str, str | bytes] = field(default_factory=dict)
    measured: figures.Run | None = None

    def prepare(self, directory: Path) -> None:
        """Model and data on every node. Raises ``TunetoolError``."""
        material, look = self.request.material, not self.request.allow_busy and not self.request.prepare_only
        if self.place.hosts:
            size = reference_model.describe(material.model).bytes if material.model in reference_model.SIZES else 0
            job = self.place.job(1, directory / "prepare", size)
            seconds = size / _MAKING
            self.ready = prepare_on_hosts(material, self.place.launcher, job, self.progress, look, seconds)
        else:
            self.ready = [prepare_here(material, socket.gethostname(), self.progress, look)]
        for each in self.ready:
            busy.refuse([f"{each.host}: {line}" if self.place.hosts else line for line in each.busy])
        for path in (self.ready[0].model, self.ready[0].dataset):
            self.progress.say(f"ready: `{path}`")

    def train(self, directory: Path) -> None:
        """All ranks to their end. Raises ``TunetoolError``."""
        request = self.request
        ranks = ranks_per_host(request.cluster, self.place.hosts, self.ready)
        first = self.ready[0]
        workload = request.settings.workload(first.model, first.dataset, request.cluster.device, request.material.seed)
        job = self.place.job(ranks, directory / "run", first.model_bytes)
        what = f"{ranks * self.place.nodes} rank(s) train"
        with ExitStack() as held:
            if not self.place.hosts:
                held.enter_context(locked(self.ready, self.environment))
            self.results = run_workload(workload, self.place.launcher, job, self.progress, what)
        self.measured = figures.Run(workload, self.ready, self.results, self.place.launcher.name)

    def failed(self, error: RankFailed) -> None:
        """Keep what the ranks said beside the record."""
        self.errors.append(f"{error.message}; {error.hint}" if error.hint else error.message)
        if error.raw:
            self.raw["ranks.txt"] = error.raw

    def record(self, started: datetime, directory: Path) -> Record:
        """The record, for a run that failed as well."""
        measurements: list[Measurement] = []
        checks: list[CheckResult] = []
        unproven: list[str] = []
        gathered = gather(directory / "run")
        series: list[Series] = gathered.series
        self.raw |= gathered.raw
        for file in sorted((directory / "run").glob("rank-*/stack.txt")):
            if said := file.read_text(errors="replace"):
                self.raw[f"stacks/{file.parent.name}.txt"] = said
        if self.measured is not None:
            measurements, checks = figures.measurements(self.measured), figures.checks(self.measured)
            unproven = figures.doubts(self.measured)
        stack = None
        if self.ready and not self.place.hosts:
            stack = read_stack(str(Path(self.ready[0].model).resolve()))
        return Record(
            kind=KIND,
            id=records.new_id(),
            started=started,
            finished=records.utc_now(),
            node=node_facts(read_drives(), stack),
            command=list(self.request.command),
            target=self.ready[0].model if self.ready else None,
            measurements=measurements,
            series=series,
            checks=[*checks, *gathered.checks, *self._notes()],
            verdict=figures.verdict(checks, self.errors, unproven),
        )

    def _notes(self) -> list[CheckResult]:
        told = dict.fromkeys(note for result in self.results for note in result.notes)
        return [
            CheckResult(id="finetune.note", status="skip", expected="the run as it was asked for", found=note)
            for note in told
        ]


def check_here(request: Request, ranks: int, on_cpu: bool) -> None:
    """What would go wrong later in a run on this machine. Raises ``TunetoolError``."""
    checkpoint = request.settings.checkpoint
    if checkpoint is not None:
        need_absent(checkpoint)
    if on_cpu and not request.prepare_only:
        need_memory(reference_model.describe(request.material.model).parameters, request.settings.full, ranks)
