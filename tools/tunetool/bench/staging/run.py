"""``tunetool bench staging``: checks the nodes, makes missing model and data, runs both paths, keeps the record."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from tunetool import record as records
from tunetool.bench.staging import figures, preflight, samples
from tunetool.bench.staging.advice import Advice, Times, advise
from tunetool.bench.staging.ask_nodes import Nodes
from tunetool.bench.staging.node_task import nearest
from tunetool.bench.staging.published import Pair
from tunetool.bench.staging.request import KIND, Request
from tunetool.bench.staging.rounds import Rounds
from tunetool.bench.staging.samples import Row
from tunetool.errors import CannotJudge
from tunetool.measure import session
from tunetool.measure.progress import MovingProgress
from tunetool.measure.session import Findings, Result, Session
from tunetool.node.machine.block_stack import read_stack
from tunetool.node.machine.memory import memory_left
from tunetool.origin import install_hint
from tunetool.record import Scalar
from tunetool.training.cluster import find_machines, need_gpus, prepare_nodes
from tunetool.training.model import reference_model
from tunetool.training.preflight import need_memory
from tunetool.training.preparation import stacks_of

_CACHE_SHARE = 0.8
"""Share of the free RAM that the page cache is assumed to keep from one epoch to the next."""


def bench(request: Request, progress: MovingProgress, environment: Mapping[str, str] | None = None) -> Result:
    """Run it. Raises ``UsageProblem`` before any work when the call is wrong, ``CannotJudge`` when it cannot start."""
    return session.run(KIND, request.run, _Staging(request, progress), progress, environment)


def _need_memory(request: Request, site: preflight.Site, local: bool) -> None:
    """Raises ``CannotJudge`` if memory is too small for ranks on CPUs beside the staged files."""
    left = memory_left()
    on_cpu = request.cluster.device == "cpu" or not site.first.gpus
    if not local or not on_cpu or left is None:
        return
    ranks = max(each.ranks_per_node for each in site.planned)
    parameters = reference_model.describe(request.material.model).parameters
    need_memory(parameters, request.settings.full, ranks, (left[0] - site.first.needed, f"{left[1]}, beside path A,"))


@dataclass
class _Staging:
    request: Request
    progress: MovingProgress
    rows: list[Row] = field(default_factory=list)
    rounds: Rounds | None = None
    nodes: Nodes = field(init=False)
    site: preflight.Site = field(init=False)

    def announce(self, session: Session) -> None:
        """See ``session.Work``."""
        request = self.request
        need_gpus(request.cluster, session.environment)
        if request.cluster.inventory is None and importlib.util.find_spec("torch") is None:
            raise CannotJudge("torch is not installed beside tunetool", f"install it: {install_hint('finetune')}")
        machines = find_machines(request.cluster, self.progress)
        self.nodes = Nodes(machines, session.temporary(), self.progress)
        answers = self.nodes.ask(preflight.first_task(request), "looking at every node")
        self.site = preflight.survey(request, machines, answers)
        for line in self.site.announcement():
            self.progress.say(line)
        _need_memory(request, self.site, self.nodes.local)

    def measure(self, session: Session) -> None:
        """See ``session.Work``."""
        request, nodes = self.request, self.nodes
        look = not request.run.allow_busy
        prepare_nodes(request.material, nodes.machines, nodes.directory / "prepare", self.progress, look)
        directory = self._hold(session)
        # Ask again, now that everything exists, for its true sizes.
        answers = nodes.ask(preflight.first_task(request), "model and data as they are")
        self.site = replace(self.site, answers=answers)
        first = self.site.first
        sizes = (first.model_bytes, first.data_bytes)
        self.rows = [Row(each.name, each.nodes, each.ranks, *sizes) for each in self.site.planned]
        self.rows += [Row(each.name, 0, 0, *sizes, left_out=each.reason) for each in self.site.left_out]
        material = request.material
        workload = request.settings.workload(
            first.model, first.dataset, request.cluster.device, material.seed, material.entry
        )
        self.rounds = Rounds(
            nodes=nodes,
            workload=workload,
            images=first.images,
            model_bytes=first.model_bytes,
            memory=request.memory,
            directory=directory,
            seed=request.material.seed,
            progress=self.progress,
            rows=self.rows,
            planned=self.site.planned,
            raw=session.raw,
            left_behind=session.left_behind,
        )
        self.rounds.run(request.pace, request.pace.deadline(session.began))

    def _hold(self, session: Session) -> Path:
        """A context: the run's own directory in memory, removed afterwards in any case."""
        memory = self.request.memory
        if not self.nodes.local:
            # Not a run directory: other programs on that node would consider it left by a dead run, since its owner is
            # here.
            return memory / f"tunetool-staging-{records.new_id()[:12]}"
        session.lock(stacks_of(self.site.first.ready))
        return session.directory(memory) / "staged"

    def advice(self, row: Row) -> Advice:
        """The advice, to stage or not, for one scenario."""
        first = self.site.first
        load, once = row.pair("model_load"), row.pair("first_epoch")
        if load is None or once is None:
            return advise(first.room, None)
        taken = row.samples["memory"].values()
        staged = [sample.staged for sample in taken if sample.staged]
        later = row.pair("later_epoch")
        cached = first.ram == 0 or first.model_bytes + first.data_bytes <= _CACHE_SHARE * first.ram
        example = next(iter(taken))
        return advise(
            first.room,
            Times(
                stage=median(each.seconds for each in staged),
                load=load,
                first=once,
                later=later or (Pair(once.staged, once.staged) if cached else once),
                later_from="measured" if later else "page cache" if cached else "as the first",
                epochs=max(1, round(example.steps / example.steps_per_epoch)),
                bulk_rate=median(each.rate for each in staged),
                rounds=len(taken),
                apart=row.apart(),
            ),
        )

    def findings(self) -> Findings:
        """See ``session.Work``."""
        request, first, settings = self.request, self.site.first, self.request.settings
        conditions: dict[str, Scalar] = {
            "model": request.material.model,
            "zero_stage": settings.zero_stage,
            "trainer": settings.trainer,
            "loader": settings.loader,
            "tuning": "all parameters" if settings.full else f"LoRA, rank {settings.lora_rank}",
            "launcher": self.nodes.machines.launcher.name,
            "rounds": request.pace.rounds,
            "seed": request.material.seed,
        }
        media: dict[samples.Path, str] = {"memory": first.memory, "bulk": first.bulk}
        checks = [check for row in self.rows for check in figures.checks(row, first.bulk_in_memory)]
        checks += figures.advice_checks({row.name: self.advice(row) for row in self.rows if row.complete})
        measurements = [each for row in self.rows for each in figures.measurements(row, media, conditions)]
        return Findings(
            figures.case(self.rows, checks, measurements),
            target=f"`{request.memory}` against `{first.model}` and `{first.dataset}`",
            stack=read_stack(nearest(Path(first.model))) if self.nodes.local else None,
            series=self.rounds.series if self.rounds else [],
            remarks=self.rounds.curves if self.rounds else [],
        )
