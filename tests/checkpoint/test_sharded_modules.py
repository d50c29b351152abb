"""Slices of models bit by bit against what transformers, safetensors and FSDP2 have of the same files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from waiting import PATIENCE

PROGRAM = Path(__file__).parent / "shard_ranks.py"


Answers = Mapping[str, Mapping[str, list[dict[str, Any]]]]
"""By case and number of ranks, what each rank found."""


def _answers(directory: Path, *orders: str) -> Answers:
    ran = subprocess.run(
        [sys.executable, PROGRAM, directory, *orders], check=False, capture_output=True, text=True, timeout=PATIENCE
    )
    assert ran.returncode == 0, ran.stderr
    answers: Answers = json.loads(ran.stdout.splitlines()[-1])
    return answers


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return _answers(tmp_path_factory.mktemp("families"), "llama:1,2,4", "qwen:1,2,4", "moe:1,2,4")


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return _answers(
        tmp_path_factory.mktemp("layouts"), "fsdp:1,2,4", "fsdp in groups:4", "fsdp over tp:4", "two dims:4"
    )


@pytest.mark.parametrize(
    ("family", "placements"),
    [
        ("llama", {"(Shard(dim=0),)", "(Shard(dim=1),)"}),
        ("qwen", {"(Shard(dim=0),)", "(Shard(dim=1),)"}),
        ("moe", {"(Shard(dim=0),)", "(Shard(dim=1),)", "(Shard(dim=2),)", "(_StridedShard(dim=1, sf=2),)"}),
    ],
)
def test_slices_are_those_of_transformers(family: str, placements: set[str], families: Answers) -> None:
    """With tensor parallelism of 1, 2 and 4 ranks: by ``load`` with transformers' own plan, and by ``load_into`` a model
    that transformers cut."""
    assert list(families[family]) == ["1", "2", "4"]
    for world, ranks in families[family].items():
        assert len(ranks) == int(world)
        for rank in ranks:
            assert rank["wrong"] == []
            # Of one rank transformers makes plain tensors.
            assert set(rank["kinds"]) == {*(placements if len(ranks) > 1 else ()), "None"}
            assert rank["read"] >= rank["mine"]


@pytest.mark.parametrize(
    ("case", "placements"),
    [
        ("fsdp", {"(Shard(dim=0),)"}),
        ("fsdp in groups", {"(Replicate(), Shard(dim=0))"}),
        ("fsdp over tp", {"(_StridedShard(dim=0, sf=2), Shard(dim=0))", "(Shard(dim=0), Shard(dim=1))"}),
        (
            "two dims",
            {"(Shard(dim=0), Shard(dim=1))", "(Shard(dim=0), Shard(dim=0))", "(Shard(dim=2), Shard(dim=1))"},
        ),
    ],
)
def test_each_rank_fills_its_part(case: str, placements: set[str], layouts: Answers) -> None:
    """Uneven parts too: no number of ranks divides the rows of the embedding."""
    for ranks in layouts[case].values():
        for rank in ranks:
            assert rank["wrong"] == []
            assert placements <= set(rank["kinds"])
            device, group, partial = rank["refused"]
            assert "is a DTensor, which keeps its memory" in device
            assert "`group` together with the DTensor" in group
            assert "the placement `Partial(sum)`, which is not supported" in partial
