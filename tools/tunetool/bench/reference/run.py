"""``tunetool bench reference``: the chain, and one record over it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from tunetool import record as records
from tunetool.bench.reference.chain import Chain, Step
from tunetool.bench.reference.parts import steps
from tunetool.bench.reference.request import KIND, PARTS, Request, Result
from tunetool.errors import ExitCode
from tunetool.measure.facts import node_facts
from tunetool.measure.progress import MovingProgress
from tunetool.record import Part, Record
from tunetool.verdict import exit_code


def reference(request: Request, progress: MovingProgress) -> Result:
    """Run it. Raises ``UsageProblem`` before any work when the call is wrong."""
    return follow(request, steps(request, progress), progress)


def follow(request: Request, wanted: Sequence[Step], progress: MovingProgress) -> Result:
    """The same with the parts that are given."""
    started = records.utc_now()
    runs_dir = request.runs_dir or records.default_runs_dir()
    if not request.dry_run:
        records.prepare_runs_dir(runs_dir)
    chain = Chain()
    try:
        chain.run(wanted, request.anyway, progress.say)
    except KeyboardInterrupt:
        # Each part has put away what is its own, and those before it have their records.
        done = [f"{part.name} ({part.run})" for part in chain.parts if part.run]
        progress.say(f"interrupted; done: {', '.join(done) or 'nothing'}")
        raise
    if request.dry_run:
        return Result(None, None, ExitCode.OK)
    record = record_of(request, chain, started)
    path = records.write(record, runs_dir)
    assert record.verdict is not None  # noqa: S101  (made above)
    return Result(record, path, exit_code([record.verdict.status]))


def record_of(request: Request, chain: Chain, started: datetime) -> Record:
    """One record over all parts."""
    left_out = [
        Part(name=name, status="skip", reasons=["left out by `--skip`"]) for name in PARTS if name in request.skip
    ]
    parts = sorted([*chain.parts, *left_out], key=lambda part: PARTS.index(part.name))
    return Record(
        kind=KIND,
        id=records.new_id(),
        started=started,
        finished=records.utc_now(),
        node=node_facts([], None),
        command=list(request.command),
        target=str(request.target),
        measurements=chain.headlines,
        parts=parts,
        verdict=chain.verdict(),
    )
