"""One Slurm job: submits it, queries it, cancels it; its state from ``scontrol`` or ``sacct``, in plain words."""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from tunetool.ctrl_c import CtrlC
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.measure.worker import start_talking
from tunetool.node.common.commands import captured
from tunetool.node.play.host_summary import one_line

_TICK = 0.2
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
        ctrl_c = CtrlC()
        deadline = time.monotonic() + _END_SECONDS
        cancelled = False
        while self.job_id and time.monotonic() < deadline:
            with ctrl_c.held():
                try:
                    if self.state().ended:
                        break
                except CannotJudge:
                    deadline = 0  # forgotten, or out of reach: try once more, then give up
                if not cancelled:
                    cancelled = call(["scancel", self.job_id]).returncode == 0
                time.sleep(_TICK)
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
