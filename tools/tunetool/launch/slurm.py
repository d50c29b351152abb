"""Ranks on the nodes of a Slurm cluster: the batch script, submitted, watched, and cancelled with the run.

``Submitted`` is the job, whose state ``scontrol`` or ``sacct`` tells, in plain words; ``slurm_node`` is what runs on
each node.
"""

from __future__ import annotations

import contextlib
import math
import re
import secrets
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tunetool.ctrl_c import CtrlC
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.launch.job import Job
from tunetool.launch.local import RankFailed, tail
from tunetool.launch.slurm_node import verdict_name
from tunetool.launch.spec import SPEC, NodeSpec, Verdict, read_verdict, write
from tunetool.launch.this_machine import judge
from tunetool.measure.progress import Progress
from tunetool.measure.worker import start_talking
from tunetool.node.common.commands import captured
from tunetool.node.common.waiting import wait_for
from tunetool.node.play.host_summary import one_line

SCRIPT, LOG = "job.sbatch", "slurm.log"
_NEEDED = ("sbatch", "scontrol", "scancel")
_TICK = 0.1
_SPARE_SECONDS = 120.0
"""Seconds after the guards' own limit at which this process ends a run that takes too long."""
_SHARED_SECONDS = 15.0
"""Seconds until a node's last write is visible through NFS."""


def need_slurm() -> None:
    """Raise ``UsageProblem`` where Slurm's commands are missing."""
    for program in _NEEDED:
        if shutil.which(program) is None:
            raise UsageProblem(
                f"`{program}` is not on PATH",
                "run this where jobs are submitted, a login node, or use another `--launcher`",
            )


class SlurmLauncher:
    """Runs a batch job: a guard on each node starts torchrun."""

    name = "slurm"

    def __init__(self, options: SlurmOptions, progress: Progress) -> None:
        """Raises ``UsageProblem`` if Slurm's commands are missing."""
        need_slurm()
        self._options = options
        self._progress = progress

    def run(self, job: Job, tick: Callable[[], None]) -> None:
        """See ``tunetool.launch.job.Launcher``. The job's hosts are Slurm's nodes; without hosts it runs on any one
        free node. The time that the job waits for its nodes is not limited."""
        # As sbatch itself: every node sees the current directory.
        work = (self._options.work_dir or Path.cwd()) / f".tunetool-{secrets.token_hex(8)}"
        script = render(job, self._options, work)
        count = max(1, len(job.hosts))
        _make_work_dir(work)
        try:
            write(_spec(job, work), work, SPEC)
            (work / SCRIPT).write_text(script)
            with Submitted(script) as submitted:
                ended = self._watch(submitted, job, tick)
            self._judge(submitted.job_id, ended, work, count)
        finally:
            for name in (SPEC, *(verdict_name(index) for index in range(count))):
                (work / name).unlink(missing_ok=True)
            _copy_results(work, job.directory, self._progress)

    def _watch(self, submitted: Submitted, job: Job, tick: Callable[[], None]) -> JobState:
        """Wait until the job has ended. Raises ``RankFailed`` if it would never start, or takes too long."""
        last_words, running_since = "", None
        while True:
            state = submitted.state()
            words = state.words(submitted.job_id)
            if words != last_words and not state.ended:
                last_words = words
                self._progress.say(words)
            if state.ended:
                return state
            if (why := state.hopeless) is not None:
                hint = f"`squeue -j {submitted.job_id} --start` shows what Slurm expects"
                raise RankFailed(f"job {submitted.job_id} would never start: {why.format(id=submitted.job_id)}", hint)
            if state.state == "RUNNING":
                running_since = time.monotonic() if running_since is None else running_since
                if time.monotonic() - running_since > job.timeout + _SPARE_SECONDS:
                    raise RankFailed(f"job {submitted.job_id} did not end within {job.timeout:.0f} s")
            _pause(_interval(submitted.age), tick)

    def _judge(self, job_id: str, ended: JobState, work: Path, count: int) -> None:
        verdicts = _verdicts(work, count, patient=ended.state == "COMPLETED")
        failed = [verdict.failure for verdict in verdicts if verdict.failure is not None]
        message, hint = ended.verdict(job_id)
        raw = tail(work / LOG)
        if ended.state == "NODE_FAIL":
            lost = _down_nodes(ended.nodes)
            named = ", ".join(f"`{name}`" + (f" ({reason})" if reason else "") for name, reason in lost)
            message += f": {named}" if lost else f", one of {ended.nodes}"
            raise RankFailed(message, hint, raw=raw, host=lost[0][0] if lost else None)
        if ended.state == "OUT_OF_MEMORY" and failed:
            first = failed[0]
            raise RankFailed(f"{message}: {first.message}", hint, first.rank, first.raw, first.host)
        if ended.state in ("COMPLETED", "FAILED"):
            judge(verdicts, self._progress)
            if len(verdicts) == count and ended.state == "COMPLETED":
                return
            message, hint = _error_without_verdicts(job_id, ended, work, raw)
        raise RankFailed(message, hint, raw=raw)


def _interval(age: float) -> float:
    """Seconds between two queries: a controller has many users, and a long job can wait."""
    return 0.5 if age < 60 else 2.0 if age < 600 else 10.0


def _pause(seconds: float, tick: Callable[[], None]) -> None:
    wait_for(lambda: False, seconds, _TICK, tick)


def _spec(job: Job, work: Path) -> NodeSpec:
    """The specification of every node; each fills in its own part (``tunetool.launch.slurm_node``)."""
    return NodeSpec(
        run=secrets.token_hex(16),
        directory="",
        out=str(work),
        hosts=[],
        node=0,
        ranks_per_host=job.ranks_per_host,
        program=list(job.program),
        # Empty: each node asks its own manifest.
        python=job.python or "",
        environment=dict(job.environment),
        timeout=job.timeout,
        stall=job.stall,
    )


def _make_work_dir(work: Path) -> None:
    try:
        work.mkdir(mode=0o700)
    except OSError as error:
        raise UsageProblem(
            f"`{work}` cannot be made: {error.strerror}", "`--slurm work-dir=DIR` is a directory that all nodes share"
        ) from None


def _verdicts(work: Path, count: int, patient: bool) -> list[Verdict]:
    verdicts: dict[int, Verdict] = {}

    def are_all_there() -> bool:
        for index in range(count):
            with contextlib.suppress(OSError, ValueError):
                verdicts[index] = read_verdict((work / verdict_name(index)).read_text())
        return len(verdicts) == count

    wait_for(are_all_there, _SHARED_SECONDS if patient else 0, _TICK)
    return [verdicts[index] for index in sorted(verdicts)]


def _error_without_verdicts(job_id: str, ended: JobState, work: Path, log: str) -> tuple[str, str | None]:
    """Message and hint for a job whose guards left no verdict."""
    if not (work / LOG).exists():
        return (
            f"job {job_id} left no `{work / LOG}`: its nodes do not see that directory",
            "name one that all nodes and this machine share: `--slurm work-dir=DIR`",
        )
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    # srun's line about a task that ended may come before or after the task's own output.
    from_tasks = [line for line in lines if "Exited with exit code" not in line]
    telling = next(
        filter(
            None,
            ([line_of_task for line_of_task in from_tasks if word in line_of_task] for word in ("tunetool:", "rror")),
        ),
        from_tasks,
    )
    last = telling[-1].partition("tunetool: ")[2] or telling[-1] if telling else "its log is empty"
    message, _ = ended.verdict(job_id)
    hints = {
        SPEC: "name a directory that all nodes share: `--slurm work-dir=DIR`",
        "No such file or directory": "tunetool must be installed on the nodes: see the role `tunetool`",
    }
    return f"{message}: {last[-300:]}", next((text for word, text in hints.items() if word in last), f"see `{LOG}`")


def _down_nodes(nodes: str) -> list[tuple[str, str]]:
    return down_nodes(call(["scontrol", "show", "node", "-o", nodes]).stdout) if nodes else []


def _copy_results(work: Path, directory: Path, progress: Progress) -> None:
    """Copy the output of ranks and Slurm to the job's directory."""
    try:
        shutil.copytree(work, directory, symlinks=True, dirs_exist_ok=True)
    except OSError as error:
        progress.say(
            f"`{work}` keeps what the ranks wrote: it cannot be copied to `{directory}`: {one_line(str(error))}"
        )
        return
    shutil.rmtree(work, ignore_errors=True)


TEMPLATES = Path(__file__).resolve().parents[1] / "templates/launch"
HOSTS_PYTHON = "/opt/tunetool/bin/python"
_NAME = re.compile(r"[a-z][a-z0-9-]*")
_PLAIN_PATH = re.compile(r"/[A-Za-z0-9._/+=@:,-]*")
_RESERVED = {
    *(
        "output",
        "error",
        "open-mode",
        "input",
        "chdir",
        "job-name",
        "no-requeue",
        "requeue",
        "wait",
        "array",
        "parsable",
    ),
    *("nodes", "ntasks", "ntasks-per-node", "nodelist", "wrap", "test-only"),
}
_HINT = "such as `--slurm partition=gpu --slurm gpus-per-node=8`"
_LIMIT_SPARE_SECONDS = 300
"""Seconds beyond the ranks' own time limit, for start-up and clean-up."""
_ASKED_SECONDS = 86400
"""Seconds: a longer limit of the job counts as none, because few partitions would grant it."""


@dataclass(frozen=True)
class SlurmOptions:
    """``time``: None for the job's own limit, or the partition's if that is longer than a day. ``work_dir``: on a file
    system that all nodes and this machine share; None for the current directory. ``image``: for pyxis and enroot.
    ``lines``: further options for sbatch."""

    time: str | None = None
    work_dir: Path | None = None
    image: str | None = None
    exclusive: bool = True
    lines: Sequence[str] = ()


def parse_options(texts: Sequence[str]) -> SlurmOptions:
    """Options from each ``KEY=VALUE`` or ``KEY``. All but ``work-dir``, ``image`` and ``exclusive=no`` go to sbatch.

    Raises ``UsageProblem``.
    """
    ours: dict[str, str] = {}
    lines = []
    for text in texts:
        key, equals, value = text.removeprefix("--").partition("=")
        if not _NAME.fullmatch(key) or "\n" in value or (equals and not value):
            raise UsageProblem(f"`--slurm {text}` is not KEY=VALUE", _HINT)
        if key in _RESERVED:
            raise UsageProblem(f"`--slurm {text}` is set by tunetool itself", _HINT)
        if key in ("time", "work-dir", "image", "exclusive"):
            ours[key] = value
        else:
            lines.append(f"--{key}={value}" if equals else f"--{key}")
    if ours.get("exclusive", "yes") not in ("yes", "no", ""):
        raise UsageProblem(
            f"`--slurm exclusive={ours['exclusive']}` is neither yes nor no", "whole nodes are the default"
        )
    work = ours.get("work-dir")
    if work is not None and not work.startswith("/"):
        raise UsageProblem(f"`--slurm work-dir={work}` is not absolute", "on the nodes there is no current directory")
    return SlurmOptions(
        ours.get("time"),
        Path(work) if work is not None else None,
        ours.get("image"),
        ours.get("exclusive") != "no",
        tuple(lines),
    )


def render(job: Job, options: SlurmOptions, work: Path) -> str:
    """The batch script for ``job``, whose files are in ``work``. Raises ``UsageProblem``."""
    if not _PLAIN_PATH.fullmatch(str(work)):
        raise UsageProblem(
            f"`{work}` has characters with a special meaning in a batch script",
            "name another with `--slurm work-dir=/DIR`: letters, digits and . _ / + = @ : , -",
        )
    environment = Environment(  # noqa: S701  (a shell's text)
        loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, keep_trailing_newline=True, trim_blocks=True
    )
    environment.filters["quote"] = shlex.quote
    # Whole nodes with all of their memory; otherwise another job's load would be measured too.
    lines = ["--exclusive", "--mem=0"] if options.exclusive else []
    if any(line.startswith(("--mem=", "--mem-per")) for line in options.lines):
        lines = lines[:1]
    if options.time is not None:
        lines.append(f"--time={options.time}")
    elif job.timeout <= _ASKED_SECONDS:
        lines.append(f"--time={math.ceil((job.timeout + _LIMIT_SPARE_SECONDS) / 60)}")
    if job.hosts:
        lines.append("--nodelist=" + ",".join(host.name for host in job.hosts))
    return environment.get_template("slurm.sbatch.j2").render(
        name="tunetool",
        nodes=max(1, len(job.hosts)),
        work=str(work),
        options=[*lines, *options.lines],
        python=job.python or HOSTS_PYTHON,
        image=options.image,
    )


_ASK_SECONDS = 0.2
_CALL_SECONDS = 60.0
"""Slurm's own patience with its controller (MessageTimeout) is 10 s by default, several times over."""
_END_SECONDS = 90.0
"""A cancelled job has KillWait, 30 s by default, to end."""
_LOST_SECONDS = 300.0


@dataclass
class Submitted:
    """A submitted job, as a context manager that cancels it if it is not over."""

    script: str
    job_id: str = ""

    def __enter__(self) -> Submitted:
        self._began = self._last_answer = time.monotonic()
        # In its own session: a Ctrl-C between the job's start and its number must not lose the number.
        process = start_talking(["sbatch", "--parsable"], subprocess.PIPE, subprocess.PIPE)
        try:
            out, errors = process.communicate(self.script, timeout=_CALL_SECONDS)
        except BaseException as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.job_id = _job_id(process.communicate(timeout=_CALL_SECONDS)[0])
            process.kill()
            self._cancel()
            if isinstance(error, subprocess.TimeoutExpired):
                raise CannotJudge(
                    f"`sbatch` did not answer within {_CALL_SECONDS:.0f} s", "check that slurmctld runs: `sinfo`"
                ) from None
            raise
        self.job_id = _job_id(out)
        if process.returncode != 0 or not self.job_id:
            raise refused(errors)
        return self

    def __exit__(self, *_: object) -> None:
        self._cancel()

    @property
    def age(self) -> float:
        """Seconds since the job was submitted."""
        return time.monotonic() - self._began

    def state(self) -> JobState:
        """Raises ``CannotJudge`` when Slurm does not answer for minutes, or has forgotten the job."""
        done = call(["scontrol", "show", "job", "-o", self.job_id])
        state = parse_scontrol(done.stdout)
        if state is None and "Invalid job id" in done.stderr:
            # Forgotten by slurmctld some minutes after its end (MinJobAge); accounting need not be installed.
            accounting = call(["sacct", "-n", "-P", "-X", "-j", self.job_id, "-o", SACCT_FORMAT]).stdout
            state = parse_sacct(accounting) or JobState("UNKNOWN_END")
            if not state.ended:
                raise CannotJudge(
                    f"Slurm has forgotten job {self.job_id}", "ask for MinJobAge=300 or accounting in slurm.conf"
                )
        if state is None:
            if time.monotonic() - self._last_answer > _LOST_SECONDS:
                why = one_line(done.stderr) or "no answer"
                raise CannotJudge(
                    f"`scontrol` says nothing about job {self.job_id}: {why}", "check that slurmctld runs: `sinfo`"
                )
            return JobState(UNREACHABLE)
        self._last_answer = time.monotonic()
        return state

    def _cancel(self) -> None:
        """Cancel the job and wait until its nodes are free, since only then its ranks have ended.

        Ctrl-C counts once that is done.
        """
        ctrl_c, cancelled = CtrlC(), False

        def is_over() -> bool:
            nonlocal cancelled
            try:
                ended = self.state().ended
                lost = False
            except CannotJudge:
                ended, lost = False, True  # forgotten, or out of reach: try once more, then give up
            if not (ended or cancelled):
                cancelled = call(["scancel", self.job_id]).returncode == 0
            return ended or lost

        if self.job_id:
            ctrl_c.wait_for(is_over, _END_SECONDS, _ASK_SECONDS)
        ctrl_c.deliver()


def refused(errors: str) -> UsageProblem | CannotJudge:
    """The error for ``sbatch``'s output when it refused the job."""
    errors = re.sub(r'^Try ".*$', "", errors, flags=re.MULTILINE)
    lines = [
        line.removeprefix("sbatch: ").removeprefix("error: ").strip() for line in errors.splitlines() if line.strip()
    ]
    telling = next((line for line in reversed(lines) if not line.startswith("Batch job submission failed")), "")
    reason = telling or (lines or ["no message"])[-1].removeprefix("Batch job submission failed: ")
    if re.search(r"contact slurm controller|timed out|Connection refused|resolve|munge", errors, re.I):
        return CannotJudge(f"`sbatch` does not reach Slurm: {reason}", "check that slurmctld runs: `sinfo`")
    hints = {
        "partition": "see `sinfo -s`, and name one with `--slurm partition=NAME`",
        "account": "see `sacctmgr show associations user=$USER`, and name one with `--slurm account=NAME`",
        "node name": "the inventory's names must be Slurm's own: see `sinfo -N`",
        "memory": "no node has that much: see `sinfo -N -l`",
        "generic resource": "`sinfo -o '%P %G'` shows the GPUs that Slurm knows",
        "feature": "`sinfo -o '%P %f'` shows the features of the nodes",
        "option": "`--slurm KEY=VALUE` is passed to sbatch as --KEY=VALUE: see `sbatch --help`",
        "configuration": "no node has what the job asks for: see `sinfo -N -l`",
        "time limit": "ask for less: `--slurm time=HH:MM:SS`",
    }
    hint = next((text for word, text in hints.items() if word in errors.lower()), None)
    return UsageProblem(f"`sbatch` refuses the job: {reason}", hint)


def _job_id(out: str) -> str:
    # "123", or "123;cluster"
    number = re.match(r"\d+", out.strip())
    return number[0] if number else ""


def call(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a program of Slurm. Never raises: an error is exit status 1, since a controller may be restarting."""
    try:
        # Slurm speaks one language, and `sbatch` gives its environment to the job.
        return captured(argv, _CALL_SECONDS, own_locale=True, start_new_session=True)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(argv, 1, "", str(error))


_FIELD = re.compile(r"(?:^|\s)([A-Za-z][A-Za-z0-9:/_]*)=")
_SACCT = ("State", "ExitCode", "NodeList", "Reason")
SACCT_FORMAT = ",".join(_SACCT)
ENDS: Mapping[str, tuple[str, str | None]] = {
    "COMPLETED": ("ended well", None),
    "FAILED": ("ended with exit status {exit}", None),
    "CANCELLED": ("was cancelled, and not by tunetool", "ask who ran `scancel {id}`"),
    "TIMEOUT": ("reached its time limit", "give it more: `--slurm time=HH:MM:SS`"),
    "DEADLINE": ("reached its deadline", "give it another: `--slurm deadline=TIME`"),
    "OUT_OF_MEMORY": (
        "was ended for its memory",
        "give it more: `--slurm mem=SIZE`, or fewer ranks on a node: `--ranks-per-node`",
    ),
    "NODE_FAIL": ("lost a node", "`sinfo -R` says why nodes are down"),
    "BOOT_FAIL": ("got a node that did not boot", "`sinfo -R` says why nodes are down"),
    "PREEMPTED": ("had to make room for another job", "ask for a QOS that is not preempted: `--slurm qos=NAME`"),
    "REVOKED": ("was taken over by another cluster", None),
    "LAUNCH_FAILED": ("could not be started on its nodes", "`scontrol show node` says what they report"),
}
"""States that a job does not leave, what they mean, and what to do (squeue(1), job state codes)."""
UNREACHABLE = "UNREACHABLE"
"""A state of tunetool's own: Slurm reported nothing about the job."""
_DOWN = ("DOWN", "FAIL", "NOT_RESPONDING", "UNKNOWN")
_NEVER = {
    "BadConstraints": "no node has what it asks for",
    "InvalidAccount": "its account is not valid: `--slurm account=NAME`",
    "InvalidQOS": "its QOS is not valid: `--slurm qos=NAME`",
    "PartitionConfig": "no nodes of its partition have what it asks for: see `sinfo -N -l`",
    "PartitionNodeLimit": "it asks for more nodes than its partition allows, or they are down: see `sinfo -N -l`",
    "PartitionTimeLimit": "it asks for more time than its partition gives: `--slurm time=HH:MM:SS`",
    "JobHeldAdmin": "an administrator holds it",
    "JobHeldUser": "it is held: `scontrol release {id}`",
}
"""Reasons for waiting that do not end with time, each with its message."""
_WAITS = {
    "Priority": "other jobs are before it",
    "Resources": "its nodes are in use",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition is inactive",
    "Reservation": "its reservation has not begun",
    "BeginTime": "its begin time has not come",
    "QOSMaxJobsPerUserLimit": "others of your jobs are running",
}


@dataclass(frozen=True)
class JobState:
    """``exit``: exit status of the batch script; ``signal``: the signal that ended it; ``nodes``: a hostlist, empty
    before the job runs."""

    state: str
    reason: str = ""
    nodes: str = ""
    exit: int = 0
    signal: int = 0

    @property
    def ended(self) -> bool:
        """Whether the job has ended."""
        return self.state in ENDS

    @property
    def hopeless(self) -> str | None:
        """Why the job would never start; None if that is not known."""
        return _NEVER.get(self.reason) if self.state == "PENDING" else None

    def words(self, job_id: str) -> str:
        """The state for a line of progress."""
        if self.state == "PENDING":
            if self.reason in ("None", ""):
                return f"job {job_id} waits: Slurm has not looked at it yet"
            why = _WAITS.get(self.reason) or _NEVER.get(self.reason, "").format(id=job_id)
            return f"job {job_id} waits: {self.reason}" + (f" ({why})" if why else "")
        if self.state in ("RUNNING", "CONFIGURING", "COMPLETING"):
            return f"job {job_id} {self.state.lower()} on {self.nodes or 'its nodes'}"
        if self.state == UNREACHABLE:
            return f"job {job_id}: Slurm does not answer, and is asked again"
        return f"job {job_id} is {self.state}" + (f" on {self.nodes}" if self.nodes else "")

    def verdict(self, job_id: str) -> tuple[str, str | None]:
        """Message and hint for a job that ended."""
        ending, hint = ENDS.get(self.state, ("ended", None))
        status = f"{self.exit}" if not self.signal else f"{self.exit} by signal {self.signal}"
        message = f"job {job_id} {ending.format(exit=status)} ({self.state})"
        return message, hint.format(id=job_id) if hint else None


def parse_fields(text: str) -> dict[str, str]:
    """``Key=Value`` pairs of one line of ``scontrol -o``: values may hold spaces."""
    matches = list(_FIELD.finditer(text))
    ends = [match.start() for match in matches[1:]]
    return {match[1]: text[match.end() : end].strip() for match, end in zip_longest(matches, ends)}


def parse_scontrol(text: str) -> JobState | None:
    """The state in one line of ``scontrol show job -o``; None if it names no job."""
    fields = parse_fields(text.strip())
    if "JobState" not in fields:
        return None
    return _state(fields["JobState"], fields.get("ExitCode", ""), fields.get("NodeList", ""), fields.get("Reason", ""))


def parse_sacct(text: str) -> JobState | None:
    """``sacct -n -P -X -o`` with ``SACCT_FORMAT``; None if accounting does not know the job."""
    for line in text.split("\n"):
        values = line.split("|")
        if len(values) == len(_SACCT):
            state, code, nodes, reason = values
            return _state(state, code, nodes, reason)
    return None


def _state(state: str, code: str, nodes: str, reason: str) -> JobState:
    # "CANCELLED by 1000"; "1:0" is exit status and signal.
    status = re.fullmatch(r"(\d{1,9}):(\d{1,9})", code)
    numbers = (int(status[1]), int(status[2])) if status else (0, 0)
    where = "" if nodes in ("(null)", "None assigned", "None") else nodes
    return JobState(re.split(r"[ +]", state)[0] or "UNKNOWN", reason, where, *numbers)


def down_nodes(text: str) -> list[tuple[str, str]]:
    """Name and reason of the nodes in ``scontrol show node -o`` that are down."""
    nodes = []
    for line in text.split("\n"):
        fields = parse_fields(line)
        # "DOWN*+DRAIN": flags after +, and * where it does not answer.
        states = fields.get("State", "").upper().replace("*", "+NOT_RESPONDING").split("+")
        if "NodeName" in fields and any(state in _DOWN for state in states):
            nodes.append((fields["NodeName"], fields.get("Reason", "").split(" [")[0]))
    return nodes
