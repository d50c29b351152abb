"""One job in Slurm's hands: submitted, asked after, cancelled."""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tunetool.errors import CannotJudge, UsageProblem
from tunetool.launch.slurm_state import SACCT_FORMAT, UNREACHABLE, JobState, parse_sacct, parse_scontrol
from tunetool.node.play.host_summary import one_line

_TICK = 0.2
_CALL_SECONDS = 60.0
"""Slurm's own patience with its controller (MessageTimeout) is 10 s by default, several times over."""
_END_SECONDS = 90.0
"""A cancelled job has KillWait, 30 s by default, to end."""
_LOST_SECONDS = 300.0


@dataclass
class Submitted:
    """A job in Slurm's hands. A context: afterwards it is not there any more, however it is left."""

    script: str
    job_id: str = ""

    def __enter__(self) -> Submitted:
        self._began = self._heard = time.monotonic()
        # In a session of its own: a Ctrl-C between the job's start and its number must not lose the number.
        process = subprocess.Popen(
            ["sbatch", "--parsable"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            out, said = process.communicate(self.script, timeout=_CALL_SECONDS)
        except BaseException as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.job_id = _job_id(process.communicate(timeout=_CALL_SECONDS)[0])
            process.kill()
            self._cancel()
            if isinstance(error, subprocess.TimeoutExpired):
                raise CannotJudge(
                    f"`sbatch` did not answer within {_CALL_SECONDS:.0f} s", "is slurmctld up: `sinfo`"
                ) from None
            raise
        self.job_id = _job_id(out)
        if process.returncode != 0 or not self.job_id:
            raise refused(said)
        return self

    def __exit__(self, *_: object) -> None:
        self._cancel()

    @property
    def age(self) -> float:
        """Seconds since it was submitted."""
        return time.monotonic() - self._began

    def state(self) -> JobState:
        """Raises ``CannotJudge`` when Slurm does not answer for minutes, or has forgotten the job."""
        done = call(["scontrol", "show", "job", "-o", self.job_id])
        found = parse_scontrol(done.stdout)
        if found is None and "Invalid job id" in done.stderr:
            # Forgotten by slurmctld some minutes after its end (MinJobAge); accounting need not be installed.
            known = call(["sacct", "-n", "-P", "-X", "-j", self.job_id, "-o", SACCT_FORMAT]).stdout
            found = parse_sacct(known) or JobState("UNKNOWN_END")
            if not found.ended:
                raise CannotJudge(
                    f"Slurm has forgotten job {self.job_id}", "ask for MinJobAge=300 or accounting in slurm.conf"
                )
        if found is None:
            if time.monotonic() - self._heard > _LOST_SECONDS:
                why = one_line(done.stderr) or "no answer"
                raise CannotJudge(f"`scontrol` says nothing of job {self.job_id}: {why}", "is slurmctld up: `sinfo`")
            return JobState(UNREACHABLE)
        self._heard = time.monotonic()
        return found

    def _cancel(self) -> None:
        """And wait until its nodes are free: only then its ranks are gone. A second Ctrl-C does not leave it behind."""
        deadline = time.monotonic() + _END_SECONDS
        asked = False
        while self.job_id and time.monotonic() < deadline:
            with contextlib.suppress(KeyboardInterrupt):
                try:
                    if self.state().ended:
                        return
                except CannotJudge:
                    deadline = 0  # forgotten, or out of reach: asked once more, and left
                if not asked:
                    asked = call(["scancel", self.job_id]).returncode == 0
                time.sleep(_TICK)


def refused(said: str) -> UsageProblem | CannotJudge:
    """What ``sbatch`` said when it took no job, as an error."""
    said = re.sub(r'^Try ".*$', "", said, flags=re.MULTILINE)
    lines = [
        line.removeprefix("sbatch: ").removeprefix("error: ").strip() for line in said.splitlines() if line.strip()
    ]
    telling = next((line for line in reversed(lines) if not line.startswith("Batch job submission failed")), "")
    reason = telling or (lines or ["no message"])[-1].removeprefix("Batch job submission failed: ")
    if re.search(r"contact slurm controller|timed out|Connection refused|resolve|munge", said, re.I):
        return CannotJudge(f"`sbatch` does not reach Slurm: {reason}", "is slurmctld up: `sinfo`")
    hints = {
        "partition": "see `sinfo -s`, and name one with `--slurm partition=NAME`",
        "account": "see `sacctmgr show associations user=$USER`, and name one with `--slurm account=NAME`",
        "node name": "the inventory's names must be Slurm's own: see `sinfo -N`",
        "memory": "no node has so much: see `sinfo -N -l`",
        "generic resource": "`sinfo -o '%P %G'` tells which GPUs Slurm knows of",
        "feature": "`sinfo -o '%P %f'` tells the features that nodes have",
        "option": "`--slurm KEY=VALUE` is passed to sbatch as --KEY=VALUE: see `sbatch --help`",
        "configuration": "no node has what is asked for: see `sinfo -N -l`",
        "time limit": "ask for less: `--slurm time=HH:MM:SS`",
    }
    hint = next((text for word, text in hints.items() if word in said.lower()), None)
    return UsageProblem(f"`sbatch` refuses the job: {reason}", hint)


def _job_id(out: str) -> str:
    # "123", or "123;cluster"
    found = re.match(r"\d+", out.strip())
    return found[0] if found else ""


def call(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Never raises: a controller that is just being restarted is asked again."""
    try:
        return subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_CALL_SECONDS,
            check=False,
            start_new_session=True,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(argv, 1, "", str(error))
