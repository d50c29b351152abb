"""Running ``tunetool`` on a node, for modules that bring its record back."""

from __future__ import annotations

import json
import os
from typing import Any, Mapping, Sequence

TAIL_LINES = 20
MARK = "TUNETOOL_PLAY"
"""By it tunetool knows what is Ansible's on its own machine, and kills that when the play is interrupted."""


def ask(module: Any, arguments: Sequence[str]) -> dict[str, Any]:
    """Run the installed program with ``arguments``: what the module brings back, with the record. Ends the module where
    the program is missing, or brings none."""
    program = module.params["executable"]
    if not os.access(program, os.X_OK):
        program = module.get_bin_path("tunetool")
        if program is None:
            module.fail_json(
                msg="`%s` is not installed. hint: run site.yml, whose role tunetool installs it"
                % module.params["executable"],
                rc=3,
                stderr_tail=[],
            )
    # On a host that is the control machine itself the program would be killed with the play, and the janitor of its
    # files too. Without the mark it notices that nobody reads it any more, and cleans up.
    os.environ.pop(MARK, None)
    rc, stdout, stderr = module.run_command([program, *arguments])
    tail = stderr.strip().splitlines()[-TAIL_LINES:]
    record = read_record(stdout)
    if record is None:
        module.fail_json(msg=last_words(tail), rc=rc, stderr_tail=tail)
        return {}
    return {"record": record, "rc": rc, "stderr_tail": tail, "msg": summary(record)}


def read_record(stdout: str) -> dict[str, Any] | None:
    """The record on standard output, or None."""
    try:
        document = json.loads(stdout)
    except ValueError:
        return None
    return document if isinstance(document, dict) and "verdict" in document else None


def summary(record: Mapping[str, Any]) -> str:
    """One line: the verdict and its first reason."""
    verdict = record["verdict"]
    return ": ".join([verdict["status"].upper()] + verdict["reasons"][:1])


def last_words(tail: Sequence[str]) -> str:
    """Why there is no record, from the last lines of what it said."""
    told = [line for line in tail if line.startswith(("error: ", "hint: "))] or list(tail[-1:]) or ["it said nothing"]
    return "; ".join(told)
