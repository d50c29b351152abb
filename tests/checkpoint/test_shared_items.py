"""A rank loads from the files that it needs alone: its own, and those with what it holds together with others."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the checkpoints are torch's own")

import torch
import torch.distributed.checkpoint as dcp

from tunetool.checkpoint import DirectReader, DirectSavePlanner, DirectWriter, bulk, markers, metadata
from tunetool.checkpoint.draining import holders_in, needed_by
from tunetool.checkpoint.holders import HOLDERS, TOGETHER, files_of
from tunetool.checkpoint.markers import Marker
from tunetool.checkpoint.transfer import digest_of
from tunetool.errors import UsageProblem

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
Ask = Callable[..., Any]
RANKS = 3


def needed_of(step: Path, rank: int) -> list[str]:
    described = metadata.read(step)
    writers = {name: bulk.writer_of(name) for name in needed_by(described)}
    return files_of([rank], writers, holders_in(described))


@pytest.mark.parametrize("writer", ["ours", "unplanned", "torch", "torch's, planned"])
def test_a_rank_loads_from_the_files_that_it_needs(forks: Ask, tmp_path: Path, writer: str) -> None:
    step = tmp_path / "step"
    order = {"path": str(step), "meet": str(tmp_path / "a"), "seed": 5, "writer": writer}
    assert {answer["status"] for answer in forks(do="save_shards", world=RANKS, **{"with": order})} == {0}
    for rank in range(RANKS):
        node = tmp_path / f"node{rank}"
        node.mkdir()
        for name in [*needed_of(step, rank), ".metadata"]:
            shutil.copy(step / name, node / name)
    order = {"path": str(tmp_path / "node{rank}"), "meet": str(tmp_path / "b"), "seed": 5}
    answers = forks(do="load_shards", world=RANKS, **{"with": order})
    assert [answer["value"] for answer in answers] == [{"wrong": [], "step": 5, "unverified": []}] * RANKS
    if not writer.startswith("torch"):
        # What one rank alone holds is on its own node.
        alone = {name for name in needed_of(step, 0) if bulk.writer_of(name) == 0} - {*needed_of(step, 1)}
        assert sum((step / name).stat().st_size for name in alone) > 200_000
        assert sum((step / name).stat().st_size for name in {*needed_of(step, 0)} - alone) < 50_000


def test_a_planner_that_caches_tells_who_holds_an_item_now(forks: Ask, tmp_path: Path) -> None:
    order = {"path": str(tmp_path), "meet": str(tmp_path / "a")}
    assert {answer["status"] for answer in forks(do="save_held_by_more", world=RANKS, **{"with": order})} == {0}
    for number in range(3):
        described = metadata.read(tmp_path / f"step_{number}")
        (its,) = {stored.relative_path for at, stored in described.storage_data.items() if at.fqn == "same"}
        assert holders_in(described)[its] == ("0-2" if number else "0,1")


def test_a_fetched_part_has_all_that_its_ranks_need(forks: Ask, tmp_path: Path, run: Ask) -> None:
    step = tmp_path / "drained/step_5"
    order = {"path": str(step), "meet": str(tmp_path / "a"), "seed": 5, "writer": "ours"}
    assert {answer["status"] for answer in forks(do="save_shards", world=RANKS, **{"with": order})} == {0}
    files = {path.name: digest_of(path) for path in step.glob("*.distcp")}
    hosts = {name: f"node{bulk.writer_of(name)}" for name in files}
    markers.write(step, step.name, Marker(markers.digest_of_metadata(step), files, hosts))
    brought = tmp_path / "scratch/step_5"
    brought.parent.mkdir()
    assert run("fetch", brought, "--from", step.parent, "--host", "node1")[0] == 0
    assert {path.name for path in brought.glob("*.distcp")} == {*needed_of(step, 1)}


def test_one_rank_names_no_holders(tmp_path: Path) -> None:
    state = {"weight": torch.ones(5), "step": 3}
    dcp.save(state, storage_writer=DirectWriter(tmp_path), planner=DirectSavePlanner())
    assert not hasattr(metadata.read(tmp_path), HOLDERS)
    assert len([*tmp_path.glob("*.distcp")]) == 1


@pytest.mark.parametrize(
    ("attribute", "held"),
    [
        *(
            (HOLDERS, held)
            for held in (5, {"__0_0.distcp": 1}, {"__0_0.distcp": "all"}, {3: "*"}, {"__0_0.distcp": ""})
        ),
        *((TOGETHER, held) for held in (5, {"weight": 1}, ["weight", 1])),
    ],
)
def test_a_table_of_ranks_that_is_none_is_refused(tmp_path: Path, attribute: str, held: Any) -> None:
    dcp.save({"weight": torch.ones(5)}, storage_writer=DirectWriter(tmp_path))
    described = metadata.read(tmp_path)
    setattr(described, attribute, held)
    with pytest.raises(UsageProblem, match=r"table of ranks|what ranks hold together"):
        metadata.dumps(described, tmp_path / ".metadata")


def test_torch_reads_a_save_that_names_holders(forks: Ask, tmp_path: Path) -> None:
    order = {"path": str(tmp_path / "step"), "meet": str(tmp_path / "a"), "seed": 7, "writer": "ours"}
    assert {answer["status"] for answer in forks(do="save_shards", world=RANKS, **{"with": order})} == {0}
    states: list[dict[str, Any]] = []
    for reader in (dcp.FileSystemReader(tmp_path / "step"), DirectReader(tmp_path / "step")):
        state = {"model": {"same": torch.zeros(300, 7), "few": torch.zeros(3, 5)}, "step": None}
        dcp.load(state, storage_reader=reader, no_dist=True)
        states.append(state)
    assert [state["step"] for state in states] == [7, 7]
    assert all(torch.equal(states[0]["model"][name], states[1]["model"][name]) for name in ("same", "few"))
