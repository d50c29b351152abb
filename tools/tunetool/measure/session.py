"""One measurement from its announcement to its record: everything that is the same for every kind of record.

A benchmark is a ``Work``: it describes what it will do, does it, and returns its findings. ``run`` provides locks, the
busy check and directories, turns every error into a record with its verdict, and keeps the record.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Protocol, TypeVar

from tunetool import record as records
from tunetool.errors import ExitCode, TunetoolError, Unforeseen, UsageProblem, fault_of_ours
from tunetool.measure import busy, rundir
from tunetool.measure.made_by import made_by, node_facts
from tunetool.measure.progress import Progress
from tunetool.node.machine.block_stack import BlockStack
from tunetool.node.machine.drives import read_drives
from tunetool.record import CheckResult, FleetHost, Part, Record, Series
from tunetool.user_directories import default_runs_dir, prepare_runs_dir
from tunetool.verdict import Case, code_of, judge, judged_expectations

_T = TypeVar("_T")


@dataclass(frozen=True)
class Run:
    """The options that every measurement shares."""

    runs_dir: Path | None = None
    """Where records are kept; None: where ``user_directories.default_runs_dir`` says."""
    allow_busy: bool = False
    """Measure beside a job. Two runs of tunetool never measure one device at the same time, whatever this says."""
    dry_run: bool = False
    command: Sequence[str] = ()


@dataclass(frozen=True)
class Result:
    """The record and its path. Neither for a dry run, nor where there was nothing to keep."""

    record: Record | None = None
    path: Path | None = None

    @property
    def code(self) -> ExitCode:
        """The exit code of the process."""
        return ExitCode.OK if self.record is None else code_of(self.record.verdict)


@dataclass(frozen=True)
class Findings:
    """The findings of a benchmark for its record, complete or not."""

    case: Case = field(default_factory=Case)
    target: str | None = None
    stack: BlockStack | None = None
    """What was measured, for the facts of the node."""
    drives: bool = True
    """Whether this node's drives belong to the record."""
    series: Sequence[Series] = ()
    remarks: Sequence[CheckResult] = ()
    """Checks that are kept but do not affect the verdict."""
    parts: Sequence[Part] | None = None
    hosts: Sequence[FleetHost] | None = None


class Work(Protocol):
    """What a benchmark does itself."""

    def announce(self, session: Session) -> None:
        """Check the request, and describe what will happen. Writes nothing outside of ``session.temporary``.

        Raises ``UsageProblem`` when the call is wrong, ``CannotJudge`` when it cannot start: there is no record then.
        """

    def measure(self, session: Session) -> None:
        """The work. May raise anything but ``UsageProblem``, which is for what is found before the work."""

    def findings(self) -> Findings | None:
        """The findings so far; called after ``measure``, also after an error. None: nothing to keep."""


class Session:
    """What a work has to work with. What it holds is released when the work ends, in reverse order."""

    def __init__(self, run: Run, progress: Progress, environment: Mapping[str, str]) -> None:
        self.run, self.progress, self.environment = run, progress, environment
        self.began = time.monotonic()
        self.raw: dict[str, str | bytes] = {}
        """Files beside the record."""
        self.left_behind: list[str] = []
        """What could not be removed, for people."""
        self.subject = "system call"
        """What an error is about that names no file itself."""
        self._held = ExitStack()
        self._until_record = ExitStack()

    def hold(self, context: AbstractContextManager[_T]) -> _T:
        """Enter ``context``; it is left when the work ends."""
        return self._held.enter_context(context)

    def lock(self, stacks: Sequence[BlockStack]) -> None:
        """Lock these devices against other runs of tunetool. Raises ``CannotJudge``."""
        self.hold(busy.alone(stacks, self.environment))

    def look(self, stack: BlockStack) -> None:
        """Raises ``CannotJudge`` if a job uses the devices, unless that was allowed."""
        if self.run.allow_busy:
            return
        with self.progress.step("looking for other work", busy.LOOK_SECONDS) as tick:
            busy.refuse(busy.look(stack, tick))

    def directory(self, target: Path, stack: BlockStack | None = None) -> Path:
        """A directory of this run in ``target``, gone afterwards, after SIGKILL too.

        It is absolute: programs that are started in other directories get it.

        With ``stack``: after its device was locked and found idle.
        """
        (made,) = self.directories([target], stack)
        return made

    def directories(self, targets: Sequence[Path], stack: BlockStack | None = None) -> list[Path]:
        """As ``directory``, one in each of ``targets``; ``stack``: of all together."""
        targets = [target.resolve() for target in targets]
        self.subject = ", ".join(map(str, targets))
        if stack is not None:
            self.lock([stack])
        for target in targets:
            rundir.remove_stale(rundir.stale_directories(target))
        if stack is not None:
            self.look(stack)
        return [
            self.hold(rundir.run_directory(target, records.new_id(), self.left_behind.append)) for target in targets
        ]

    def temporary(self) -> Path:
        """A directory outside of what is measured. It is there until the record is written."""
        return self._until_record.enter_context(rundir.temporary())

    def attempt(self, act: Callable[[Session], None]) -> BaseException | None:
        """Do ``act`` and let go of all that it held; what went wrong. Raises ``UsageProblem``."""
        try:
            with self._held:
                act(self)
        except UsageProblem:
            raise
        except (Exception, KeyboardInterrupt) as error:
            return error
        return None

    def close(self) -> None:
        """The record is written, or there is none: what was held for the announcement goes too."""
        with self._until_record:
            self._held.close()


def run(
    kind: str,
    options: Run,
    work: Work,
    progress: Progress,
    environment: Mapping[str, str] | None = None,
) -> Result:
    """Announce, measure, judge, and keep the record.

    An error during the measurement is in the record, with the findings until then. Ctrl-C and unexpected exceptions
    are raised again after it is written. Raises ``UsageProblem``, and ``CannotJudge`` when it cannot start.
    """
    started = records.utc_now()
    session = Session(options, progress, os.environ if environment is None else environment)
    try:
        work.announce(session)
        if options.dry_run:
            return Result()
        runs_dir = options.runs_dir or default_runs_dir()
        prepare_runs_dir(runs_dir)
        faults = [fault] if (fault := session.attempt(work.measure)) is not None else []
        findings = _ask(work, faults)
        if findings is None and not faults:
            return Result()
        record = _record(kind, session, findings or Findings(Case(judged="work")), faults, started)
        for fault in faults:
            if isinstance(fault, TunetoolError) and fault.raw:
                session.raw.setdefault(fault.raw_name, fault.raw)
        path = _keep(record, runs_dir, session)
    finally:
        session.close()
    _surface(faults, path, progress)
    return Result(record, path)


def reason(error: BaseException, subject: str = "system call") -> str:
    """One line about what went wrong. ``subject``: what it is about, where the error does not say that."""
    if isinstance(error, TunetoolError):
        return error.line
    if isinstance(error, OSError):
        return f"`{error.filename or subject}`: {error.strerror or error}; see `dmesg | tail`"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted before it was done"
    return fault_of_ours(error)


def _ask(work: Work, faults: list[BaseException]) -> Findings | None:
    """The findings. Half of a measurement may be more than they were written for, and the record comes first."""
    try:
        return work.findings()
    except Exception as error:
        # ``_surface`` raises it again, once the record is written.
        faults.append(error)
        return None


def _record(
    kind: str, session: Session, findings: Findings, faults: Sequence[BaseException], started: datetime
) -> Record:
    reasons = [reason(fault, session.subject) for fault in faults]
    case = replace(findings.case, errors=[*reasons, *findings.case.errors, *session.left_behind])
    return Record(
        kind=kind,
        id=records.new_id(),
        started=started,
        finished=records.utc_now(),
        node=node_facts(read_drives() if findings.drives else [], findings.stack),
        # A health check and a copy of a small tree take about as long as the hash would.
        tool=made_by(whole=bool(case.measurements) and kind != "stage"),
        command=list(session.run.command),
        target=findings.target,
        expectations=judged_expectations(case),
        tolerance=case.tolerance,
        measurements=list(case.measurements),
        series=list(findings.series),
        checks=[*case.checks, *findings.remarks],
        ladder=case.ladder,
        parts=list(findings.parts) if findings.parts is not None else None,
        hosts=list(findings.hosts) if findings.hosts is not None else None,
        verdict=judge(case),
    )


def _keep(record: Record, runs_dir: Path, session: Session) -> Path:
    """Where the record was written. Figures that took an hour are not lost with the runs directory."""
    try:
        return records.write(record, runs_dir, session.raw)
    except OSError as error:
        path = _keep_elsewhere(record, session)
        if path is None:
            raise
        session.progress.say(
            f"`{runs_dir}` could not keep the record: {error.strerror}. It is in `{path.parent}`: move it there"
        )
        return path


def _keep_elsewhere(record: Record, session: Session) -> Path | None:
    with suppress(OSError):
        directory = Path(tempfile.mkdtemp(prefix="tunetool-runs-"))
        with ExitStack() as undo:
            undo.callback(shutil.rmtree, directory)
            path = records.write(record, directory, session.raw)
            undo.pop_all()
            return path
    return None


def _surface(faults: Sequence[BaseException], path: Path, progress: Progress) -> None:
    """Ctrl-C ends the command; a fault of ours is never only a line in a record."""
    for fault in faults:
        if isinstance(fault, KeyboardInterrupt):
            progress.say(f"the measurements until then are kept in `{path.parent}`")
            raise fault
    for fault in faults:
        if not isinstance(fault, TunetoolError | OSError):
            raise Unforeseen(
                reason(fault), f"report it with its record, `{path}`, and what `tunetool --debug` prints"
            ) from fault
