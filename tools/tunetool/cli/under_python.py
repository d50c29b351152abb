"""Benchmarks that train run under the Python that trains: tunetool is started again by it, in this very process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from tunetool import __version__
from tunetool.errors import CannotJudge
from tunetool.node.common.commands import captured
from tunetool.origin import install_hint
from tunetool.training_python import DEEPSPEED, TrainingPython, choose

_STARTED_BY = "TUNETOOL_TRAINING_PYTHON"
"""Environment variable with the Python that tunetool was started again by: a wrapper may hide that it is the same."""
_SECONDS = 120.0
_ASK = (
    "import importlib.util as u, json; found = {n: bool(u.find_spec(n)) for n in %r}; "
    "found['tunetool'] = bool(u.find_spec('tunetool')); version = None\n"
    "if found['tunetool']:\n import tunetool; version = tunetool.__version__\n"
    "print(json.dumps([found, version]))"
)


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
    _check(chosen, needs, environment)
    beside = chosen.path.with_name("tunetool")
    program = [str(beside)] if beside.is_file() else ["-m", "tunetool"]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(chosen.path, [str(chosen.path), *program, *sys.argv[1:]], environment)  # noqa: S606  (no shell, as meant)


def _check(chosen: TrainingPython, needs: Sequence[str], environment: Mapping[str, str]) -> None:
    python = chosen.path
    hint = f"install tunetool {__version__} into it: {install_hint('finetune', python)}"
    hint += ", or name another with `--python`" if chosen.named_by == "--python" else "; `site.yml` does so"
    try:
        done = captured([str(python), "-c", _ASK % (list(needs),)], _SECONDS, cwd="/", env=dict(environment))
        packages, version = json.loads(done.stdout.strip().splitlines()[-1]) if done.returncode == 0 else ({}, None)
    except OSError as error:
        raise CannotJudge(f"`{python}` does not start: {error.strerror}", hint) from None
    except subprocess.TimeoutExpired:
        raise CannotJudge(f"`{python}` did not start within {_SECONDS:.0f} s", hint) from None
    except (ValueError, IndexError):
        raise CannotJudge(f"`{python}` is not a Python interpreter", "`--python` takes an interpreter") from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1]
        raise CannotJudge(f"`{python}` does not start: {last}", hint)
    lacking = next((name for name, there in packages.items() if not there), None)
    if lacking is not None:
        raise CannotJudge(f"{lacking} is not installed in `{python}`", hint)
    if version != __version__:
        raise CannotJudge(f"`{python}` has tunetool {version}, and this is {__version__}", hint)
