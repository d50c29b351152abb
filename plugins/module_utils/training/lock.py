"""The lock, constraints.txt: which versions an environment is made of. Pure."""

from __future__ import annotations

import hashlib
import re
from typing import Optional

_OF_CUDA = re.compile(r"(nvidia-(?!ml-py)|cuda-|triton==)")
TRAINERS = ("deepspeed", "lightning")
EXTRAS = ("deepspeed", "checkpoint", "engines", "finetune")
"""Of tunetool's own wheel: what the fine-tune, the checkpoints and their benchmarks need."""


def digest(lock: str) -> str:
    """The lock's sha256."""
    return hashlib.sha256(lock.encode("utf-8")).hexdigest()


def pin(lock: str, name: str) -> Optional[str]:
    """The version of a package, the first that is named where Pythons differ; None where the lock has none."""
    match = re.search(r"^%s==([^\s;]+)" % re.escape(name), lock, re.MULTILINE | re.IGNORECASE)
    return match.group(1) if match else None


def cuda(lock: str) -> Optional[str]:
    """The CUDA of the torch that the lock names, such as ``13.0``; None for a torch without CUDA."""
    version = pin(lock, "cuda-toolkit") or pin(lock, "nvidia-cuda-runtime")
    return ".".join(version.split(".")[:2]) if version else None


def constraints(lock: str, default_build: bool) -> str:
    """The lock for pip. With another build of torch than its own, CUDA's libraries are those that this torch names."""
    if default_build:
        return lock
    return "".join(line for line in lock.splitlines(keepends=True) if not _OF_CUDA.match(line))


def extras(trainers: list[str]) -> list[str]:
    """The extras of tunetool's wheel for these trainers."""
    return [*EXTRAS, *(name for name in trainers if name not in EXTRAS)]
