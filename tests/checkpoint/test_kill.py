"""Saves that are killed: whenever it happens, the last complete checkpoint is there and loads."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import seeded
import torch.distributed.checkpoint as dcp

from tunetool.checkpoint import metadata
from tunetool.checkpoint.reader import DirectReader

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
Ask = Callable[..., Any]
MEGABYTES = 24


def save(forks: Ask, path: Path, seed: int, **order: Any) -> dict[str, Any]:
    settings = {"threads": 2, "buffer_bytes": 2**20, "checksums": True}
    given = {"path": str(path), "seed": seed, "megabytes": MEGABYTES, "settings": settings}
    (answer,) = forks(do="save_alone", world=1, **{"with": given}, **order)
    return dict(answer)


state = functools.lru_cache(maxsize=3)(seeded.state)


def loaded(path: Path) -> int:
    """The number of the checkpoint that is there, once all of it was read and compared."""
    found = seeded.blank(state(0, MEGABYTES))
    dcp.load(found, storage_reader=DirectReader(path, threads=2))
    assert seeded.difference(state(found["step"], MEGABYTES), found) is None
    return int(found["step"])


@pytest.mark.parametrize("kills", [20, pytest.param(100, marks=pytest.mark.slow)])
def test_the_last_complete_checkpoint_survives(kills: int, forks: Ask, only_torch: Ask, tmp_path: Path) -> None:
    path, instants = tmp_path / "step", random.Random(kills)
    times = [save(forks, path, seed) for seed in (0, 1)]
    assert [answer["status"] for answer in times] == [0, 0], times
    last, broken_off, replaced = 1, 0, 0
    # From just before the save begins to just after it has ended, as it was when nobody killed it.
    whole, saving = max(answer["seconds"] for answer in times), max(answer["value"] for answer in times)
    for seed in range(2, 2 + kills):
        answer = save(forks, path, seed, kill_after=instants.uniform(whole - 1.05 * saving, whole))
        left = {file.name for file in path.iterdir()} - metadata.files_of(metadata.read(path)) - {".metadata"}
        broken_off += any(name.endswith((".distcp", ".tmp")) for name in left)
        found = loaded(path)
        assert found in (last, seed), answer
        replaced += found == seed
        last = found
    # The instants met saves before, in and after their work.
    assert broken_off >= kills // 5, f"{broken_off} of {kills} were broken off, {replaced} were complete"
    assert save(forks, path, 1000)["status"] == 0
    assert loaded(path) == 1000
    assert {file.name for file in path.iterdir()} == {".metadata", *metadata.files_of(metadata.read(path))}
    assert only_torch(do="load", path=str(path), seed=1000, megabytes=MEGABYTES) == {"difference": None}
