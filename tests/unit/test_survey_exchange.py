"""What ranks send each other before they agree on a step. Without torch."""

from __future__ import annotations

import pickle

import pytest

pytest.importorskip("xxhash")

from tunetool.checkpoint.agreement import StepCopy, Survey
from tunetool.checkpoint.identity import Identity
from tunetool.checkpoint.survey_exchange import Tables, packed, unpacked
from tunetool.checkpoint.transfer import CopiedFile

NOW = 1_800_000_000 * 10**9
RANKS = 1024


def survey(node: int, *, world: int = RANKS, steps: int = 10) -> Survey:
    """That of a node with eight ranks: it has its files, the replica of another node, and shared storage."""

    def copy(step: int, path: str, ranks: range, replica_of: str | None = None) -> StepCopy:
        names = [f"__{rank}_0.{step:016x}.distcp" for rank in range(world)]
        identities = {names[rank]: Identity(rank, 2**33 + rank, NOW + rank, NOW + rank + step) for rank in ranks}
        filed = {name: CopiedFile(file.size, f"{file.size:016x}") for name, file in identities.items()}
        problem = None if len(ranks) == world else f"shard `{names[0]}` of rank 0 is missing in `{path}`, and 1015 more"
        return StepCopy(
            step,
            path,
            f"{step:016x}",
            problem,
            written_ns=NOW,
            world=world,
            needed={name: 2**33 + number for number, name in enumerate(names)},
            is_distinct=True,
            has_sums=True,
            files=identities,
            filed=filed if replica_of else {},
            replica_of=replica_of,
        )

    scratch, first, nodes = "/mnt/nvme_raid0/run7", 8 * node, world // 8
    own = [copy(step, f"{scratch}/step_{step}", range(first, first + 8)) for step in range(steps)]
    other = (node + 1) % nodes
    kept = [
        copy(step, f"{scratch}/.replicas/node{other}/step_{step}", range(8 * other, 8 * other + 8), f"node{other}")
        for step in range(steps)
    ]
    drained = [copy(step, f"/bulk/run7/step_{step}", range(world)) for step in range(steps)]
    return Survey(first, f"node{node}", (*own, *kept, *drained), NOW, scratch)


def test_what_1024_ranks_send_each_other_is_small() -> None:
    seen = survey(5)
    light, tables = packed(seen)
    assert len(pickle.dumps(seen)) > 1_000_000
    assert len(pickle.dumps(light)) < 50_000
    # Once for a save, however many directories have it, and its files on shared storage.
    assert len(tables) == 2 * 10


def test_every_rank_gets_all_tables_and_each_travels_once() -> None:
    seen = [survey(node, world=24, steps=2) for node in range(3)]
    seen.insert(1, Survey(1, "node0"))
    light, tables = zip(*map(packed, seen), strict=True)
    sent: list[tuple[int, Tables]] = []

    def send(giver: int, given: Tables) -> Tables:
        sent.append((giver, given))
        return given

    assert unpacked(light, tables[0], send) == seen
    assert [(giver, len(given)) for giver, given in sent] == [(0, 4)]
    # What only another rank has comes from that.
    alone = [Survey(0, "blank"), *seen[:2]]
    packs = [packed(each) for each in alone]
    assert unpacked([each for each, _ in packs], {}, lambda giver, _: packs[giver][1]) == alone


def test_short_tables_stay_in_the_survey() -> None:
    seen = survey(0, world=8)
    assert packed(seen) == (packed(seen)[0], {})
    assert packed(seen)[0].survey == seen
