"""Checks before a run that would otherwise fail late. Nothing is written here."""

from __future__ import annotations

from pathlib import Path

from tunetool.errors import CannotJudge, UsageProblem
from tunetool.node.machine.memory import memory_left
from tunetool.node.units import format_size

_FLOAT = 4
_FULL = 4
"""Copies of the parameters in full fine-tuning: parameters, gradients, and Adam's two moments."""
_LIBRARIES = 700 * 2**20
"""Bytes of a rank with torch, DeepSpeed and transformers loaded, without a model."""


def memory_needed(parameters: int, full: bool, ranks: int) -> int:
    """Least bytes that ``ranks`` on CPUs need: each loads all parameters in fp32 before ZeRO partitions them."""
    return ranks * (parameters * _FLOAT * (_FULL if full else 1) + _LIBRARIES)


def need_memory(parameters: int, full: bool, ranks: int, available: tuple[int, str] | None = None) -> None:
    """Raise ``CannotJudge`` where ranks on CPUs need more memory than is available.

    ``available``: bytes and the name of what limits them; None: read them.
    """
    available = memory_left() if available is None else available
    needed = memory_needed(parameters, full, ranks)
    if available is None or needed <= available[0]:
        return
    raise CannotJudge(
        f"{ranks} rank(s) need {format_size(needed)} for {parameters / 1e9:.3g} billion parameters, but "
        f"{available[1]} has {format_size(available[0])} left",
        "train a smaller `--model`, such as `tiny`, on fewer ranks, or on GPUs",
    )


def need_absent(checkpoint: Path) -> None:
    """Raise ``UsageProblem`` where ``checkpoint`` exists, since nothing is overwritten."""
    if checkpoint.exists():
        raise UsageProblem(f"`{checkpoint}` exists", "name a directory that does not exist yet")
