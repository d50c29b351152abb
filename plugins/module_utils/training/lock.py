"""The lock: versions of an environment's packages (constraints.txt), and which these are (pyproject.toml). Pure."""

from __future__ import annotations

import hashlib
import re
from typing import Optional

from ..common.refusal import Refusal

_OF_CUDA = re.compile(r"(nvidia-(?!ml-py)|cuda-|triton==)")
TRAINERS = ("deepspeed", "lightning")
EXTRAS = ("deepspeed", "checkpoint", "engines", "finetune")
"""Extras of tunetool's wheel that the fine-tune, the checkpoints and their benchmarks need."""
_ARRAY = r"^%s\s*=\s*\[(.*?)\]\s*$"


def whole(constraints_txt: str, pyproject: str) -> str:
    """The lock as it is used: constraints.txt, then the requirements of the extras as comments.

    So a changed extra is another lock: another environment, and a wheelhouse that has to be filled again. Raises
    ``Refusal`` where ``pyproject`` is not tunetool's.
    """
    names = ("dependencies", *EXTRAS, *(name for name in TRAINERS if name not in EXTRAS))
    lines = ["# tunetool, %s: %s\n" % (name, each) for name in names for each in requirements(pyproject, name)]
    return constraints_txt + "".join(lines)


def requirements(pyproject: str, name: str) -> list[str]:
    """The strings of one array of pyproject.toml. Pythons before 3.11, which may run this, have no reader of TOML."""
    plain = re.sub(r"^\s*#.*\n", "", pyproject, flags=re.MULTILINE)
    found = re.search(_ARRAY % re.escape(name), plain, re.MULTILINE | re.DOTALL)
    if found is None:
        raise Refusal("pyproject.toml has no `%s`. hint: take the pyproject.toml that came with this collection" % name)
    return re.findall(r'"([^"]*)"', found.group(1))


def digest(lock: str) -> str:
    """The lock's sha256."""
    return hashlib.sha256(lock.encode("utf-8")).hexdigest()


def pin(lock: str, name: str) -> Optional[str]:
    """The version of a package, the first one if it differs between Pythons; None if the lock does not name it."""
    match = re.search(r"^%s==([^\s;]+)" % re.escape(name), lock, re.MULTILINE | re.IGNORECASE)
    return match.group(1) if match else None


def cuda(lock: str) -> Optional[str]:
    """The CUDA version of the lock's torch, such as ``13.0``; None for a torch without CUDA."""
    version = pin(lock, "cuda-toolkit") or pin(lock, "nvidia-cuda-runtime")
    return ".".join(version.split(".")[:2]) if version else None


def constraints(lock: str, default_build: bool) -> str:
    """The lock as constraints for pip. Without CUDA's libraries for another build of torch, which names its own."""
    if default_build:
        return lock
    return "".join(line for line in lock.splitlines(keepends=True) if not _OF_CUDA.match(line))


def extras(trainers: list[str]) -> list[str]:
    """The extras of tunetool's wheel for these trainers."""
    return [*EXTRAS, *(name for name in trainers if name not in EXTRAS)]
