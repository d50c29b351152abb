"""What Slurm says of a job, what it tells its prolog, and how a node is drained with words that say why."""

from __future__ import annotations

import re
from typing import Callable, Mapping, Sequence

from ..common.commands import CommandError, Result, run
from ..common.refusal import Refusal

Call = Callable[[Sequence[str]], Result]
CONTEXT = "SLURM_SCRIPT_CONTEXT"
_OVER = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REVOKED",
    "TIMEOUT",
}
_UNKNOWN_JOB = "Invalid job id specified"
_SECONDS = 20.0
_LAST_NUMBER = (1 << 32) - 2


def _ask(argv: Sequence[str]) -> Result:
    return run(argv, timeout=_SECONDS)


def is_over(job: str, call: Call = _ask) -> bool:
    """Whether Slurm's controller says that the job has ended, or that it has none of that number. Raises
    ``CommandError`` where it does not answer."""
    try:
        answer = call(["squeue", "--all", "--noheader", "--states=all", "--format=%T", "--jobs=" + job])
    except CommandError as error:
        if _UNKNOWN_JOB in str(error):
            return True
        raise
    states = answer.stdout.split()
    return bool(states) and set(states) <= _OVER


def requested(job: str, call: Call = _ask) -> str:
    """The job's ``--tmp`` as a size, empty without one. Raises ``CommandError``."""
    # That field alone: the job's name and comment, which the user chooses, may look like any other.
    text = call(["squeue", "--all", "--noheader", "--states=all", "--format=%d", "--jobs=" + job]).stdout
    asked = re.match(r"\s*(\d+(?:\.\d+)?)([KMGTP]?)\s", text)
    if asked is None or not float(asked.group(1)):
        return ""
    return "%s%siB" % (asked.group(1), asked.group(2) or "M")


def drain(node: str, words: str, call: Call = _ask) -> None:
    """Take the node out of service: Slurm's own reason for a failed prolog says nothing. Raises ``CommandError``."""
    plain = re.sub(r"[^\x20-\x7e]|[\"\\]", "?", "tunetool scratch: " + words)
    call(["scontrol", "update", "NodeName=" + node, "State=DRAIN", "Reason=" + plain[:200]])


def job_in(environment: Mapping[str, str]) -> tuple[str, int, int | None]:
    """The job of a prolog or an epilog, its user and its group. Raises ``KeyError`` and ``Refusal``."""
    group = environment.get("SLURM_JOB_GID")
    return environment["SLURM_JOB_ID"], number_of(environment["SLURM_JOB_UID"]), number_of(group) if group else None


def number_of(text: str) -> int:
    """A user's or a group's number. Raises ``Refusal``: to the kernel the last one means that nothing is changed."""
    if not re.fullmatch(r"[0-9]{1,10}", text) or int(text) > _LAST_NUMBER:
        raise Refusal(
            "`%s` is no number of a user or a group. hint: one from 0 to %d" % (ascii(text)[1:-1], _LAST_NUMBER)
        )
    return int(text)
