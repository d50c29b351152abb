"""`bench staging`: the published table, the advice, the bytes that were read, and the way from samples to the report."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

import builders
from shown_records import on_screen
from staged import Quiet
from tunetool import record as records
from tunetool.bench.staging import figures, published
from tunetool.bench.staging.advice import Room, Times, advise
from tunetool.bench.staging.node_task import Answer, Task, give_back
from tunetool.bench.staging.published import Pair
from tunetool.bench.staging.reading import Read, explain
from tunetool.bench.staging.rounds import Rounds
from tunetool.bench.staging.samples import Row, Sample, Staged, compare_losses
from tunetool.bench.staging.scenarios import LeftOut, Planned, only_largest, parse, scale
from tunetool.errors import UsageProblem
from tunetool.report.page import WIDTH
from tunetool.stage.room import Limit
from tunetool.training.workload import Material, RankResult, Workload
from tunetool.verdict import judge

GB = 10**9
ROOM = Room(22 * GB, [Limit(90 * GB, "`/dev/shm` has"), Limit(150 * GB, "the machine's RAM has")])
TIMES = Times(20.0, Pair(7, 72), Pair(100, 180), Pair(100, 170), "measured", 10, bulk_rate=0.8e9)


def test_the_published_ratios_are_held_against_their_own_table() -> None:
    load, whole = published.remarks()
    assert "22 s against 21 s are 1.05x" in load
    assert "93 s against 6.5 s, would be 14.3x" in load
    assert "13.5x for the model load does not follow" in load
    assert "32% for the whole follows from its table (31.8% less time)" in whole


@pytest.mark.parametrize(
    ("times", "epoch"),
    [
        (TIMES, 1),
        (replace(TIMES, stage=200.0), 2),
        (replace(TIMES, stage=600.0), 8),
        # 145 s of 600 are gained at once; the other 455 at 70 s for each later epoch.
        (replace(TIMES, stage=600.0, later=Pair(100, 100)), None),
        # A gain of less than 5 % of an epoch cannot be distinguished from noise.
        (replace(TIMES, stage=600.0, later=Pair(100, 104)), None),
    ],
    ids=["in the first", "in the second", "in the eighth", "page cache", "noise"],
)
def test_the_epoch_in_which_staging_has_paid(times: Times, epoch: int | None) -> None:
    assert times.break_even() == epoch
    if epoch is None:
        return
    paid = times.total(epoch)
    assert paid.staged <= paid.bulk
    if epoch > 1:
        before = times.total(epoch - 1)
        assert before.staged > before.bulk


def test_stage_where_it_pays_within_the_run() -> None:
    advice = advise(ROOM, replace(TIMES, stage=200.0))
    assert (advice.stage, advice.break_even) == (True, 2)
    # 200 + 7 + 100 + 9 * 100 against 72 + 180 + 9 * 170
    assert "come back in epoch 2, and 10 epochs take 1207.0 s instead of 1782.0 s (32% less" in advice.sentence
    assert "22 GB" in advice.sentence
    assert "90 GB" in advice.sentence
    assert "0.8 GB/s" in advice.sentence


def test_too_large_for_memory_says_what_the_group_allows() -> None:
    group = "the memory limit of `/sys/fs/cgroup/job` leaves"
    advice = advise(Room(116 * GB, [Limit(60 * GB, group), Limit(100 * GB, "`/dev/shm` has")]), TIMES)
    assert advice.stage is False
    assert advice.sentence.startswith(
        "do not stage: 116 GB are needed, the memory limit of `/sys/fs/cgroup/job` leaves 60 GB, `/dev/shm` has 100 GB"
    )


@pytest.mark.parametrize(
    ("times", "words"),
    [
        (replace(TIMES, load=Pair(7.0, 7.1), first=Pair(100.0, 101.0)), "bulk storage is as fast here"),
        (replace(TIMES, stage=600.0, epochs=3), "do not stage for 3 epochs"),
        (replace(TIMES, stage=600.0, later=Pair(100, 100), later_from="page cache"), "since the page cache can hold"),
    ],
    ids=["as fast", "too short a run", "cache"],
)
def test_do_not_stage(times: Times, words: str) -> None:
    advice = advise(ROOM, times)
    assert advice.stage is False
    assert words in advice.sentence


def test_rounds_that_contradict_each_other_decide_nothing() -> None:
    advice = advise(ROOM, replace(TIMES, rounds=3, apart=False))
    assert advice.stage is None
    assert "use more `--rounds`" in advice.sentence
    assert "so chance is not excluded" in advise(ROOM, TIMES).sentence
    assert "so chance is not excluded" not in advise(ROOM, replace(TIMES, rounds=3)).sentence


def test_without_both_paths_nothing_is_advised() -> None:
    assert advise(ROOM, None).stage is None


def reads(model: list[int], storage: list[int], hosts: list[str]) -> list[Read]:
    return [
        Read(rank, host, mine * GB, from_storage * GB, GB, GB)
        for rank, (mine, from_storage, host) in enumerate(zip(model, storage, hosts, strict=True))
    ]


@pytest.mark.parametrize(
    ("model", "storage", "hosts", "finding", "words"),
    [
        (
            [16, 16],
            [16, 0],
            ["a", "a"],
            "refuted",
            "16 GB for the 32 GB that the 2 ranks of a node asked for: each byte came once",
        ),
        ([16, 16], [16, 16], ["a", "a"], "refuted", "the page cache that they share saved nothing"),
        ([16, 16], [16, 8], ["a", "a"], "refuted", "saved 25%"),
        ([16, 16], [16, 16], ["a", "b"], "refuted", "no rank shares a page cache"),
        (
            [4, 4, 4, 4],
            [4, 4, 4, 4],
            ["a", "a", "b", "b"],
            "confirmed",
            "each of 4 ranks read 4 GB of the model's 16 GB",
        ),
        ([16, 4], [16, 4], ["a", "a"], "partly", "4 GB to 16 GB"),
        ([16, 16], [0, 0], ["a", "a"], "refuted", "the cache was warm or this kernel does not count"),
        ([16], [16], ["a"], "undecided", "that needs two ranks"),
    ],
    ids=["cache", "no cache", "half", "two nodes", "sharded", "partly", "not counted", "one rank"],
)
def test_bytes_decide_what_narrows_the_gap(
    model: list[int], storage: list[int], hosts: list[str], finding: str, words: str
) -> None:
    explanation = explain(16 * GB, reads(model, storage, hosts))
    assert explanation.finding == finding
    assert words in explanation.sentence


def test_scenarios_are_scaled_to_what_there_is() -> None:
    assert parse("nodes, single") == ["single", "nodes"]
    with pytest.raises(UsageProblem, match="`two` is not a scenario"):
        parse("single,two")
    planned, left_out = scale(parse("single,node,nodes"), hosts=1, ranks_per_node=4, on_gpu=True)
    assert planned == [Planned("single", 1, 1), Planned("node", 1, 4)]
    assert [each.name for each in left_out] == ["nodes"]
    assert "-i INVENTORY" in left_out[0].reason
    planned, left_out = scale(parse("node,nodes"), hosts=2, ranks_per_node=1, on_gpu=True)
    assert planned == [Planned("nodes", 2, 1)]
    assert left_out == [LeftOut("node", "one GPU to a node, as in `single`: `--ranks-per-node` asks for more")]


def test_a_short_call_has_the_largest_scenario() -> None:
    largest, left_out = only_largest([Planned("single", 1, 1), Planned("node", 1, 4), Planned("nodes", 2, 4)])
    assert largest == [Planned("nodes", 2, 4)]
    assert [each.name for each in left_out] == ["single", "node"]
    assert all("`--thorough`" in each.reason for each in left_out)
    assert only_largest([Planned("single", 1, 1)]) == ([Planned("single", 1, 1)], [])


def result(rank: int, load: float, data: float, losses: list[float], storage: int, logical: int) -> RankResult:
    count = len(losses)
    return RankResult(
        rank=rank,
        host="n1",
        local_rank=rank,
        device="cpu",
        seconds={"model_load": load, "end_to_end": load + count * (data + 0.5) + 3},
        data_seconds=[data] * count,
        step_seconds=[0.5] * count,
        losses=losses,
        learning_rates=[1e-4] * count,
        tokens=100,
        images=2 * count,
        model_bytes=logical,
        read_bytes={
            "model": {"logical": logical, "storage": storage},
            # As if each picture were opened twice: asked for twice, fetched once.
            "data": {"logical": 2 * GB, "storage": GB if storage else 0},
        },
        parameters=10,
        trainable=1,
        versions={"torch": "2.13.0", "deepspeed": "0.19.8"},
        load_seconds=[data + 0.1] * count,
    )


LOSSES = [2.5, 2.25, 2.0, 1.75]


def sample(path: str, load: float, data: float, losses: list[float] = LOSSES, images: int = 8) -> Sample:
    storage = 0 if path == "memory" else GB
    return Sample(
        [result(0, load, data, losses, storage, GB)], images, 2, Staged(4.0, 2 * GB) if path == "memory" else None
    )


def test_the_spread_is_that_of_the_least_steady_rank() -> None:
    steady = sample("memory", 1, 1.0)
    assert steady.batch_spread is None
    steady.ranks[0].load_seconds[:] = [9.0] + [0.5] * 20
    assert steady.batch_spread == pytest.approx(1.0)
    uneven = replace(
        steady, ranks=[*steady.ranks, replace(steady.ranks[0], load_seconds=[0.1] + [1.0] * 18 + [3.0] * 2)]
    )
    assert uneven.batch_spread == pytest.approx(3.0)
    row = Row("single", 1, 1, GB, GB, samples={"memory": {0: steady}, "bulk": {0: uneven}})
    shown = {each.name: each for each in figures.measurements(row, {"memory": "tmpfs", "bulk": "disk"}, {})}
    assert shown["staging.single.memory.batch_spread"].value == pytest.approx(1.0)
    assert (shown["staging.single.bulk.batch_spread"].better, shown["staging.single.bulk.batch_spread"].unit) == (
        "lower",
        "1",
    )


def test_an_epoch_is_what_its_steps_took_or_a_multiple_of_them() -> None:
    whole = sample("bulk", 10, 2.0)
    assert (whole.steps_per_epoch, whole.extrapolated) == (4, False)
    assert whole.first_epoch == pytest.approx(4 * 2.5)
    part = sample("bulk", 10, 2.0, images=80)
    assert part.extrapolated
    assert part.first_epoch == pytest.approx(40 * 2.5)
    part.ranks[0].step_seconds[0] += 7.0
    assert part.first_step == pytest.approx(7.0)
    assert part.first_epoch == pytest.approx(40 * 2.5)
    assert part.fine_tune == pytest.approx(4 * 2.5 + 7.0)
    two = sample("bulk", 10, 2.0, images=4)
    assert two.later_epoch == pytest.approx(2 * 2.5)
    assert whole.later_epoch is None
    assert sample("memory", 1, 0.1).end_to_end == pytest.approx(1 + 4 * 0.6 + 3 + 4)


@pytest.mark.parametrize(
    ("losses", "status"),
    [
        (LOSSES, "pass"),
        ([2.5, 2.25, 2.0, 1.7501], "pass"),
        ([2.501, 2.25, 2.0, 1.75], "fail"),
        ([2.5, 2.25, 2.0, 1.5], "unknown"),
        (LOSSES[:3], "fail"),
        ([2.5, float("nan"), 2.0, 1.75], "fail"),
    ],
    ids=["equal", "rounding", "other data", "drifts in one round", "fewer steps", "no number"],
)
def test_both_paths_train_the_same_or_the_run_falls_short(losses: list[float], status: str) -> None:
    row = measured({"memory": sample("memory", 1, 0.1), "bulk": sample("bulk", 10, 2.0, losses)})
    (check,) = [each for each in figures.checks(row, bulk_in_memory=False) if each.id.endswith(".losses")]
    assert check.status == status
    verdict = judge(figures.case([row], figures.checks(row, bulk_in_memory=False)))
    assert verdict.status == {"unknown": "unproven"}.get(status, status)


DRIFTED = [2.5, 2.25, 2.0, 1.72]


@pytest.mark.parametrize(
    ("memory", "bulk", "status", "found"),
    [
        ([LOSSES, DRIFTED], [DRIFTED, LOSSES], "pass", "they differ by 0.017 at most (rounds of one path by 0.017)"),
        ([LOSSES, [2.5, 2.25, 1.0, 0.9]], [LOSSES, LOSSES], "unknown", "by 0.5 at most (rounds of one path by 0, of"),
        ([LOSSES, LOSSES[:3]], [[*LOSSES[:2], 1.0, 0.9], LOSSES[:3]], "unknown", "by 0.5 at most"),
        (
            [LOSSES, LOSSES],
            [DRIFTED, DRIFTED],
            "fail",
            "later ones: they differ by 0.017 at most (rounds of one path by 0)",
        ),
        ([LOSSES, [2.5, 2.25, 2.0, 1.0]], [LOSSES, [2.6, 2.25, 2.0, 1.0]], "fail", "the first differs by 0.038"),
        ([LOSSES, [2.5, float("nan"), 2.0, 1.75]], [LOSSES, LOSSES], "fail", "not a number"),
    ],
    ids=[
        "no more than its own rounds",
        "one path in one",
        "rounds of other steps",
        "each round alike",
        "other data in one",
        "no number in one",
    ],
)
def test_what_rounds_of_one_path_differ_by_is_no_difference(
    memory: list[list[float]], bulk: list[list[float]], status: str, found: str
) -> None:
    row = Row("single", 1, 1, GB, GB)
    row.samples["memory"].update({number: sample("memory", 1, 0.1, each) for number, each in enumerate(memory, 1)})
    row.samples["bulk"].update({number: sample("bulk", 10, 2.0, each) for number, each in enumerate(bulk, 1)})
    (check,) = [each for each in figures.checks(row, bulk_in_memory=False) if each.id.endswith(".losses")]
    assert (check.status, found in check.found) == (status, True), check


def test_an_overflow_in_one_round_excuses_no_difference() -> None:
    overflowed, wrong = [2.5, float("nan"), 2.0, 1.75], [2.5, 2.25, 2.0, 0.5]
    row = Row("single", 1, 1, GB, GB)
    for path, rounds in (("memory", [overflowed, wrong]), ("bulk", [overflowed, LOSSES])):
        for number, losses in enumerate(rounds, 1):
            made = sample(path, 1, 0.1, losses)
            ranks = [replace(each, precision="fp16", skipped_steps=[1] if number == 1 else []) for each in made.ranks]
            row.samples[path][number] = replace(made, ranks=ranks)
    (check,) = [each for each in figures.checks(row, bulk_in_memory=False) if each.id.endswith(".losses")]
    assert check.status == "unknown", check


def measured(samples: Mapping[str, Sample]) -> Row:
    row = Row("single", 1, 1, GB, GB)
    for path, each in samples.items():
        row.samples[path][1] = each  # type: ignore[index]
    return row


def test_a_warm_cache_proves_nothing() -> None:
    warm = replace(sample("bulk", 1, 0.1), ranks=[result(0, 1, 0.1, LOSSES, 0, GB)])
    row = measured({"memory": sample("memory", 1, 0.1), "bulk": warm})
    checks = figures.checks(row, bulk_in_memory=False)
    assert judge(figures.case([row], checks)).status == "unproven"
    assert judge(figures.case([row], figures.checks(row, bulk_in_memory=True))).status == "pass"


def test_a_failed_scenario_is_an_error_and_a_skipped_one_not() -> None:
    good = measured({"memory": sample("memory", 1, 0.1), "bulk": sample("bulk", 10, 2.0)})
    out = Row("nodes", 0, 0, GB, GB, left_out="one machine alone")
    failed = Row("node", 1, 2, GB, GB, failed="rank 1 was killed by SIGKILL")
    for rows, status in (([good, out], "pass"), ([good, out, failed], "error"), ([out], "unproven")):
        checks = [check for row in rows for check in figures.checks(row, bulk_in_memory=False)]
        assert judge(figures.case(rows, checks)).status == status


def test_the_report_has_the_published_table_beside_ours() -> None:
    row = measured({"memory": sample("memory", 1, 0.1), "bulk": sample("bulk", 10, 2.0)})
    out = Row("nodes", 0, 0, GB, GB, left_out="only one machine: add more nodes with `-i INVENTORY`")
    conditions = {"model": "tiny", "zero_stage": 2}
    media = {"memory": "tmpfs", "bulk": "disk"}
    checks = [check for each in (row, out) for check in figures.checks(each, bulk_in_memory=False)]
    checks += figures.advice_checks({"single": advise(ROOM, TIMES)})
    record = builders.record(
        *figures.measurements(row, media, conditions),
        kind="bench.staging",
        target="`/dev/shm` against `/bulk`",
        checks=checks,
        verdict=judge(figures.case([row, out], checks)),
    )
    record = records.parse(records.dumps(record), "it")
    shown = on_screen(record, Path("/runs/record.json"))
    assert all(len(line) <= WIDTH for line in shown.splitlines()), shown
    lines = {" ".join(line.split()) for line in shown.splitlines()}
    assert "Model load time 6.77 s 72.05 s 1.00 s 10.00 s 10.00" in lines
    assert "single GPU 6.77 / 72.05 10.64 1.00 s / 10.00 s 10.00 10.40 s / 23.00 s 2.21" in lines
    assert "many nodes 21 / 22 1.05 - - - -" in lines
    words = " ".join(shown.split())
    assert "many nodes: left out, only one machine" in words
    assert "13.5x for the model load does not follow from its own table" in words
    assert "losses: PASS, equal to the last bit, over 4 steps" in words
    assert "stage: 22 GB fit" in words
    assert words.endswith("PASS")


def test_a_kernel_that_counts_nothing_makes_no_shard() -> None:
    uncounted = replace(result(0, 1, 0.1, LOSSES, 0, GB), read_bytes={})
    (read,) = Sample([uncounted], 8, 2).reads()
    assert (read.model, read.model_storage, read.data) == (GB, 0, 0)


def test_rounds_without_both_paths_compare_nothing() -> None:
    assert compare_losses(measured({"memory": sample("memory", 1, 0.1)})) is None


class Interrupting:
    """Nodes whose eviction is interrupted, as by Ctrl-C in the middle of it."""

    def __init__(self, times: int) -> None:
        self.times, self.asked = times, 0

    def ask(self, task: Task, what: str, count: int | None = None) -> list[Answer]:
        self.asked += 1
        if self.asked <= self.times:
            raise KeyboardInterrupt
        give_back(Path(task.directory))
        return []


@pytest.mark.parametrize("times", [0, 1, 2])
def test_ctrl_c_while_memory_is_given_back_ends_it_afterwards(tmp_path: Path, times: int) -> None:
    staged = tmp_path / "staged"
    (staged / "model" / "sub").mkdir(parents=True)
    (staged / "model" / "sub" / "file").write_bytes(b"x")
    (staged / "model" / "link").symlink_to("sub")
    (staged / "model" / "sub").chmod(0o500)
    nodes = Interrupting(times)
    rounds = Rounds(
        nodes=nodes,  # type: ignore[arg-type]
        workload=Workload("m", "d"),
        images=8,
        model_bytes=GB,
        memory=tmp_path,
        directory=staged,
        seed=0,
        progress=Quiet(),
        rows=[],
        planned=[],
    )
    task = Task("stage", Material("m", Path("d")), str(tmp_path), str(staged))
    with pytest.raises(KeyboardInterrupt) if times else contextlib.nullcontext():
        rounds._evict(task, Planned("single", 1, 1), "round 1")
    assert not staged.exists()
    assert nodes.asked == times + 1
