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
MEGABYTES = 16


def save(forks: Ask, path: Path, seed: int, world: int = 1, **order: Any) -> dict[str, Any]:
    """What became of the coordinator."""
    settings = {"threads": 2, "buffer_bytes": 2**20, "checksums": True}
    meet = path.parent / f"meet-{seed}"
    given = {"path": str(path), "meet": str(meet), "seed": seed, "megabytes": MEGABYTES, "settings": settings}
    return dict(forks(do="save_state", world=world, **{"with": given, "from": f"{meet}-begins"}, **order)[0])


state = functools.lru_cache(maxsize=3)(seeded.state)


def loaded(path: Path) -> int:
    """The number of the checkpoint that is there, once all of it was read and compared."""
    found = seeded.blank(state(0, MEGABYTES))
    dcp.load(found, storage_reader=DirectReader(path, threads=2))
    assert seeded.difference(state(found["step"], MEGABYTES), found) is None
    return int(found["step"])


@pytest.mark.parametrize(
    ("kills", "world"),
    [(14, 1), (6, 2), pytest.param(70, 1, marks=pytest.mark.slow), pytest.param(30, 2, marks=pytest.mark.slow)],
)
def test_the_last_complete_checkpoint_survives(
    kills: int, world: int, forks: Ask, only_torch: Ask, tmp_path: Path
) -> None:
    path, instants = tmp_path / "step", random.Random(kills)
    last, broken_off, replaced = 0, 0, 0
    duration = save(forks, path, 0, world)["value"]
    for seed in range(1, 1 + kills):
        answer = save(forks, path, seed, world, kill_after=instants.uniform(0, 1.1 * duration))
        # As long as saves take now: the first one is slow, and a machine has other work.
        duration = answer.get("value", 1.1 * duration)
        left = {file.name for file in path.iterdir()} - metadata.files_of(metadata.read(path)) - {".metadata"}
        broken_off += any(name.endswith((".distcp", ".tmp")) for name in left)
        found = loaded(path)
        assert found in (last, seed), answer
        replaced += found == seed
        last = found
    # The instants met saves before, in and after their work.
    assert broken_off >= kills // 5, f"{broken_off} of {kills} were broken off, {replaced} were complete"
    assert save(forks, path, 1000, world)["status"] == 0
    assert loaded(path) == 1000
    assert {file.name for file in path.iterdir()} == {".metadata", *metadata.files_of(metadata.read(path))}
    assert only_torch(do="load", path=str(path), seed=1000, megabytes=MEGABYTES) == {"difference": None}
