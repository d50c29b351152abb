"""``tunetool bench checkpoint``: look, start the ranks once, measure every engine on every medium, keep the record."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tunetool.bench.checkpoint import figures, preflight
from tunetool.bench.checkpoint.fio_best import FioBest
from tunetool.bench.checkpoint.rank_processes import RankProcesses
from tunetool.bench.checkpoint.request import KIND, Request
from tunetool.bench.checkpoint.samples import Matrix
from tunetool.bench.checkpoint.site import Site
from tunetool.bench.checkpoint.states import Shape
from tunetool.measure import page_cache, session
from tunetool.measure.fio import Fio, find_fio
from tunetool.measure.progress import Progress
from tunetool.measure.sequential import takes_direct_io
from tunetool.measure.session import Findings, Result, Session
from tunetool.measure.worker import foreign_code
from tunetool.node.machine.block_stack import BlockStack
from tunetool.node.machine.memory import bytes_left
from tunetool.record import Scalar


def bench(request: Request, progress: Progress, environment: Mapping[str, str] | None = None) -> Result:
    """Run it. Raises ``UsageProblem`` before any work when the call is wrong, ``CannotJudge`` when it cannot start."""
    return session.run(KIND, request.run, _Checkpoints(request), progress, environment)


@dataclass
class _Checkpoints:
    request: Request
    targets: Sequence[tuple[Path, BlockStack]] = ()
    names: Sequence[str] = ()
    matrices: list[Matrix] = field(default_factory=list)
    rank_facts: dict[str, Scalar] = field(default_factory=dict)
    shape: Shape = field(init=False)
    fio: Fio | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    def announce(self, session: Session) -> None:
        """See ``session.Work``."""
        request, self.environment = self.request, session.environment
        self.targets = preflight.targets(request)
        self.names = preflight.engines(request)
        shape = self.shape = preflight.state(request)
        stacks = [stack for _, stack in self.targets]
        for path, _ in self.targets:
            preflight.check_space(request, path, shape.bytes)
        preflight.check_memory(request, shape.bytes, self.names, stacks, bytes_left())
        self.fio = find_fio(self.environment) if request.against_fio else None
        for line in preflight.announcement(request, shape, self.names, stacks):
            session.progress.say(line)

    def measure(self, session: Session) -> None:
        """See ``session.Work``."""
        directories = [session.directory(path, stack) for path, stack in self.targets]
        ranks = session.hold(RankProcesses(self.request, self.shape.bytes, self.environment, raw=session.raw))
        with session.progress.step(f"{self.request.ranks} rank(s) start, and make the state", 0) as tick:
            ranks.tick = tick
            ranks.start()
        self.rank_facts = {
            name: ranks.rank_facts[name] for name in ("device", "gpu", "torch") if ranks.rank_facts.get(name)
        }
        for left, ((_, stack), directory) in enumerate(zip(self.targets, directories, strict=True)):
            matrix = Matrix(stack, stack.in_memory, self.shape.bytes)
            self.matrices.append(matrix)
            fio = self._fio_best(directory, stack)
            deadline = self._deadline(session.began, len(self.targets) - left)
            Site(self.request, ranks, directory, self.names, matrix, session.progress, fio, deadline).run()
        ranks.end()

    def _deadline(self, began: float, media: int) -> float | None:
        """An equal share of what is left of the time for each medium that is left."""
        end, now = self.request.pace.deadline(began), time.monotonic()
        return None if end is None else now + (end - now) / media

    def _fio_best(self, directory: Path, stack: BlockStack) -> FioBest | None:
        if self.fio is None:
            return None
        direct = takes_direct_io(directory)
        return FioBest(self.fio, directory, stack, self.shape.bytes, direct, self.environment)

    def findings(self) -> Findings:
        """See ``session.Work``."""
        request = self.request
        conditions: dict[str, Scalar] = {
            "model": request.model,
            "state": self.shape.describe(),
            "ranks": request.ranks,
            "rounds": request.pace.rounds,
            "seed": request.seed,
            "cold": page_cache.HOW,
            **self.rank_facts,
        }
        if request.training:
            loop = request.training
            conditions |= {
                "steps": loop.steps,
                "sharded_every": loop.sharded_every,
                "consolidated_every": loop.consolidated_every,
                "step_seconds": loop.step_seconds,
            }
        doubts = foreign_code(self.environment)
        return Findings(
            figures.case(self.matrices, conditions, doubts),
            target=", ".join(stack.directory for _, stack in self.targets),
            stack=self.targets[0][1],
        )
