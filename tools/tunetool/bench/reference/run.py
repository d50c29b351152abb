"""``tunetool bench reference``: the chain, and one record over it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tunetool.bench.reference.chain import Chain, Step
from tunetool.bench.reference.parts import steps
from tunetool.bench.reference.request import KIND, PARTS, Request
from tunetool.measure import session
from tunetool.measure.progress import MovingProgress
from tunetool.measure.session import Findings, Result, Session
from tunetool.record import Part
from tunetool.verdict import Case


def reference(request: Request, progress: MovingProgress) -> Result:
    """Run it. Raises ``UsageProblem`` before any work when the call is wrong."""
    return follow(request, steps(request, progress), progress)


def follow(request: Request, wanted: Sequence[Step], progress: MovingProgress) -> Result:
    """The same with the given parts."""
    return session.run(KIND, request.run, _Reference(request, wanted), progress)


@dataclass
class _Reference:
    request: Request
    wanted: Sequence[Step]
    chain: Chain = field(default_factory=Chain)

    def announce(self, session: Session) -> None:
        """See ``session.Work``. Each part announces itself."""
        if self.request.run.dry_run:
            self._run(session)

    def measure(self, session: Session) -> None:
        """See ``session.Work``."""
        try:
            self._run(session)
        except KeyboardInterrupt:
            # Each part has removed its own files, and the parts before it have their records.
            done = [f"{part.name} ({part.run})" for part in self.chain.parts if part.run]
            session.progress.say(f"interrupted; done: {', '.join(done) or 'nothing'}")
            raise

    def _run(self, session: Session) -> None:
        self.chain.run(self.wanted, self.request.anyway, session.progress.say)

    def findings(self) -> Findings:
        """See ``session.Work``. One record over all parts."""
        request, chain = self.request, self.chain
        left_out = [
            Part(name=name, status="skip", reasons=["left out by `--skip`"]) for name in PARTS if name in request.skip
        ]
        return Findings(
            Case(chain.headlines, parts=chain.verdicts(), judged="parts"),
            target=str(request.target),
            drives=False,
            parts=sorted([*chain.parts, *left_out], key=lambda part: PARTS.index(part.name)),
        )
