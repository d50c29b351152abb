"""What will run on these nodes, and the lines that describe it before it starts. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tunetool.bench.staging.node_task import Answer, Task
from tunetool.bench.staging.published import SCENARIOS, TITLES
from tunetool.bench.staging.request import Request
from tunetool.bench.staging.scenarios import LeftOut, Planned, only_largest, scale
from tunetool.errors import UsageProblem
from tunetool.node.units import format_size
from tunetool.training.cluster import Machines, ranks_per_host


@dataclass(frozen=True)
class Site:
    """The nodes' answers, and the scenarios that will run on them."""

    request: Request
    answers: Sequence[Answer]
    planned: Sequence[Planned]
    left_out: Sequence[LeftOut]

    @property
    def first(self) -> Answer:
        """The node that every scenario uses."""
        return self.answers[0]

    def announcement(self) -> Iterator[str]:
        """What the run will copy and read, and where, a line each."""
        request, first = self.request, self.first
        yield (
            f"path A: model {format_size(first.model_bytes)} and data {format_size(first.data_bytes)} staged from "
            f"`{first.model}` and `{first.dataset}` ({first.bulk}) to `{request.memory}` ({first.memory}; "
            f"{first.room.describe_limits()}); path B: read in place"
        )
        if first.missing:
            yield f"made first: {' and '.join(f'`{each}`' for each in first.missing)}"
        names = ", ".join(f"{TITLES[each.name]} ({each.ranks} rank(s))" for each in self.planned)
        rounds = request.pace.fewest
        runs = 2 * rounds * len(self.planned)
        yield f"{rounds} round(s) of {names}: {runs} fine-tunes; what is staged is evicted after each"
        yield from request.pace.announcement()
        for each in self.left_out:
            yield f"left out: {TITLES[each.name]}: {each.reason}"


def first_task(request: Request) -> Task:
    """The first task of every node, before anything is done."""
    return Task("look", request.material, str(request.memory))


def survey(request: Request, machines: Machines, answers: Sequence[Answer]) -> Site:
    """The scenarios that these nodes can run. Raises ``UsageProblem``, ``CannotJudge`` where GPUs are missing."""
    ranks = ranks_per_host(request.cluster, machines.hosts, [answer.ready for answer in answers])
    on_gpu = request.cluster.device != "cpu" and all(answer.gpus for answer in answers)
    planned, left_out = scale(request.scenarios or SCENARIOS, len(answers), ranks, on_gpu)
    if not request.scenarios and not request.thorough:
        planned, others = only_largest(planned)
        left_out = [*others, *left_out]
    if not planned:
        raise UsageProblem(
            f"no scenario can run here: {'; '.join(f'{each.name}: {each.reason}' for each in left_out)}",
            "`--scenarios single` runs on any machine",
        )
    return Site(request, answers, planned, left_out)
