"""From which step ranks resume where each node has its own files, and what is brought from which node. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("xxhash")

from tunetool.checkpoint.agreement import Agreement, Failures, StepCopy, Survey, agree
from tunetool.checkpoint.identity import Identity
from tunetool.checkpoint.transfer import CopiedFile
from tunetool.errors import CannotJudge

ROOT = "/scratch"
NAMES = ("__0_0.00ab.distcp", "__1_0.00ab.distcp")
TORCH_S = ("__0_0.distcp", "__1_0.distcp")
MIB = 2**20


def files(*names: str, mtime: int = 1, size: int = MIB) -> dict[str, Identity]:
    return {name: Identity(1, size, mtime, mtime) for name in names}


def step(number: int, held: Mapping[str, Identity], *, metadata: bool = False, **fields: Any) -> StepCopy:
    """A step of a node's scratch, which has some of its files."""
    known = {"digest": f"d{number}", "is_distinct": True, "needed": dict.fromkeys(NAMES, MIB), "has_sums": True}
    of_save = known if metadata else {}
    problem = "`.metadata`: No such file or directory"
    return StepCopy(number, f"{ROOT}/step_{number}", **{"problem": problem, "files": held, **of_save, **fields})


def replica(host: str, number: int, held: Mapping[str, Identity], **fields: Any) -> StepCopy:
    filed = {name: CopiedFile(file.size, f"sum of {name}") for name, file in held.items()}
    made = step(number, held, metadata=True, problem=None, filed=filed, replica_of=host, **fields)
    return replace(made, path=f"{ROOT}/.replicas/{host}/step_{number}")


def survey(rank: int, host: str, *copies: StepCopy) -> Survey:
    return Survey(rank, host, copies, 100, ROOT)


def brought(agreement: Agreement | None) -> dict[str, dict[str, list[str]]]:
    """What each node gets, by the directory from which it comes."""
    assert agreement is not None
    return {
        host: {f"{node}:{path.removeprefix(ROOT)}": sorted(names) for (node, path), names in sources.items()}
        for (host, _), sources in agreement.missing.items()
    }


def test_ranks_that_stay_get_the_metadata_alone() -> None:
    first = survey(0, "a", step(7, files(NAMES[0]), metadata=True))
    second = survey(1, "b", step(7, files(NAMES[1])))
    agreed = agree([first, second])
    assert agreed is not None
    assert agreed.paths == {0: "/scratch/step_7", 1: "/scratch/step_7"}
    assert brought(agreed) == {"b": {"a:/step_7": [".metadata"]}}
    # It has been brought.
    held = survey(1, "b", step(7, files(NAMES[1]), metadata=True))
    assert brought(agree([first, held])) == {}


def test_a_lost_nodes_files_come_from_its_replica() -> None:
    kept = replica("a", 7, files(NAMES[0]))
    agreed = agree([survey(0, "new"), survey(1, "b", step(7, files(NAMES[1])), kept)])
    both = "b:/.replicas/a/step_7"
    assert brought(agreed) == {"new": {both: [".metadata", NAMES[0]]}, "b": {both: [".metadata"]}}
    assert agreed is not None
    assert agreed.missing["new", ROOT]["b", kept.path][NAMES[0]] == kept.filed[NAMES[0]]


def test_ranks_in_another_order_exchange_their_files() -> None:
    coordinator = step(7, files(NAMES[0]), metadata=True)
    agreed = agree([survey(0, "b", step(7, files(NAMES[1]))), survey(1, "a", coordinator)])
    assert brought(agreed) == {
        "b": {"a:/step_7": [".metadata", NAMES[0]]},
        "a": {"b:/step_7": [NAMES[1]]},
    }
    # A replica on the node itself is nearer.
    near = survey(0, "b", step(7, files(NAMES[1])), replica("a", 7, files(NAMES[0])))
    assert brought(agree([near, survey(1, "a", coordinator)]))["b"] == {
        "b:/.replicas/a/step_7": [".metadata", NAMES[0]]
    }


def test_one_rank_of_a_node_lists_files_and_all_get_theirs() -> None:
    names = tuple(f"__{rank}_0.00ab.distcp" for rank in range(4))
    needed = dict.fromkeys(names, MIB)
    first, second = step(7, files(*names[:2]), metadata=True, needed=needed), step(7, files(*names[2:]))
    # The others see their directories, and say only whether they are whole.
    seen = {"needed": {}, "files": {}, "has_sums": False, "is_distinct": False}
    there = [
        survey(0, "a", first),
        survey(1, "a", replace(first, **seen)),
        survey(2, "b", second),
        survey(3, "b", replace(second, **seen)),
    ]
    agreed = agree(there)
    assert brought(agreed) == {"b": {"a:/step_7": [".metadata"]}}
    kept = replica("b", 7, files(*names[2:]), needed=needed)
    lost = [survey(0, "a", first, kept), there[1], survey(2, "new"), survey(3, "new")]
    assert brought(agree(lost)) == {"new": {"a:/.replicas/b/step_7": [".metadata", *names[2:]]}}
    # Ranks that change their places leave some files behind.
    mixed = [there[0], survey(1, "b", second), survey(2, "a", replace(first, **seen)), survey(3, "b")]
    assert brought(agree(mixed)) == {
        "a": {"b:/step_7": [names[2]]},
        "b": {"a:/step_7": [".metadata", names[1]]},
    }


def test_a_rank_also_gets_what_it_holds_and_another_wrote() -> None:
    shared = ("__0_1.00ab.distcp", "__1_1.00ab.distcp")
    needed, held = dict.fromkeys([*NAMES, *shared], MIB), {shared[0]: "*", shared[1]: "1"}
    first = step(7, files(NAMES[0], shared[0]), metadata=True, needed=needed, holders=held)
    second = step(7, files(NAMES[1], shared[1]), metadata=True, needed=needed, holders=held)
    agreed = agree([survey(0, "a", first), survey(1, "b", second)])
    assert brought(agreed) == {"b": {"a:/step_7": [shared[0]]}}
    # Both are lost, and each has the replica of the other: all ranks need the files of rank 0.
    kept = {"needed": needed, "holders": held}
    lost = [
        survey(0, "a", replica("b", 7, files(NAMES[1], shared[1]), **kept)),
        survey(1, "b", replica("a", 7, files(NAMES[0], shared[0]), **kept)),
    ]
    comes = brought(agree(lost))
    assert comes["a"]["b:/.replicas/a/step_7"][-2:] == [NAMES[0], shared[0]]
    assert {name for names in comes["b"].values() for name in names} == {".metadata", NAMES[1], *shared}


def test_a_job_of_another_size_gets_all_files_everywhere() -> None:
    held = step(7, files(*NAMES), metadata=True, problem=None)
    agreed = agree([survey(0, "a", held), survey(1, "b"), survey(2, "b")])
    assert brought(agreed) == {"b": {"a:/step_7": [".metadata", *NAMES]}}


def test_ranks_that_only_hold_count_in_the_size_of_a_job() -> None:
    held = step(7, files(*NAMES), metadata=True, problem=None, holders={NAMES[0]: "0,2", NAMES[1]: "1-3:2"})
    assert brought(agree([survey(0, "a", held), survey(1, "b")])) == {"b": {"a:/step_7": [".metadata", *NAMES]}}
    four = [survey(0, "a", held), survey(1, "b"), survey(2, "c"), survey(3, "d")]
    assert brought(agree(four)) == {
        node: {"a:/step_7": [".metadata", NAMES[number]]} for node, number in (("b", 1), ("c", 0), ("d", 1))
    }


def test_a_file_that_is_cut_short_is_brought() -> None:
    short = survey(0, "a", step(7, files(NAMES[0], size=MIB - 1), metadata=True))
    other = survey(1, "b", step(7, files(NAMES[1])), replica("a", 7, files(NAMES[0])))
    assert brought(agree([short, other]))["a"] == {"b:/.replicas/a/step_7": [NAMES[0]]}


def of_torch(copy: StepCopy) -> StepCopy:
    """The same of a save without checksums, whose files have the names of every save."""
    return replace(copy, needed=dict.fromkeys(TORCH_S, MIB) if copy.needed else {}, has_sums=False)


@pytest.mark.parametrize(
    ("held", "comes"),
    [
        (files(TORCH_S[1]), {"a:/step_7": [".metadata"]}),
        # Saved again since, or by another save of that step.
        (files(TORCH_S[1], mtime=2), {"a:/.replicas/b/step_7": [".metadata", TORCH_S[1]]}),
        ({}, {"a:/.replicas/b/step_7": [".metadata", TORCH_S[1]]}),
    ],
)
def test_a_file_of_an_unknown_save_is_not_used(held: Mapping[str, Identity], comes: dict[str, list[str]]) -> None:
    kept = of_torch(replica("b", 7, files(TORCH_S[1])))
    first = survey(0, "a", of_torch(step(7, files(TORCH_S[0]), metadata=True)), kept)
    second = survey(1, "b", step(7, held))
    assert brought(agree([first, second]))["b"] == comes
    # Without a replica nothing says of which save it is.
    with pytest.raises(CannotJudge, match=f"`b` needs shard `{TORCH_S[1]}` of rank 1, and no node of the job has it"):
        agree([replace(first, copies=first.copies[:1]), second])
    # But the note that a replication left beside it does.
    if held:
        noted = survey(1, "b", step(7, held, files_digest="d7"))
        assert brought(agree([replace(first, copies=first.copies[:1]), noted]))["b"] == {"a:/step_7": [".metadata"]}


def test_a_damaged_replica_still_says_what_was_saved() -> None:
    # The coordinator's file was overwritten since, beside the old `.metadata`.
    overwritten = of_torch(step(7, files(TORCH_S[0], mtime=2), metadata=True))
    kept = of_torch(replica("a", 7, files(TORCH_S[0])))
    own = step(7, files(TORCH_S[1]))
    surveys = [survey(0, "a", overwritten), survey(1, "b", own, kept, of_torch(replica("b", 7, files(TORCH_S[1]))))]
    assert brought(agree(surveys))["a"] == {"b:/.replicas/a/step_7": [TORCH_S[0]]}
    with pytest.raises(CannotJudge, match=f"`a` needs shard `{TORCH_S[0]}` of rank 0"):
        agree(surveys, Failures({("b", kept.path): "it rotted"}))


def test_a_file_without_checksums_does_not_travel() -> None:
    first = survey(0, "b", step(7, files(TORCH_S[1])))
    second = survey(1, "a", of_torch(step(7, files(*TORCH_S), metadata=True)))
    with pytest.raises(CannotJudge, match=f"`b` needs shard `{TORCH_S[0]}` of rank 0"):
        agree([first, second])
    # A replication made some, and noted them.
    noted = {TORCH_S[0]: CopiedFile(MIB, "sum")}
    other = survey(1, "a", replace(second.copies[0], files_digest="d7", filed=noted))
    assert brought(agree([first, other]))["b"] == {"a:/step_7": [".metadata", TORCH_S[0]]}
    stale = survey(1, "a", replace(step(7, files(*TORCH_S)), files_digest="d6", filed=noted), second.copies[0])
    with pytest.raises(CannotJudge, match=f"`b` needs shard `{TORCH_S[0]}` of rank 0"):
        agree([first, stale])


def test_metadata_that_two_saves_can_share_tells_nothing() -> None:
    # Of torch's writer, before it gave each save a token.
    kept = replica("a", 7, files(NAMES[0]), is_distinct=False)
    with pytest.raises(CannotJudge, match="step 7: rank 0 on `new`: it is not there"):
        agree([survey(0, "new"), survey(1, "b", step(7, files(NAMES[1])), kept)])


def test_a_stale_replica_is_passed_over() -> None:
    # An older save of the same step: its files are others.
    stale = replace(replica("a", 7, files("__0_0.00aa.distcp")), digest="stale")
    stale = replace(stale, needed=dict.fromkeys(["__0_0.00aa.distcp", "__1_0.00aa.distcp"], MIB), written_ns=1)
    first, second = step(7, files(NAMES[0]), metadata=True, written_ns=2), step(7, files(NAMES[1]))
    assert brought(agree([survey(0, "a", first), survey(1, "b", second, stale)])) == {"b": {"a:/step_7": [".metadata"]}}
    with pytest.raises(CannotJudge, match=r"step 7: `b` needs shard `__1_0.00aa.distcp`|step 7: `new` needs"):
        agree([survey(0, "new"), survey(1, "b", second, stale)])


def test_where_nothing_can_be_taken_the_next_one_is_chosen() -> None:
    old, new = replica("a", 6, files(NAMES[0]), written_ns=1), replica("a", 7, files(NAMES[0]), written_ns=2)
    own = [step(number, files(NAMES[1])) for number in (6, 7)]
    surveys = [survey(0, "new"), survey(1, "b", *own, old, new)]
    failed = {("b", new.path): "`weight` is damaged"}
    agreed = agree(surveys, Failures(failed))
    assert agreed is not None
    assert agreed.step == 6
    (reason,) = agreed.skipped
    assert reason.startswith("step 7: ")
    assert reason.endswith("; replica of `a` on `b`: `weight` is damaged")
    # Another source of the same step comes first.
    third = survey(2, "c", step(7, files(NAMES[0])), step(7, {}, metadata=True))
    more = agree([*surveys[:1], replace(surveys[1], copies=(*own, old, new)), third], Failures(failed))
    assert more is not None
    assert more.step == 7
    with pytest.raises(CannotJudge, match="replica of `a` on `b`: `weight` is damaged"):
        agree(surveys, Failures({**failed, ("b", old.path): "it is gone"}))


def test_a_directory_that_gives_one_node_nothing_counts_at_home() -> None:
    first, second = survey(0, "a", step(7, {})), survey(1, "b", step(7, files(*NAMES), metadata=True))
    third = survey(2, "c", replica("a", 7, files(NAMES[0])))
    wide = {"needed": dict.fromkeys([*NAMES, "__2_0.00ab.distcp"], MIB)}
    surveys = [
        first,
        replace(second, copies=(replace(second.copies[0], **wide),)),
        replace(third, copies=(replace(third.copies[0], **wide), step(7, files("__2_0.00ab.distcp"), metadata=True))),
    ]
    assert brought(agree(surveys)) == {"a": {"b:/step_7": [".metadata", NAMES[0]]}}
    refused = {("a", ("b", "/scratch/step_7")): "ssh ends"}
    # Another source for it, and nothing is brought to the node that gave nothing.
    assert brought(agree(surveys, Failures(refused=refused))) == {
        "a": {"c:/.replicas/a/step_7": [".metadata", NAMES[0]]}
    }
    refused["a", ("c", "/scratch/.replicas/a/step_7")] = "c is off"
    with pytest.raises(CannotJudge) as lost:
        agree(surveys, Failures(refused=refused))
    assert f"`a` needs shard `{NAMES[0]}` of rank 0" in lost.value.message
    assert "`/scratch/step_7` on `b`, for `a`: ssh ends; replica of `a` on `c`, for `a`: c is off" in lost.value.message
    # Wrong bytes are wrong at home, too.
    with pytest.raises(CannotJudge, match=f"`b` needs shard `{NAMES[1]}` of rank 1"):
        agree([surveys[1], first, surveys[2]], Failures({("b", "/scratch/step_7"): "it rotted"}))


def test_a_directory_that_refuses_one_node_gives_to_another() -> None:
    wide = {"needed": dict.fromkeys([*NAMES, "__2_0.00ab.distcp"], MIB)}
    held = step(7, files(*wide["needed"]), metadata=True, **wide)
    surveys = [survey(0, "a"), survey(1, "b", held), survey(2, "c"), survey(3, "d")]
    kept = replace(replica("b", 7, files(*wide["needed"])), **wide)
    refused = {("a", ("b", held.path)): "ssh ends"}
    agreed = agree([*surveys[:3], survey(3, "d", kept)], Failures(refused=refused))
    assert {host: list(sources) for host, sources in brought(agreed).items()} == {
        "a": ["d:/.replicas/b/step_7"],
        "c": ["b:/step_7"],
        "d": ["d:/.replicas/b/step_7"],
    }


def test_a_node_that_cannot_take_a_step_has_the_one_before() -> None:
    saves = [replica("a", number, files(NAMES[0]), written_ns=number) for number in (6, 7)]
    held = step(6, files(NAMES[0]), metadata=True, problem=None, written_ns=6)
    own = [step(number, files(NAMES[1]), metadata=True) for number in (6, 7)]
    surveys = [survey(0, "a", replace(held, needed=dict.fromkeys(NAMES, MIB))), survey(1, "b", *own, *saves)]
    unable = {(("a", ROOT), 7, "d7"): "`/scratch`: No space left on device"}
    agreed = agree(surveys, Failures(unable=unable))
    assert agreed is not None
    assert (agreed.step, agreed.missing) == (6, {})
    assert agreed.skipped == ("step 7: `a` cannot take what it lacks: `/scratch`: No space left on device",)
    # Nor has it any other, and nothing is said against the node that would have given it.
    with pytest.raises(CannotJudge) as lost:
        agree([survey(0, "a"), surveys[1]], Failures(unable={**unable, (("a", ROOT), 6, "d6"): "it is full"}))
    assert "`a` cannot take what it lacks: it is full" in lost.value.message
    assert "replica" not in lost.value.message
    # What it has needs no room.
    whole = step(7, files(NAMES[0]), metadata=True)
    assert brought(agree([survey(0, "a", whole), surveys[1]], Failures(unable=unable))) == {}


def test_files_go_to_the_name_that_the_step_has_there() -> None:
    other = replace(step(7, {}, metadata=True, digest="another save"), path=f"{ROOT}/step-7", needed={})
    agreed = agree(
        [survey(0, "new", other), survey(1, "b", step(7, files(NAMES[1])), replica("a", 7, files(NAMES[0])))]
    )
    assert agreed is not None
    assert agreed.paths == {0: f"{ROOT}/step-7", 1: f"{ROOT}/step_7"}


def test_a_whole_copy_for_every_rank_moves_nothing() -> None:
    on_bulk = StepCopy(7, "/bulk/step_7", "d7")
    agreed = agree([survey(0, "new", on_bulk), survey(1, "b", replica("a", 7, files(NAMES[0])), on_bulk)])
    assert agreed is not None
    assert (agreed.paths, brought(agreed)) == ({0: "/bulk/step_7", 1: "/bulk/step_7"}, {})
