"""``tunetool bench staging``: look, make what is missing, run both paths in turns, keep the record."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from statistics import median

from tunetool import record as records
from tunetool.bench.staging import figures, preflight, samples
from tunetool.bench.staging.advice import Advice, Times, advise
from tunetool.bench.staging.ask_nodes import Nodes
from tunetool.bench.staging.node_task import nearest
from tunetool.bench.staging.published import Pair
from tunetool.bench.staging.request import KIND, Request, Result
from tunetool.bench.staging.rounds import Rounds
from tunetool.bench.staging.samples import Row
from tunetool.errors import CannotJudge, ExitCode
from tunetool.measure import busy, rundir
from tunetool.measure.facts import node_facts
from tunetool.measure.progress import MovingProgress
from tunetool.measure.rundir import temporary
from tunetool.node.machine.block_stack import read_stack
from tunetool.node.machine.drives import read_drives
from tunetool.node.machine.memory_left import memory_left
from tunetool.record import Record, Scalar
from tunetool.training.cluster import find_place, need_gpus
from tunetool.training.model import reference_model
from tunetool.training.preflight import need_memory
from tunetool.training.preparation import locked, prepare_here, prepare_on_hosts
from tunetool.verdict import exit_code

_CACHE_SHARE = 0.8
"""Of the RAM that is left: what the page cache is trusted to keep from one epoch to the next."""


def bench(request: Request, progress: MovingProgress, environment: Mapping[str, str] | None = None) -> Result:
    """Run it. Raises ``UsageProblem`` before any work when the call is wrong, ``CannotJudge`` when it cannot start."""
    environment = os.environ if environment is None else environment
    started = records.utc_now()
    need_gpus(request.cluster, environment)
    if request.cluster.inventory is None and importlib.util.find_spec("torch") is None:
        raise CannotJudge("torch is not installed beside tunetool", "install it: `pip install 'tunetool[finetune]'`")
    place = find_place(request.cluster, progress)
    with temporary() as directory:
        nodes = Nodes(place, directory, progress)
        site = preflight.survey(request, place, nodes.ask(preflight.first_task(request), "looking at every node"))
        for line in site.announcement():
            progress.say(line)
        _need_memory(request, site, place.hosts == ())
        if request.dry_run:
            return Result(None, None, ExitCode.OK)
        runs_dir = request.runs_dir or records.default_runs_dir()
        records.prepare_runs_dir(runs_dir)
        run = _Run(request, site, nodes, environment, progress)
        errors: list[str] = []
        try:
            run.run()
        except CannotJudge as error:
            errors.append(f"{error.message}; {error.hint}" if error.hint else error.message)
        except OSError as error:
            errors.append(f"`{error.filename or 'system call'}`: {error.strerror or error}; see `dmesg | tail`")
    left_behind = [*run.left_behind, *(run.rounds.left_behind if run.rounds else [])]
    record = run.record(started, [*errors, *left_behind])
    path = records.write(record, runs_dir, run.raw)
    assert record.verdict is not None  # noqa: S101  (made above)
    return Result(record, path, exit_code([record.verdict.status]))


def _need_memory(request: Request, site: preflight.Site, here: bool) -> None:
    """Raises ``CannotJudge`` where ranks on CPUs would be killed, beside what is staged for them."""
    left = memory_left()
    on_cpu = request.cluster.device == "cpu" or not site.first.gpus
    if not here or not on_cpu or left is None:
        return
    ranks = max(each.ranks_per_node for each in site.planned)
    parameters = reference_model.describe(request.material.model).parameters
    need_memory(parameters, request.settings.full, ranks, (left[0] - site.first.needed, f"{left[1]}, beside path A,"))


@dataclass
class _Run:
    request: Request
    site: preflight.Site
    nodes: Nodes
    environment: Mapping[str, str]
    progress: MovingProgress
    rows: list[Row] = field(default_factory=list)
    rounds: Rounds | None = None
    left_behind: list[str] = field(default_factory=list)

    @property
    def raw(self) -> dict[str, str | bytes]:
        """Files beside the record."""
        return self.rounds.raw if self.rounds else {}

    def run(self) -> None:
        """Everything that needs the nodes for itself. Raises ``CannotJudge``."""
        request = self.request
        self._prepare()
        with ExitStack() as held:
            place = self._hold(held)
            # Again, now that everything is there: its true sizes.
            answers = self.nodes.ask(preflight.first_task(request), "model and data as they are")
            self.site = replace(self.site, answers=answers)
            first = self.site.first
            sizes = (first.model_bytes, first.data_bytes)
            self.rows = [Row(each.name, each.nodes, each.ranks, *sizes) for each in self.site.planned]
            self.rows += [Row(each.name, 0, 0, *sizes, left_out=each.reason) for each in self.site.left_out]
            workload = request.settings.workload(
                first.model, first.dataset, request.cluster.device, request.material.seed
            )
            self.rounds = Rounds(
                nodes=self.nodes,
                workload=workload,
                images=first.images,
                model_bytes=first.model_bytes,
                memory=request.memory,
                place=place,
                seed=request.material.seed,
                progress=self.progress,
                rows=self.rows,
                planned=self.site.planned,
            )
            self.rounds.run(request.rounds)

    def _prepare(self) -> None:
        """Model and data on every node, and nobody else at work there."""
        request, look = self.request, not self.request.allow_busy
        if self.nodes.local:
            ready = [prepare_here(request.material, self.site.first.host, self.progress, look)]
        else:
            job = self.nodes.job(None, 1, "prepare")
            ready = prepare_on_hosts(request.material, self.nodes.place.launcher, job, self.progress, look)
        busy.refuse([f"{each.host}: {line}" for each in ready for line in each.busy])

    def _hold(self, held: ExitStack) -> Path:
        """The run's own directory in memory, gone afterwards whatever happens."""
        run_id, memory = records.new_id(), self.request.memory
        if not self.nodes.local:
            # Not a run directory: other programs on that node would take one whose owner is here for a dead run's.
            return memory / f"tunetool-staging-{run_id[:12]}"
        held.enter_context(locked([self.site.first.ready], self.environment))
        rundir.remove_stale(rundir.stale_directories(memory))
        own = held.enter_context(rundir.run_directory(memory, run_id, self.left_behind.append))
        held.enter_context(rundir.janitor(own))
        return own / "staged"

    def advice(self, row: Row) -> Advice:
        """Stage or not, for one scenario."""
        first = self.site.first
        load, once = row.pair("model_load"), row.pair("first_epoch")
        if load is None or once is None:
            return advise(first.room, None)
        taken = row.samples["memory"].values()
        staged = [sample.staged for sample in taken if sample.staged]
        later = row.pair("later_epoch")
        cached = first.ram == 0 or first.model_bytes + first.data_bytes <= _CACHE_SHARE * first.ram
        one = next(iter(taken))
        return advise(
            first.room,
            Times(
                stage=median(each.seconds for each in staged),
                load=load,
                first=once,
                later=later or (Pair(once.staged, once.staged) if cached else once),
                later_from="measured" if later else "page cache" if cached else "as the first",
                epochs=max(1, round(one.steps / one.steps_per_epoch)),
                bulk_rate=median(each.rate for each in staged),
                rounds=len(taken),
                apart=row.apart(),
            ),
        )

    def record(self, started: datetime, errors: Sequence[str]) -> Record:
        """The record, for a run that failed as well."""
        request, first, settings = self.request, self.site.first, self.request.settings
        conditions: dict[str, Scalar] = {
            "model": request.material.model,
            "zero_stage": settings.zero_stage,
            "trainer": settings.trainer,
            "loader": settings.loader,
            "tuning": "all parameters" if settings.full else f"LoRA, rank {settings.lora_rank}",
            "launcher": self.nodes.place.launcher.name,
            "rounds": request.rounds,
            "seed": request.material.seed,
        }
        media: dict[samples.Path, str] = {"memory": first.memory, "bulk": first.bulk}
        checks = [check for row in self.rows for check in figures.checks(row, first.bulk_in_memory)]
        checks += figures.told({row.name: self.advice(row) for row in self.rows if row.complete})
        return Record(
            kind=KIND,
            id=records.new_id(),
            started=started,
            finished=records.utc_now(),
            node=node_facts(read_drives(), read_stack(nearest(Path(first.model))) if self.nodes.local else None),
            command=list(request.command),
            target=f"`{request.memory}` against `{first.model}` and `{first.dataset}`",
            measurements=[each for row in self.rows for each in figures.measurements(row, media, conditions)],
            series=self.rounds.series if self.rounds else [],
            checks=[*checks, *(self.rounds.curves if self.rounds else [])],
            verdict=figures.verdict(self.rows, checks, errors),
        )
