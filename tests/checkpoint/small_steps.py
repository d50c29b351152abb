"""Checkpoints of a few bytes whose values identify the save."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp


def save(step: Path, value: float, *, count: int = 64) -> Path:
    """Save two tensors in two files with torch's writer, all elements ``value``. Every save uses the same names."""
    state = {"a": torch.full((count,), value), "b": torch.full((count,), value)}
    writer = dcp.FileSystemWriter(step, single_file_per_rank=True, thread_count=2, sync_files=False)
    dcp.save(state, storage_writer=writer, no_dist=True)
    return step


def values(step: Path, *, count: int = 64) -> tuple[float, float]:
    """The values of ``a`` and ``b`` after a load."""
    state = {name: torch.zeros(count) for name in ("a", "b")}
    dcp.load(state, storage_reader=dcp.FileSystemReader(step), no_dist=True)
    for each in state.values():
        assert (each == each[0]).all()
    return float(state["a"][0]), float(state["b"][0])


def data_of(step: Path) -> list[Path]:
    """The data files."""
    return sorted(step.glob("*.distcp"))


def overwrite(path: Path, like: Path) -> None:
    """Overwrite a file as torch's writer does: truncate it and write it again."""
    with path.open("wb") as stream:
        stream.write(like.read_bytes())


def names(tier: Path) -> list[str]:
    """The steps that exist."""
    return sorted(path.name for path in tier.glob("step*"))
