"""``tunetool accept`` on this machine: what is missing is measured, goals are judged, one record is kept."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from tunetool import __version__
from tunetool import record as records
from tunetool.accept import program
from tunetool.accept.goal import Goal
from tunetool.accept.goals_file import GoalsFile
from tunetool.accept.judge import further_rounds, judged, not_run, skipped, verdict_over
from tunetool.accept.needs import lacks
from tunetool.accept.progress_file import Kept, Measured, measured_before
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.measure.made_by import made_by, node_facts
from tunetool.measure.progress import Progress
from tunetool.measure.session import Result, Run
from tunetool.measure.statistics import LOOKS
from tunetool.node.machine.drives import read_drives
from tunetool.node.units import format_count
from tunetool.record import GoalResult, Node, Part, Record
from tunetool.user_directories import default_runs_dir, prepare_runs_dir

KIND = "acceptance"
_LOOKS = tuple(count for count, _ in LOOKS)
_TARGET = re.compile(r"--(\w+-)?target|--folder")
_EXTENT = (
    "--rounds",
    "--budget",
    "--duration",
    "--thorough",
    "--seed",
    "--json",
    "--runs-dir",
    "--allow-busy",
    "--expect",
)
"""Options that say how long is measured and where the record goes, not what."""
Line = tuple[str, ...]


@dataclass(frozen=True)
class Request:
    """The options of the call."""

    goals: GoalsFile
    seconds: float = 3600.0
    """From the start on: further rounds that would end later do not begin."""
    afresh: bool = False
    run: Run = field(default_factory=Run)
    takes_rounds: Callable[[Line], bool] = lambda line: False
    """Whether a command has ``--rounds``."""


@dataclass
class _Acceptance:
    request: Request
    progress: Progress
    runs_dir: Path
    node: Node
    began: float = field(default_factory=time.monotonic)
    took: dict[Line, float] = field(default_factory=dict)
    """Seconds of a run, for each round that it made."""
    failed: dict[Line, str] = field(default_factory=dict)

    def go(self) -> Result:
        request, goals, started = self.request, self.request.goals, records.utc_now()
        lacking = {goal: words for goal in goals.goals if (words := lacks(goal.needs))}
        for goal, words in lacking.items():
            self.progress.say(f"skipped: {goal.words()}: {words}")
        lines = [line for line in goals.runs if any(goal.run == line for goal in goals.goals if goal not in lacking)]
        serials = " ".join(sorted(each.serial for each in self.node.drives or []))
        identity = {"goals file": goals.sha256, "machine": f"{self.node.host} {self.node.speed_hash} {serials}".strip()}
        made = made_by()
        identity["tunetool"] = " ".join(filter(None, [__version__, made.commit, made.source_sha256]))
        if any(_is_relative(line) for line in lines):
            identity["directory"] = str(Path.cwd())
        measured = measured_before(self.runs_dir, goals.name, identity, request.afresh and not request.run.dry_run)
        self._announce(lines, measured)
        if request.run.dry_run:
            return Result()
        for number, line in enumerate(lines, 1):
            if line not in measured.runs and line not in self.failed:
                self.progress.say(f"{number} of {len(lines)}: tunetool {shlex.join(line)}")
                self._measure(line, measured)
        self._more_rounds(lacking, measured)
        results = [self._judge(goal, lacking, measured) for goal in goals.goals]
        path = records.write(self._record(results, lines, measured, started), self.runs_dir)
        measured.finish()
        return Result(records.read(path), path)

    def _announce(self, lines: Sequence[Line], measured: Measured) -> None:
        """How long, how many bytes, where: in each command's own words. Raises ``UsageProblem``."""
        there = [line for line in lines if line in measured.runs]
        if there:
            done = format_count(len(there), "run")
            self.progress.say(f"goes on: {done} of {len(lines)} measured before the interruption, by `{measured.path}`")
        for line in lines:
            if line in measured.runs:
                continue
            self.progress.say(f"tunetool {shlex.join(line)}:")
            try:
                for each in program.announced(line):
                    self.progress.say(f"  {each}")
            except UsageProblem as error:
                raise UsageProblem(f"`tunetool {shlex.join(line)}`: {error.message}", error.hint) from None
            except CannotJudge as error:
                self.failed[line] = error.line
                self.progress.say(f"  cannot run here: {error.line}")

    def _measure(self, line: Line, measured: Measured, rounds: int | None = None) -> None:
        more = ["--allow-busy"] if self.request.run.allow_busy else []
        began = time.monotonic()
        try:
            kept = program.measure(line, self.runs_dir, [*more, *(["--rounds", str(rounds)] if rounds else [])])
        except CannotJudge as error:
            self.failed[line] = error.line
            return
        except KeyboardInterrupt:
            self.progress.say("what is measured is kept: the same call goes on from there")
            raise
        measured.add(line, kept)
        made = max((len(each.samples or []) for each in kept.record.measurements), default=0)
        self.took[line] = (time.monotonic() - began) / max(1, made)

    def _more_rounds(self, lacking: dict[Goal, str], measured: Measured) -> None:
        """While a goal is open, time is left, and its command makes as many rounds as it is told to."""
        for _ in _LOOKS:
            wanted: dict[Line, int] = {}
            for goal in self.request.goals.goals:
                kept = measured.runs.get(goal.run) if goal not in lacking and goal.run not in self.failed else None
                if kept and self.request.takes_rounds(goal.run):
                    rounds = further_rounds(goal, [each.record for each in kept], _LOOKS)
                    wanted[goal.run] = max(rounds or 0, wanted.get(goal.run, 0))
            wanted = {line: count for line, count in wanted.items() if count}
            left = self.began + self.request.seconds - time.monotonic()
            fitting = {line: count for line, count in wanted.items() if self.took.get(line, 0.0) * count <= left}
            if not fitting:
                if wanted:
                    self.progress.say("the time is up: further rounds might decide more goals, with `--max-time`")
                return
            for line, count in fitting.items():
                self.progress.say(f"not decided: {format_count(count, 'further round')} of tunetool {shlex.join(line)}")
                self._measure(line, measured, count)

    def _judge(self, goal: Goal, lacking: dict[Goal, str], measured: Measured) -> GoalResult:
        if goal in lacking:
            return skipped(goal, lacking[goal])
        kept = measured.runs.get(goal.run)
        if not kept:
            return not_run(goal, self.failed.get(goal.run, "it was not measured"))
        return judged(goal, [each.record for each in kept])

    def _record(
        self, results: Sequence[GoalResult], lines: Sequence[Line], measured: Measured, started: datetime
    ) -> Record:
        kept = [(line, each) for line in lines for each in measured.runs.get(line, [])]
        return Record(
            kind=KIND,
            id=records.new_id(),
            started=min([started, *(each.record.started for _, each in kept)]),
            finished=records.utc_now(),
            node=self.node,
            tool=made_by(),
            command=list(self.request.run.command),
            parts=[_part(line, each) for line, each in kept],
            goals=list(results),
            verdict=verdict_over(results, [(shlex.join(line), each.record.verdict) for line, each in kept]),
        )


def _is_relative(line: Line) -> bool:
    """Whether a target of the line is another one in another directory."""
    return any(_TARGET.fullmatch(name) and not value.startswith("/") for name, value in options_of(line).items())


def options_of(words: Sequence[str]) -> dict[str, str]:
    """Values by the long options of a command line; empty for a flag."""
    found = {}
    for number, word in enumerate(words):
        if word.startswith("--") and len(word) > 2:
            name, sign, value = word.partition("=")
            after = next(iter(words[number + 1 :]), "")
            found[name] = value if sign else "" if after.startswith("--") else after
    return found


def _part(line: Line, kept: Kept) -> Part:
    verdict = kept.record.verdict
    status, reasons = (verdict.status, verdict.reasons) if verdict is not None else ("error", [])
    return Part(name=shlex.join(line), record_id=kept.record.id, run=kept.run, status=status, reasons=reasons)


def accept(request: Request, progress: Progress) -> Result:
    """Measure and judge. Raises ``UsageProblem`` before anything is measured, ``CannotJudge`` where it cannot start."""
    runs_dir = request.run.runs_dir or default_runs_dir()
    if not request.run.dry_run:
        prepare_runs_dir(runs_dir)
    return _Acceptance(request, progress, runs_dir, node_facts(read_drives(), None)).go()


def judge_records(goals: Sequence[Goal], measured: Sequence[Record], command: Sequence[str]) -> Record:
    """The acceptance of what was measured before: each goal by the records that have its figure."""
    results = []
    for goal in goals:
        named = [each for each in measured if goal.pick.of(each.measurements) and _is_of(goal, each)]
        hosts = {each.node.host for each in named}
        others = [said for each in named if (said := _asked_otherwise(goal, each))]
        if others:
            results.append(not_run(goal, others[0]))
        elif len(hosts) > 1:
            results.append(not_run(goal, f"its records are of {len(hosts)} machines: judge each by itself"))
        else:
            results.append(judged(goal, named) if named else not_run(goal, "no record has its figure"))
    first = measured[0]
    return first.model_copy(
        update={
            **dict.fromkeys(("target", "ladder", "hosts", "sha256")),
            **{name: [] for name in ("expectations", "measurements", "series", "checks")},
            "kind": KIND,
            "id": records.new_id(),
            "started": min(each.started for each in measured),
            "finished": max(each.finished for each in measured),
            "command": list(command),
            "tolerance": 0.0,
            "parts": None,
            "goals": results,
            "verdict": verdict_over(results, [(each.kind, each.verdict) for each in measured]),
        }
    )


def _asked_otherwise(goal: Goal, record: Record) -> str:
    """What was measured in place of what the goal says, in words; empty where it is that."""
    ours, theirs = (
        {name: value for name, value in options_of(words).items() if name not in _EXTENT}
        for words in (goal.run, record.command)
    )
    if record.target is not None and ours.get("--target") in (record.target, theirs.get("--target", record.target)):
        # It may be said in another way, or be the manifest's.
        theirs["--target"] = ours["--target"] = record.target
    if not record.command:
        ours, theirs = ({"--target": each.get("--target", "")} for each in (ours, theirs))
        theirs["--target"] = record.target or ours["--target"]
    name = next((each for each in {**ours, **theirs} if ours.get(each) != theirs.get(each)), None)
    if name is None:
        return ""
    said, wanted = (f"`{name} {each[name]}`" if name in each else f"no `{name}`" for each in (theirs, ours))
    return f"its record {record.id} was measured with {said}, and the goal has {wanted}"


def _is_of(goal: Goal, record: Record) -> bool:
    """Whether a record is of the goal's command, by its kind."""
    kind = f"bench.{goal.run[1]}" if goal.run[0] == "bench" else goal.run[0]
    return record.kind == kind
