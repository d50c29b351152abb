"""What would go wrong later, said before anything is made. Nothing is written here."""

from __future__ import annotations

from pathlib import Path

from tunetool.errors import CannotJudge, UsageProblem
from tunetool.node.machine.memory_left import memory_left
from tunetool.node.units import format_size

_FLOAT = 4
_FULL = 4
"""Copies of the parameters where all are trained: they, their gradients, and Adam's two averages."""
_LIBRARIES = 700 * 2**20
"""What a rank takes with torch, DeepSpeed and transformers loaded, before any model."""


def memory_needed(parameters: int, full: bool, ranks: int) -> int:
    """Bytes that ``ranks`` on CPUs take at least: each loads all parameters as fp32, whatever ZeRO shards later."""
    return ranks * (parameters * _FLOAT * (_FULL if full else 1) + _LIBRARIES)


def need_memory(parameters: int, full: bool, ranks: int, left: tuple[int, str] | None = None) -> None:
    """Raises ``CannotJudge`` where the kernel would kill a rank instead. For ranks on CPUs."""
    left = memory_left() if left is None else left
    needed = memory_needed(parameters, full, ranks)
    if left is None or needed <= left[0]:
        return
    raise CannotJudge(
        f"{ranks} rank(s) take {format_size(needed)} for {parameters / 1e9:.3g} billion parameters, and {left[1]} has "
        f"{format_size(left[0])} left",
        "train a smaller `--model`, such as `tiny`, on fewer ranks, or on GPUs",
    )


def need_absent(checkpoint: Path) -> None:
    """Raises ``UsageProblem``: nothing is overwritten."""
    if checkpoint.exists():
        raise UsageProblem(f"`{checkpoint}` exists", "name a directory that the checkpoint can be")
