"""Benchmarks that train run under the Python that trains: tunetool is started again by it, in this very process."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from tunetool.training_python import DEEPSPEED, check_packages, choose

_STARTED_BY = "TUNETOOL_TRAINING_PYTHON"
"""Environment variable with the Python that tunetool was started again by: a wrapper may hide that it is the same."""


def go_on_under(named: str | None, needs: Sequence[str] = DEEPSPEED, required: bool = True) -> None:
    """Return where this Python is the one to train with, else start the same command under that one.

    ``named``: what ``--python`` says; ``required``: False to go on here where no Python can train. Raises
    ``UsageProblem`` where it is no program, ``CannotJudge`` where no Python can train here, or the one that is to does
    not start, lacks a package, or has another tunetool.
    """
    chosen = choose(named, needs=needs)
    if chosen.problem is not None and not required:
        return
    chosen.need()
    if chosen.runs_tunetool or os.environ.get(_STARTED_BY) == str(chosen.path):
        os.environ.update(chosen.environment({}))
        return
    environment = chosen.environment({**os.environ, _STARTED_BY: str(chosen.path)})
    check_packages(chosen, needs, environment)
    beside = chosen.path.with_name("tunetool")
    program = [str(beside)] if beside.is_file() else ["-m", "tunetool"]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(chosen.path, [str(chosen.path), *program, *sys.argv[1:]], environment)  # noqa: S606  (no shell, as meant)
