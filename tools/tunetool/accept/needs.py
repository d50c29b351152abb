"""What a goal needs of the machine. What is absent is said in words, and the goal is skipped, never passed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from typing import NamedTuple

from tunetool.errors import TunetoolError
from tunetool.node.machine.container import device_nodes
from tunetool.training_python import check_packages, choose


class _Need(NamedTuple):
    kind: str
    name: str


def lacks(needs: Sequence[str], root: str = "/") -> str:
    """What is absent of ``needs``, in words; empty where all is there."""
    return ", ".join(said for each in needs if (said := _lack(_Need(*_split(each)), root)))


def _split(need: str) -> tuple[str, str]:
    kind, _, name = need.partition(":")
    return kind, name


def _lack(need: _Need, root: str) -> str:
    if need.kind in ("gpu", "gpus"):
        there, least = len(device_nodes("nvidia[0-9]*", root)), int(need.name or 1)
        return "" if there >= least else f"this machine has {there or 'no'} NVIDIA GPUs, and it needs {least}"
    if need.kind == "root":
        return "" if os.geteuid() == 0 else "it needs root"
    if need.kind == "program":
        return "" if shutil.which(need.name) else f"the program {need.name} is not installed"
    try:
        chosen = choose(None, needs=(need.name,))
        if chosen.problem is None:
            check_packages(chosen, (need.name,), chosen.environment(os.environ), ours=False)
    except TunetoolError as error:
        return error.message.replace("`", "")
    return "" if chosen.problem is None else chosen.problem.message.replace("`", "")
