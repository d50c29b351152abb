"""The part ``training`` of the manifest: which Python trains on this node, and its needs. Only this module reads it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Mapping

from .check_result import FAIL, PASS, SKIP, Check
from .manifest import MANIFEST_PATH, ManifestError, load
from .refusal import Expected, on_one_line
from .venv import damage

CHECK_ID = "training.environment"
ROLE = "training_environment"
OP_READY = "ready"
"""The manifest's value for a compiled op that can be loaded; for any other op the value is the reason why not."""


@dataclass(frozen=True)
class Training:
    """The training environment that the manifest names."""

    python: str
    directory: str
    packages: Mapping[str, str]
    accelerator: str
    ops: Mapping[str, str]
    ops_directory: str
    variables: Mapping[str, str]
    """Environment variables that every command with this Python must set."""
    built: bool = False
    """Whether the role built it, so that its files are known."""

    @property
    def stable_python(self) -> str:
        """The same Python by a path that stays: another environment may take the name of this one, and a run
        must not change from one to the other."""
        return same_python(self.python)

    def gone(self, root: str = "/") -> str | None:
        """The reason why its Python cannot be started; None if it can."""
        path = os.path.join(root, self.python.lstrip("/"))
        if os.access(path, os.X_OK) and not os.path.isdir(path):
            return None
        if os.path.islink(path) and not os.path.exists(path):
            return "`%s` leads to `%s`, which is gone" % (self.python, os.path.realpath(path))
        return "`%s` is gone" % self.python

    def fault(self, root: str = "/") -> str | None:
        """What of it is gone or damaged, None where all is there that can be known. Starts nothing."""
        why = self.gone(root)
        if why is None and self.built:
            directory = os.path.dirname(os.path.dirname(self.python))
            why = damage(os.path.realpath(os.path.join(root, directory.lstrip("/")))) or None
        compiled = self.ops_directory and OP_READY in self.ops.values()
        if why is None and compiled and not os.path.isdir(os.path.join(root, self.ops_directory.lstrip("/"))):
            why = "its compiled ops are gone: `%s`" % self.ops_directory
        return why

    def describe(self) -> str:
        """Its versions in a few words."""
        versions = ["%s %s" % (name, self.packages[name]) for name in ("torch", "deepspeed") if name in self.packages]
        return "%s for %s in `%s`" % (", ".join(versions) or "packages of its owner", self.accelerator, self.directory)


class NoTraining(Expected):
    """This node has no Python that can train. ``hint`` says what to do."""

    def __init__(self, message: str, hint: str) -> None:
        self.message, self.hint = on_one_line(message), on_one_line(hint)
        super().__init__(self.message)


REPAIR = (
    "run `tunetool provision` for this node, whose role `%s` builds it again, or name a Python with `--python`"
) % ROLE
SWITCH_ON = "set the role `%s` on and run `tunetool provision`, or name a Python that has torch with `--python`" % ROLE


def training_of(manifest: Mapping[str, Any] | None) -> Training | None:
    """The part ``training`` of a manifest; None where the role is off, or there is no manifest."""
    part = (manifest or {}).get("training")
    if not part:
        return None
    return Training(
        python=str(part["python"]),
        directory=str(part["directory"]),
        packages=dict(part.get("packages") or {}),
        accelerator=str(part.get("accelerator") or "cpu"),
        ops=dict(part.get("ops") or {}),
        ops_directory=str(part.get("ops_directory") or ""),
        variables=dict(part.get("environment") or {}),
        built=part.get("source") == "built",
    )


def read_training(path: str = MANIFEST_PATH) -> Training | None:
    """The part of the manifest at ``path``; None without a manifest. Raises ``NoTraining`` if it cannot be read."""
    try:
        return training_of(load(path))
    except FileNotFoundError:
        return None
    except ManifestError as error:
        raise NoTraining(error.message, error.hint) from None


def python_of_ranks(named: str, fallback: str, path: str = MANIFEST_PATH) -> tuple[str, Mapping[str, str]]:
    """The Python of ranks on this node, and its variables: ``named``, else the manifest's, else ``fallback``.

    Raises ``NoTraining`` where the manifest names one that is gone.
    """
    if named:
        try:
            training = read_training(path)
        except NoTraining:
            training = None
        same = training is not None and same_python(named) == training.stable_python
        return named, training.variables if training is not None and same else {}
    training = read_training(path)
    if training is None:
        return fallback, {}
    why = training.gone()
    if why is not None:
        raise NoTraining("%s, the Python of this node's training environment" % why, REPAIR)
    return training.stable_python, training.variables


def same_python(path: str) -> str:
    """``path`` without links in its directory. The program itself stays a link: by its own name it is the venv's."""
    directory, name = os.path.split(os.path.abspath(path))
    return os.path.join(os.path.realpath(directory), name)


def check_training(manifest: Mapping[str, Any], root: str = "/") -> Check:
    """Check that the files that the manifest names exist. Starts no program."""
    training = training_of(manifest)
    expected = "a Python with torch and DeepSpeed"
    if training is None:
        return Check(CHECK_ID, SKIP, expected, "none: the role `%s` is off on this node" % ROLE, SWITCH_ON)
    expected += ", `%s`" % training.python
    why = training.fault(root)
    if why is not None:
        return Check(CHECK_ID, FAIL, expected, why, REPAIR)
    return Check(CHECK_ID, PASS, expected, training.describe())
