"""Saves that are killed at any point: the last complete checkpoint remains and can be loaded."""

from __future__ import annotations

import functools
import itertools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import seeded
import torch.distributed.checkpoint as dcp

import stops
from tunetool.checkpoint import metadata
from tunetool.checkpoint.reader import DirectReader

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
Ask = Callable[..., Any]
MEGABYTES = 8


def save(forks: Ask, path: Path, seed: int, world: int, log: Path | None = None, at: int | None = None) -> int:
    """The coordinator's exit status. ``at`` ends it at that change of the file system; see ``stops.py``."""
    settings = {"threads": 2, "buffer_bytes": 2**20, "checksums": True}
    meet = path.parent / f"meet-{seed}-{at}"
    given = {"path": str(path), "meet": str(meet), "seed": seed, "megabytes": MEGABYTES, "settings": settings}
    stop = {"stop": {"under": str(path), "log": str(log), "at": at}} if log else {}
    return int(forks(do="save_state", world=world, **{"with": given}, **stop)[0]["status"])


state = functools.lru_cache(maxsize=3)(seeded.state)


def loaded(path: Path) -> int:
    """The number of the checkpoint, after all of it was read and compared."""
    loaded_state = seeded.blank(state(0, MEGABYTES))
    dcp.load(loaded_state, storage_reader=DirectReader(path, threads=2))
    assert seeded.difference(state(loaded_state["step"], MEGABYTES), loaded_state) is None
    return int(loaded_state["step"])


def files(path: Path) -> set[str]:
    return {file.name for file in path.iterdir()}


def complete(path: Path) -> set[str]:
    """The files of the checkpoint."""
    return {".metadata", *metadata.files_of(metadata.read(path))}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["telling", "every"])
def test_the_last_complete_checkpoint_survives(
    every: bool, world: int, forks: Ask, only_torch: Ask, tmp_path: Path
) -> None:
    path, log = tmp_path / "step", tmp_path / "log"
    assert save(forks, path, 0, world) == 0
    assert save(forks, path, 1, world, log) == 0
    whole = stops.points(log)
    # One rename decides: before it there is the old checkpoint, after it the new one.
    (decides,) = [number for number, line in enumerate(whole) if line.startswith("rename /.metadata")]
    assert [line.split()[0] for line in whole[:decides]].count("pwrite") > 6, "the points are in the middle of a save"
    assert decides < len(whole) - 1, "and after it, where the old files go"
    seeds, last = itertools.count(2), 1
    for at in range(len(whole)) if every else stops.telling(whole):
        for over in ("a complete save", "a killed one"):
            log.unlink(missing_ok=True)
            seed = next(seeds)
            status = save(forks, path, seed, world, log, at)
            if over == "a complete save":
                assert status == -signal.SIGKILL, whole[at]
            else:
                # With less to remove there may be fewer points: then the save was completed.
                assert status in (-signal.SIGKILL, 0), whole[at]
            done = stops.points(log)[: -1 if status else None]
            renamed = any(line.startswith("rename /.metadata") for line in done)
            if over == "a complete save":
                assert renamed == (at > decides), done
            # Removing what a killed save left shifts the points: the log shows what was done.
            last = seed if renamed else last
            assert loaded(path) == last, (over, done)
        last = next(seeds)
        assert save(forks, path, last, world) == 0
        assert loaded(path) == last
        assert files(path) == complete(path)
    assert only_torch(do="load", path=str(path), seed=last, megabytes=MEGABYTES) == {"difference": None}
