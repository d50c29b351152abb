"""Runs one task at a time on the nodes of a benchmark: on this machine, or on each host by a launcher."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from tunetool.bench.staging.node_task import ANSWER, MODULE, Answer, Task, answer, parse
from tunetool.errors import CannotJudge
from tunetool.launch.job import Job
from tunetool.launch.local import RankFailed
from tunetool.measure.progress import MovingProgress
from tunetool.training.cluster import Machines
from tunetool.training.run_workload import explained
from tunetool.training.workload import rank_directory


@dataclass
class Nodes:
    """``directory``: for the output of launched ranks, one folder per task."""

    machines: Machines
    directory: Path
    progress: MovingProgress
    _asked: int = 0

    @property
    def local(self) -> bool:
        """Whether the only node is this machine."""
        return not self.machines.hosts

    def ask(self, task: Task, what: str, count: int | None = None) -> list[Answer]:
        """The answers of the first ``count`` nodes, by default of all. Raises ``UsageProblem``, ``CannotJudge``."""
        if self.local:
            return [answer(task, self.progress)]
        self._asked += 1
        job = replace(self.job(count, 1, f"ask-{self._asked}"), program=("-m", MODULE, task.to_json()))
        with self.progress.step(what, 0) as tick:
            try:
                self.machines.launcher.run(job, tick)
            except RankFailed as error:
                raise explained(error, job) from error
        answers = []
        for rank, host in enumerate(job.hosts):
            try:
                answers.append(
                    replace(parse((rank_directory(job.directory, rank) / ANSWER).read_text()), host=host.name)
                )
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise CannotJudge(f"`{host.name}` gave no answer: {error}") from None
        return answers

    def job(self, count: int | None, ranks_per_host: int, name: str, model_bytes: int = 0) -> Job:
        """A job on the first ``count`` nodes, without a program."""
        directory = self.directory / name
        directory.mkdir()
        job = self.machines.job(ranks_per_host, directory, model_bytes)
        return replace(job, hosts=job.hosts[:count])
