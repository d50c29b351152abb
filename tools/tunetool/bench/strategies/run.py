"""``tunetool bench strategies``: the network of each layout, then every cell: predicted, run and compared."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tunetool.bench.strategies import figures, hooks, network
from tunetool.bench.strategies.job import job as job_of
from tunetool.bench.strategies.matrix import ALONE, Fitted, Layout, fit, layouts
from tunetool.bench.strategies.predict import Job, Prediction, predict
from tunetool.bench.strategies.request import KIND, Request
from tunetool.bench.strategies.samples import Row, Study, sample
from tunetool.bench.strategies.samples import network as network_of
from tunetool.errors import CannotJudge
from tunetool.launch import job as launching
from tunetool.launch.local import RankFailed
from tunetool.measure import session
from tunetool.measure.pace import rounds_of
from tunetool.measure.progress import MovingProgress
from tunetool.measure.session import Findings, Result, Session
from tunetool.node.units import format_count, format_size
from tunetool.training.cluster import Machines, find_machines, need_gpus, prepare_nodes, ranks_here, ranks_per_host
from tunetool.training.model import reference_model
from tunetool.training.preflight import need_memory
from tunetool.training.preparation import Ready, stacks_of
from tunetool.training.run_workload import explained, run_workload
from tunetool.training.workload import Workload, as_environment, rank_directory

_START = 20.0
"""Seconds that a progress bar expects ranks to take until their first step."""
_PROBE = 30.0
"""The same for all of a probe of hooks."""


def bench(request: Request, progress: MovingProgress, environment: Mapping[str, str] | None = None) -> Result:
    """Run it. Raises ``UsageProblem`` before any work when the call is wrong, ``CannotJudge`` when it cannot start."""
    return session.run(KIND, request.run, _Strategies(request, progress), progress, environment)


def _announcement(request: Request, machines: Machines) -> str:
    where = (
        f"{format_count(machines.nodes, 'host')} by `{machines.launcher.name}`" if machines.hosts else "this machine"
    )
    tuning = "all parameters" if request.settings.full else f"LoRA of rank {request.settings.lora_rank}"
    return (
        f"trains `{request.material.model}` ({tuning}) on {where}: {request.pace.fewest} round(s) of "
        f"{request.settings.steps} steps in each cell"
    )


def _guess_ranks(request: Request, machines: Machines, environment: Mapping[str, str]) -> int:
    """The ranks of a host before any host answers: from the request, the inventory or this machine."""
    cluster = request.cluster
    slots = [host.slots for host in machines.hosts if host.slots is not None]
    local_ranks = 1 if machines.hosts else ranks_here(cluster, environment)[0]
    return cluster.ranks_per_node or min(slots, default=max(1, local_ranks))


def _say_plan(fitted: Fitted, request: Request, progress: MovingProgress) -> None:
    for note in fitted.notes:
        progress.say(note)
    for cell, reason in fitted.left_out:
        progress.say(f"{cell} is left out: {reason}")
    cells = ", ".join(map(str, fitted.cells))
    networks = ", ".join(map(str, layouts(fitted.cells)))
    progress.say(f"cells: {cells}; networks: {networks}; {request.pace.fewest} round(s)")
    for line in request.pace.announcement():
        progress.say(line)


@dataclass
class _Strategies:
    request: Request
    progress: MovingProgress
    machines: Machines = field(init=False)
    directory: Path = field(init=False)
    ready: list[Ready] = field(default_factory=list)
    study: Study = field(default_factory=lambda: Study(Fitted((), (), ()), {}))
    job: Job | None = None
    raw: dict[str, str | bytes] = field(default_factory=dict)
    _number: int = 0

    def announce(self, session: Session) -> None:
        """See ``session.Work``."""
        request, environment = self.request, session.environment
        need_gpus(request.cluster, environment)
        request.settings.workload("", "", request.cluster.device, request.material.seed)
        machines = self.machines = find_machines(request.cluster, self.progress)
        self.progress.say(_announcement(request, machines))
        guess = fit(request.matrix, machines.nodes, _guess_ranks(request, machines, environment))
        if not machines.hosts and ranks_here(request.cluster, environment)[1]:
            most = max((cell.layout.ranks for cell in guess.cells), default=1)
            need_memory(reference_model.describe(request.material.model).parameters, request.settings.full, most)
        if request.run.dry_run:
            _say_plan(guess, request, self.progress)

    def measure(self, session: Session) -> None:
        """See ``session.Work``."""
        self.raw, self.directory = session.raw, session.temporary()
        self._prepare()
        if not self.machines.hosts:
            session.lock(stacks_of(self.ready[0]))
        self._run(self.request.pace.deadline(session.began))

    def findings(self) -> Findings:
        """See ``session.Work``."""
        conditions = self._conditions() if self.study.first is not None else {}
        case = figures.case(self.study, self.job, conditions)
        return Findings(case, target=self.ready[0].model if self.ready else None)

    def _prepare(self) -> None:
        """Model and data on every node, and the cells that fit. Raises ``TunetoolError``."""
        request = self.request
        look = not request.run.allow_busy
        self.ready = prepare_nodes(request.material, self.machines, self._launch_directory(), self.progress, look)
        ranks = ranks_per_host(request.cluster, self.machines.hosts, self.ready)
        fitted = fit(request.matrix, self.machines.nodes, ranks)
        _say_plan(fitted, request, self.progress)
        if not fitted.cells:
            raise CannotJudge(
                "no cell of the matrix can be run here", "add hosts with `-i`, or a cell such as `1x1:z2`"
            )
        self.study = Study(fitted, {cell: Row(cell) for cell in fitted.cells})

    def _run(self, deadline: float | None) -> None:
        """Measure the networks, then all rounds. A cell that fails is reported and left out; the others go on."""
        try:
            for layout in layouts(self.study.fitted.cells):
                self.study.rank_figures[layout] = self._network(layout)
        except CannotJudge as error:
            self._failed(error, "network")
            self.study.errors.append(f"the network could not be measured: {error.message}")
            return
        self._probe_hooks()
        first = self.study.rank_figures[ALONE][0]
        assert first.configuration is not None  # noqa: S101  (rank 0's)
        self.job = job_of(self._workload(2), first.configuration, first.backend == "nccl")
        for number in rounds_of(self.request.pace, deadline, say=self.progress.say):
            # Every other round backwards, so that drift affects all cells equally.
            for row in list(self.study.rows.values())[:: 1 if number % 2 else -1]:
                if row.failed is None:
                    self._cell(row, number)

    def _conditions(self) -> dict[str, str | int | float | bool]:
        """The parameters that all cells share."""
        first, settings = self.study.first, self.request.settings
        assert first is not None  # noqa: S101  (asked after a cell was run)
        tuning = "all parameters" if settings.full else f"LoRA, rank {settings.lora_rank}"
        return {
            "model": self.ready[0].model,
            "tuning": tuning,
            "batch_size": settings.batch_size,
            "steps": settings.steps or 0,
            **({"images": self.request.material.images} if self.request.material.dataset is None else {}),
            "launcher": self.machines.launcher.name,
            "seed": self.request.material.seed,
            "compute": first.device,
            **({"precision": first.precision} if first.precision else {}),
            **{f"{name}_version": version for name, version in first.versions.items()},
        }

    def _network(self, layout: Layout) -> list[network.RankFigures]:
        order = network.Order(
            model=self.ready[0].model,
            device=self.request.cluster.device,
            hidden=reference_model.describe(self.request.material.model).hidden
            if self.request.material.model in reference_model.SIZES or not self.machines.hosts
            else 1024,
            seconds=self.request.network_seconds,
        )
        seconds = _START / 2 + (self.request.network_seconds if layout.world > 1 else 0)
        what = f"network of {layout}" if layout.world > 1 else "one rank alone computes"
        ranks = self._ask_ranks(layout, network.MODULE, asdict(order), network.FILE, what, seconds)
        try:
            return [network.RankFigures(**each) for each in ranks]
        except TypeError as error:
            raise CannotJudge(f"a rank of {layout} did not say what it measured: {error}") from None

    def _probe_hooks(self) -> None:
        """What stage 3 costs by itself, on every layout with a cell of it. Without it predictions say so."""
        cuda, settings = self.study.rank_figures[ALONE][0].backend == "nccl", self.request.settings
        order = hooks.Order(self.request.cluster.device, settings.full, settings.lora_rank, settings.precision)
        small = job_of(self._workload(2), hooks.configuration(), cuda)
        for layout in dict.fromkeys(cell.layout for cell in self.study.fitted.cells if cell.stage == 3):
            try:
                what = f"ZeRO-3's hooks on {layout}"
                ranks = self._ask_ranks(layout, hooks.MODULE, asdict(order), hooks.FILE, what, _PROBE)
                # The shortest: other work on the node only lengthens a step, and not that of all cases alike.
                steps = {case: min(ranks[0]["steps"][case]) for case in hooks.CASES}
            except (CannotJudge, KeyError, TypeError, ValueError) as error:
                reason = (
                    error.line if isinstance(error, CannotJudge) else f"a rank did not say what it measured: {error}"
                )
                self.study.unprobed[layout] = f"the probe failed: {reason}"
                self.progress.say(f"{what}: {self.study.unprobed[layout]}")
                continue
            line = network_of(self.study.rank_figures[layout]) if layout.world > 1 else None
            cost = self.study.hooks[layout] = hooks.hooks_of(small, layout, line, steps)
            self.progress.say(
                f"{what}: {cost.per_use * 1e3:.3g} ms for each use of a module, {cost.per_gather * 1e3:.3g} ms for "
                "each gather"
            )

    def _ask_ranks(
        self, layout: Layout, module: str, order: dict[str, Any], file: str, what: str, seconds: float
    ) -> list[dict[str, Any]]:
        """What each rank of ``layout`` left in ``file``. Raises ``CannotJudge``."""
        job = self._job(layout)
        program = ("-m", module, "--order", json.dumps(order))
        job = replace(job, program=program, environment=as_environment(self._workload(2), job.environment))
        with self.progress.step(what, seconds) as tick:
            try:
                self.machines.launcher.run(job, tick)
            except RankFailed as error:
                raise explained(error, job) from error
        try:
            files = [rank_directory(job.directory, rank) / file for rank in range(layout.world)]
            return [dict(json.loads(each.read_text())) for each in files]
        except (OSError, ValueError, TypeError) as error:
            raise CannotJudge(f"a rank of {layout} left no measurement: {error}") from None

    def _cell(self, row: Row, number: int) -> None:
        """Predict from what the other cells have shown so far, and run."""
        assert self.job is not None  # noqa: S101  (made before any cell)
        cell = row.cell
        prediction = predict(cell, self.job, self.study.layouts(), self.study.measured)
        row.predictions.append(prediction)
        self.progress.say(f"{cell}: {_prediction_text(prediction)}")
        steps = (self.request.settings.steps or 0) * (prediction.step if prediction else 1.0)
        try:
            results = run_workload(
                self._workload(cell.stage),
                self.machines.launcher,
                self._job(cell.layout),
                self.progress,
                f"{cell}, round {number}",
                _START + steps,
            )
            row.samples.append(sample(results))
        except CannotJudge as error:
            self._failed(error, cell.key)
            row.failed = error.line
            self.progress.say(f"{cell} failed: {error.message}")
            return
        self.study.first = self.study.first or results[0]
        self.progress.say(f"{cell}: a step takes {row.samples[-1].step:.3g} s")

    def _failed(self, error: CannotJudge, name: str) -> None:
        if isinstance(error, RankFailed) and error.raw:
            self.raw[f"ranks/{name}.txt"] = error.raw

    def _workload(self, stage: int) -> Workload:
        settings = replace(self.request.settings, zero_stage=stage, curves=None)
        ready = self.ready[0]
        material = self.request.material
        device = self.request.cluster.device
        return settings.workload(ready.model, ready.dataset, device, material.seed, material.entry)

    def _job(self, layout: Layout) -> launching.Job:
        job = self.machines.job(layout.ranks, self._launch_directory(), self.ready[0].model_bytes)
        return replace(job, hosts=tuple(job.hosts)[: layout.nodes])

    def _launch_directory(self) -> Path:
        """A directory for one launch."""
        self._number += 1
        return self.directory / f"launch-{self._number}"


def _prediction_text(prediction: Prediction | None) -> str:
    if prediction is None:
        return "measured first; what follows is predicted from it"
    return (
        f"predicted {prediction.step:.3g} s for a step ({prediction.compute:.3g} s of computation, "
        f"{prediction.exposed:.3g} s of waiting for {prediction.collectives} collectives that send "
        f"{format_size(round(prediction.sent))} from each rank)"
    )
