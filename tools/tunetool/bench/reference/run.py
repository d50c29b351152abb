"""``tunetool bench reference``: runs the chain and writes one record over all parts."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tunetool.bench.reference import estimate
from tunetool.bench.reference.chain import Chain, Step
from tunetool.bench.reference.choice import complete
from tunetool.bench.reference.nodes import Gate, Nodes, cannot_train
from tunetool.bench.reference.parts import steps
from tunetool.bench.reference.request import KIND, PARTS, Complete, Request
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.fleet.capacity import ask_hosts
from tunetool.fleet.playbook import HostSelection
from tunetool.measure import session
from tunetool.measure.progress import MovingProgress
from tunetool.measure.session import Findings, Result, Session
from tunetool.node.common.manifest import MANIFEST_PATH
from tunetool.node.machine.capacity import Capacity, read_capacity
from tunetool.node.play import reasons
from tunetool.record import Part
from tunetool.verdict import Case


def bench(asked: Request, progress: MovingProgress) -> Result:
    """Run the chain. Raises ``UsageProblem`` before any work if the call is wrong; ``CannotJudge`` if it cannot run."""
    return session.run(KIND, asked.run, _Reference(asked, asked.parts, progress), progress)


def follow(request: Complete, wanted: Sequence[Step], progress: MovingProgress) -> Result:
    """The same with a complete request and the given parts."""
    work = _Reference(None, [step.name for step in wanted], progress, request, wanted, Gate(request.anyway))
    return session.run(KIND, request.run, work, progress)


@dataclass
class _Reference:
    asked: Request | None
    parts: Sequence[str]
    progress: MovingProgress
    request: Complete | None = None
    wanted: Sequence[Step] = ()
    gate: Gate = field(default_factory=lambda: Gate(False))
    chain: Chain = field(default_factory=Chain)

    def announce(self, session: Session) -> None:
        """See ``session.Work``. It lists what would be written on hosts; on this machine each part announces itself."""
        if self.asked is not None:
            self._decide(self.asked)
        if self.request is not None and self.request.run.dry_run and self.request.cluster.inventory is None:
            self._run(session)
            unable = [part for part in self.chain.parts if part.status == "error"]
            if unable:
                names = ", ".join(f"`{part.name}`" for part in unable)
                raise CannotJudge(f"{names} cannot run here, as said above", "leave them out with `--skip PART`")

    def _decide(self, asked: Request) -> None:
        """Ask the nodes, choose what the call leaves open, print what will be done. Raises ``TunetoolError``."""
        capacities, silent = _look(asked, self.progress)
        groups = reasons.by_reason((host, "", why) for host, why in silent.items())
        total = len(capacities) + len(silent)
        for group in groups:
            alone = f"{group.hosts[0]} is left out: {group.reason}"
            self.progress.say(alone if len(group.hosts) == 1 else f"left out: {reasons.line(group, total)}")
        if not capacities:
            host, why = next(iter(silent.items()))
            if asked.cluster.inventory is None:
                raise UsageProblem("nothing to measure", why)
            words = f"`{host}`: {why}" if len(groups[0].hosts) == 1 else reasons.line(groups[0], total)
            advice = reasons.hint(groups[0]) or "see `tunetool verify -i` of that inventory"
            raise CannotJudge(f"no node can take part; {words}", advice)
        if silent and asked.all_or_nothing:
            host, why = next(iter(silent.items()))
            raise CannotJudge(f"`--all-or-nothing`, and `{host}` cannot take part: {why}", "leave the option out")
        bare = asked.cluster.inventory is None and asked.target is not None and not Path(MANIFEST_PATH).exists()
        request, chosen = complete(asked, capacities, asked.target if bare else None)
        self.request = request
        for line in [*chosen, *estimate.lines(request, capacities, self.parts)]:
            self.progress.say(line)
        if request.cluster.inventory is None:
            self.gate, self.wanted = Gate(request.anyway), steps(request, self.progress)
            return
        nodes = Nodes(request, dict(capacities), self.progress)
        for host, why in silent.items():
            nodes.leave_out(host, "error", "at the start", [why], lost=True)
        self.gate, self.wanted = nodes, steps(request, self.progress, lambda: nodes.current)

    def measure(self, session: Session) -> None:
        """See ``session.Work``."""
        try:
            self._run(session)
        except KeyboardInterrupt:
            # Each part has removed its files, and the parts before it have written their records.
            done = [f"{part.name} ({part.run})" for part in self.chain.parts if part.run]
            session.progress.say(f"interrupted; done: {', '.join(done) or 'nothing'}")
            raise

    def _run(self, session: Session) -> None:
        self.chain.run(self.wanted, self.gate, session.progress.say)

    def findings(self) -> Findings:
        """See ``session.Work``. One record over all parts."""
        request, chain = self.request, self.chain
        assert request is not None  # noqa: S101  (decided before anything was measured)
        left_out = [
            Part(name=name, status="skip", reasons=["left out by `--skip`"]) for name in PARTS if name in request.skip
        ]
        fleet = self.gate if isinstance(self.gate, Nodes) else None
        return Findings(
            Case(chain.headlines, parts=[*chain.verdicts(), *(fleet.verdicts() if fleet else [])], judged="parts"),
            target=str(request.target),
            drives=False,
            parts=sorted([*chain.parts, *left_out], key=lambda part: PARTS.index(part.name)),
            hosts=list(fleet.hosts.values()) if fleet else None,
        )


def _look(asked: Request, progress: MovingProgress) -> tuple[Mapping[str, Capacity], Mapping[str, str]]:
    """Capacities of the nodes, and why other nodes cannot take part. Raises ``TunetoolError``."""
    target, cluster = str(asked.target or ""), asked.cluster
    if cluster.inventory is None:
        capacities: Mapping[str, Capacity] = {socket.gethostname(): read_capacity(target, str(asked.memory))}
        silent: dict[str, str] = {}
    else:
        selection = HostSelection(cluster.inventory, cluster.limit, ansible=cluster.ansible)
        answers = ask_hosts(selection, target, str(asked.memory), progress)
        capacities, silent = answers.capacities, dict(answers.silent)
    silent |= {name: node.problem for name, node in capacities.items() if node.problem}
    silent |= cannot_train(capacities, cluster)
    return {name: node for name, node in capacities.items() if name not in silent}, silent
