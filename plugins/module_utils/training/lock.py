"""The lock, constraints.txt: the versions of the packages of an environment. Pure."""

from __future__ import annotations

import hashlib
import re
from typing import Optional

_OF_CUDA = re.compile(r"(nvidia-(?!ml-py)|cuda-|triton==)")
TRAINERS = ("deepspeed", "lightning")
EXTRAS = ("deepspeed", "checkpoint", "engines", "finetune")
"""Extras of tunetool's wheel that the fine-tune, the checkpoints and their benchmarks need."""


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
