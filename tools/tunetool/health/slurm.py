"""A program for Slurm's HealthCheckProgram: it drains a sick node, and takes back only what it did itself."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence

from tunetool.health import results
from tunetool.health.results import Health, current
from tunetool.node.common.commands import CommandError, Result, run

PREFIX = "tunetool health: "
LONGEST = 200
NAME_A_DRIVE = ("drives.", "array.members: ", "kernel.drives: ")
"""Reasons that come first: a drive is the cause of what fails above it, and a person can replace it."""
OUT_OF_SERVICE = {"DRAIN", "DRAINED", "DRAINING", "DOWN", "FAIL", "FAILING", "ERROR"}
_REASON = re.compile(r"(?:^|\s)Reason=(.*?)(?: \[[^\s@\[\]]+@[^\s\[\]]+\](?=\s|$)|\s*$)")
"""The reason, and who gave it and when; newer versions print more after it."""
Run = Callable[[Sequence[str]], Result]


def apply(health: Health, node: str, files: results.Files = results.NODE, call: Run = run) -> str | None:
    """Drain or resume ``node`` by the rule; what was done, in a line, or None. Raises ``CommandError``.

    - ``fail``: drain, with our own reason, unless the node is out of service already: draining, drained, down, failed.
    - ``pass``: resume, if we drained it and Slurm still has our very reason. Another reason means that a person has
      taken over: then we forget that it was ours.
    - ``unknown``: nothing.
    """
    ours = results.read_document(files.drained).get("reason")
    if health.status == "unknown" or (health.status == "pass" and not isinstance(ours, str)):
        # The case of nearly every call asks Slurm nothing.
        return None
    states, reason = _look(node, call)
    if health.status == "fail":
        if states & OUT_OF_SERVICE:
            return None
        words = reason_of(health)
        # First the note, through to the disk: a drain without it would be for ever.
        results.write_document(files.drained, {"node": node, "reason": words}, sync=True)
        call(["scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={words}"])
        return f"drained `{node}`: {words}"
    same = reason == ours and "DRAIN" in states
    if same:
        # UNDRAIN, not RESUME: a node that is down for another reason stays down.
        call(["scontrol", "update", f"NodeName={node}", "State=UNDRAIN"])
    files.drained.unlink(missing_ok=True)
    return f"resumed `{node}`" if same else None


def reason_of(health: Health) -> str:
    """The reason for Slurm: one line of plain characters, since Slurm's own files hold it between quotation marks."""
    reasons = sorted(health.reasons or ["it fails"], key=lambda reason: not reason.startswith(NAME_A_DRIVE))
    words = re.sub(r"[^\x20-\x7e]|[\"\\]", "?", reasons[0])
    more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
    return PREFIX + words[: LONGEST - len(more)].strip() + more


def _look(node: str, call: Run) -> tuple[set[str], str]:
    """The node's states, without marks, and its reason, without who gave it and when."""
    text = call(["scontrol", "--oneliner", "show", "node", node]).stdout
    state = re.search(r"(?:^|\s)State=(\S+)", text)
    reason = _REASON.search(text)
    if state is None:
        raise CommandError(f"`scontrol show node {node}` names no state")
    return set(re.findall(r"[A-Z_]+", state[1])), reason[1] if reason else ""


def node_name(environment: Mapping[str, str]) -> str:
    """This node's name in Slurm."""
    return environment.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]


def main() -> int:
    """Act on the last results. The exit status says nothing to Slurm."""
    try:
        done = apply(current(), node_name(os.environ))
    except CommandError as error:
        print(f"error: {error}")
        return 3
    if done:
        print(done)
    return 0
