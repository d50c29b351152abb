"""Chooses the Python that trains on this machine: the one in the call, the manifest's, or tunetool's own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from tunetool import __version__
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.node.common.commands import captured
from tunetool.node.common.manifest import MANIFEST_PATH
from tunetool.node.common.training_part import REPAIR, SWITCH_ON, NoTraining, Training, read_training, same_python
from tunetool.origin import install_hint

DEEPSPEED = ("torch", "deepspeed")
"""Packages that most commands need."""
TORCH = ("torch",)
_SECONDS = 120.0
_ASK = (
    "import importlib.util as u, json; found = {n: bool(u.find_spec(n)) for n in %r}; "
    "found['tunetool'] = bool(u.find_spec('tunetool')); version = None\n"
    "if found['tunetool']:\n import tunetool; version = tunetool.__version__\n"
    "print(json.dumps([found, version]))"
)


@dataclass(frozen=True)
class TrainingPython:
    """The Python to use. If no Python can train, it is tunetool's own, and ``problem`` has the reason."""

    path: Path
    named_by: str
    """``--python``, ``manifest`` or ``tunetool``."""
    training: Training | None = None
    """The manifest's part, if the Python is the one in the manifest."""
    problem: CannotJudge | None = None
    _variables: Mapping[str, str] = field(default_factory=dict)

    def need(self) -> TrainingPython:
        """Return this object. Raises ``CannotJudge`` if no Python can train here."""
        if self.problem is not None:
            raise self.problem
        return self

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """``base`` with the variables that the manifest sets for its Python."""
        return {**base, **self._variables}

    @property
    def runs_tunetool(self) -> bool:
        """Whether it is the Python that runs tunetool."""
        return same_python(str(self.path)) == same_python(sys.executable)


def choose(named: str | None, manifest: Path | None = None, needs: Sequence[str] = DEEPSPEED) -> TrainingPython:
    """The Python for a command on this machine. ``named``: what ``--python`` says; ``manifest``: None for the node's.

    ``needs``: packages without which tunetool's own Python is not chosen. Nothing is started, so another Python may
    lack them nevertheless. Raises ``UsageProblem`` if ``named`` is not a program.
    """
    training, damaged = _read(manifest)
    if named is not None:
        program = _program(named)
        same = training is not None and same_python(str(program)) == training.stable_python
        return _of_manifest(program, "--python", training) if same else TrainingPython(program, "--python")
    if training is not None:
        why = training.gone()
        if why is not None:
            problem = CannotJudge(f"{why}, the Python of this node's training environment", REPAIR)
            return TrainingPython(Path(sys.executable), "manifest", training, problem)
        return _of_manifest(Path(training.stable_python), "manifest", training)
    executable = Path(sys.executable)
    lacking = next((name for name in needs if find_spec(name) is None), None)
    if lacking is None:
        return TrainingPython(executable, "tunetool")
    problem = damaged or CannotJudge(
        f"{lacking} is not installed in `{executable}`, and this node has no training environment", SWITCH_ON
    )
    return TrainingPython(executable, "tunetool", problem=problem)


def check_packages(
    chosen: TrainingPython, needs: Sequence[str], environment: Mapping[str, str], ours: bool = True
) -> None:
    """Ask the Python itself, without an import of what it ``needs``.

    Raises ``CannotJudge`` where it does not start, lacks a package, or, with ``ours``, has another tunetool than this.
    """
    python = chosen.path
    hint = f"install tunetool {__version__} into it: {install_hint('finetune', python)}"
    hint += ", or name another with `--python`" if chosen.named_by == "--python" else "; `tunetool provision` does so"
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
    wanted = [name for name in packages if ours or name != "tunetool"]
    lacking = next((name for name in wanted if not packages[name]), None)
    if lacking is not None:
        raise CannotJudge(f"{lacking} is not installed in `{python}`", hint)
    if ours and version != __version__:
        raise CannotJudge(f"`{python}` has tunetool {version}, and this is {__version__}", hint)


def _read(manifest: Path | None) -> tuple[Training | None, CannotJudge | None]:
    try:
        return read_training(str(manifest or MANIFEST_PATH)), None
    except NoTraining as error:
        return None, CannotJudge(error.message, error.hint)


def _of_manifest(path: Path, named_by: str, training: Training | None) -> TrainingPython:
    return TrainingPython(path, named_by, training, None, training.variables if training is not None else {})


def _program(named: str) -> Path:
    program = shutil.which(named)
    if program is None:
        raise UsageProblem(
            f"`{named}` is not a program", "`--python` takes an interpreter, such as `/opt/venv/bin/python`"
        )
    # The link is not resolved: Python finds its venv by the name that it is started with.
    return Path(program).absolute()
