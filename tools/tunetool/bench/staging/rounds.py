"""The rounds: in each one, every scenario on both paths, in a random order, from a cold cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from tunetool.bench.staging import samples
from tunetool.bench.staging.ask_nodes import Nodes
from tunetool.bench.staging.node_task import DATASET, MODEL, Task
from tunetool.bench.staging.published import TITLES
from tunetool.bench.staging.samples import PATHS, Row, Sample, Staged
from tunetool.bench.staging.scenarios import Planned
from tunetool.errors import TunetoolError
from tunetool.launch.local import RankFailed
from tunetool.measure.pace import Pace, rounds_of
from tunetool.measure.progress import MovingProgress
from tunetool.measure.rounds import drawn_order
from tunetool.measure.session import reason
from tunetool.record import CheckResult, Series
from tunetool.training.rank.curve_files import gather
from tunetool.training.run_workload import run_workload
from tunetool.training.workload import Material, Workload


@dataclass
class Rounds:
    """``workload`` names model and data set on bulk storage; ``directory`` is the run's own directory in memory."""

    nodes: Nodes
    workload: Workload
    images: int
    model_bytes: int
    memory: Path
    directory: Path
    seed: int
    progress: MovingProgress
    rows: list[Row]
    planned: Sequence[Planned]
    raw: dict[str, str | bytes] = field(default_factory=dict)
    series: list[Series] = field(default_factory=list)
    curves: list[CheckResult] = field(default_factory=list)
    left_behind: list[str] = field(default_factory=list)

    def run(self, pace: Pace, deadline: float | None = None) -> None:
        """Run all rounds. A scenario that fails keeps its samples and ends; the others continue."""
        by_name = {row.name: row for row in self.rows}
        for number in rounds_of(pace, deadline, self._undecided, self.progress.say):
            for plan in self.planned:
                row = by_name[plan.name]
                if row.failed is not None:
                    continue
                for path in drawn_order(PATHS, self.seed, number, plan.name):
                    try:
                        row.samples[path][number] = self._sample(plan, path, number)
                    except TunetoolError as error:
                        row.failed = error.line
                        if isinstance(error, RankFailed) and error.raw:
                            self.raw[f"{plan.name}-{path}-{number}.txt"] = error.raw
                        break
                    except OSError as error:
                        row.failed = reason(error)
                        break

    def _undecided(self) -> list[str]:
        return [row.name for row in self.rows if row.complete and row.failed is None and not row.decided]

    def _sample(self, plan: Planned, path: samples.Path, number: int) -> Sample:
        title = f"{TITLES[plan.name]}, round {number}"
        if path == "bulk":
            return self._train(
                plan, path, number, replace(self.workload, cold=True), None, f"{title}: from bulk storage"
            )
        with self._staged(plan, title, number) as staged:
            model, dataset = (str(self.directory / name) for name in (MODEL, DATASET))
            workload = replace(self.workload, model=model, dataset=dataset, cold=False)
            return self._train(plan, path, number, workload, staged, f"{title}: from memory")

    @contextmanager
    def _staged(self, plan: Planned, title: str, number: int) -> Iterator[Staged]:
        """A context manager: model and data are in the memory of every node, and are removed afterwards."""
        material = Material(self.workload.model, Path(self.workload.dataset))
        task = Task("stage", material, str(self.memory), str(self.directory))
        try:
            answers = self.nodes.ask(task, f"{title}: staging", plan.nodes)
            for node, answer in enumerate(answers):
                for name, text in zip((MODEL, DATASET), answer.records, strict=True):
                    self.raw[f"stage/{plan.name}-{number}-node-{node}-{name}.json"] = text
            yield Staged(max(answer.seconds for answer in answers), max(answer.staged for answer in answers))
        finally:
            self._evict(task, plan, title)

    def _evict(self, task: Task, plan: Planned, title: str) -> None:
        # A second Ctrl-C must not leave a model in the memory of every node; it counts once that is gone.
        interrupted: KeyboardInterrupt | None = None
        for _ in range(3):
            try:
                self.nodes.ask(replace(task, do="evict"), f"{title}: eviction", plan.nodes)
                break
            except KeyboardInterrupt as error:
                interrupted = error
            except (TunetoolError, OSError) as error:
                # An earlier error matters more than one of the clean-up.
                self.left_behind.append(f"`{self.directory}` may still be in memory: {error}; remove it on every node")
                break
        if interrupted is not None:
            raise interrupted

    def _train(
        self, plan: Planned, path: samples.Path, number: int, workload: Workload, staged: Staged | None, title: str
    ) -> Sample:
        name = f"{plan.name}-{path}-{number}"
        job = self.nodes.job(plan.nodes, plan.ranks_per_node, name, self.model_bytes)
        results = run_workload(workload, self.nodes.machines.launcher, job, self.progress, title)
        gathered = gather(job.directory, prefix=f"{name}/")
        self.raw |= gathered.raw
        self.series += gathered.series
        self.curves += gathered.checks
        return Sample(results, self.images, workload.batch_size, staged, mapped=workload.loader == "transformers")
