"""Checkpoints of a few bytes whose values say which save they are of."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp


def save(step: Path, value: float, *, count: int = 64) -> Path:
    """Two tensors in two files, all elements ``value``, by torch's own writer: the same names at every save."""
    state = {"a": torch.full((count,), value), "b": torch.full((count,), value)}
    writer = dcp.FileSystemWriter(step, single_file_per_rank=True, thread_count=2, sync_files=False)
    dcp.save(state, storage_writer=writer, no_dist=True)
    return step


def values(step: Path, *, count: int = 64) -> tuple[float, float]:
    """What a load finds in ``a`` and ``b``."""
    state = {name: torch.zeros(count) for name in ("a", "b")}
    dcp.load(state, storage_reader=dcp.FileSystemReader(step), no_dist=True)
    for each in state.values():
        assert (each == each[0]).all()
    return float(state["a"][0]), float(state["b"][0])


def data_of(step: Path) -> list[Path]:
    """The data files."""
    return sorted(step.glob("*.distcp"))


def overwrite(path: Path, like: Path) -> None:
    """As torch's writer does it: the same file, emptied and written again."""
    with path.open("wb") as stream:
        stream.write(like.read_bytes())


def names(tier: Path) -> list[str]:
    """The steps that are there."""
    return sorted(path.name for path in tier.glob("step*"))
