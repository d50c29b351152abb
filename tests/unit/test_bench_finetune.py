"""The pure parts of `bench finetune`: the ranks' workload, the verdict on their results, and the report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result

from builders import record
from shown_records import on_screen
from tunetool import record as records
from tunetool.bench.finetune import figures
from tunetool.bench.finetune.view import Shares, binds, shares
from tunetool.bench.finetune.view import figures as by_name
from tunetool.cli.main import cli
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.launch.job import Host, Job
from tunetool.launch.local import RankFailed
from tunetool.measure.process_reads import Read, reads
from tunetool.record import Record
from tunetool.training.cluster import ranks_per_host
from tunetool.training.data import batches
from tunetool.training.preflight import need_memory
from tunetool.training.preparation import Ready, gpus
from tunetool.training.rank.gpu_reading import Gpu
from tunetool.training.rank.recorder import Recorder, keep_error, keep_result
from tunetool.training.run_workload import explained
from tunetool.training.workload import (
    Cluster,
    Material,
    RankResult,
    Workload,
    as_environment,
    read_result,
    workload_from_json,
)
from tunetool.verdict import exit_code, judge

MODEL = 16 * 10**9
WORKLOAD = Workload("/mnt/model", "/mnt/data")
READY = Ready("node1", "/mnt/model", "/mnt/data", MODEL, "md RAID0 (8 x nvme)", "md RAID0 (8 x nvme)", False, 2)


def result(rank: int = 0, **changed: object) -> RankResult:
    plain = RankResult(
        rank=rank,
        host="node1",
        local_rank=rank,
        device="cpu",
        seconds={
            "rendezvous": 2.0,
            "imports": 3.0,
            "communicator": 0.5,
            "model_load": 8.0,
            "engine": 1.0,
            "first_batch": 0.4,
            "end_to_end": 40.0,
        },
        data_seconds=[0.4, *[0.1] * 9],
        step_seconds=[5.0, *[1.9] * 9],
        losses=[5.0 - 0.4 * step for step in range(10)],
        learning_rates=[1e-4] * 10,
        tokens=20_000,
        images=20,
        model_bytes=MODEL,
        read_bytes={"model": {"storage": MODEL, "logical": MODEL}, "data": {"storage": 0, "logical": 10**8}},
        parameters=8_000_000_000,
        trainable=20_000_000,
        versions={"torch": "2.13", "deepspeed": "0.19.8"},
        load_seconds=[0.3] * 10,
    )
    return replace(plain, **changed)  # type: ignore[arg-type]


def run(*results: RankResult, workload: Workload = WORKLOAD, ready: tuple[Ready, ...] = (READY,)) -> figures.Run:
    return figures.Run(workload, ready, results or (result(),), "local")


def judged(finished: figures.Run, errors: tuple[str, ...] = ()) -> records.Verdict:
    return judge(replace(figures.case(finished), errors=errors))


def record_of(finished: figures.Run) -> Record:
    kept = figures.measurements(finished)
    return record(*kept, kind="bench.finetune", checks=figures.checks(finished), verdict=judged(finished))


def test_what_a_rank_is_told_arrives_as_it_was() -> None:
    workload = Workload("/m", "/d", zero_stage=3, steps=7, checkpoint="/c", curves=None, full=True, device="cuda")
    assert workload_from_json(workload.to_json()) == workload


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"zero_stage": 4}, "ZeRO stage"),
        ({"steps": 0}, "`steps`"),
        ({"batch_size": 0}, "`batch_size`"),
        ({"workers": -1}, "`workers`"),
        ({"learning_rate": 0.0}, "`learning_rate`"),
        ({"curves": 0.0}, "`curves`"),
    ],
)
def test_what_cannot_be_done_is_no_workload(changed: dict[str, object], said: str) -> None:
    with pytest.raises(UsageProblem, match=said):
        replace(WORKLOAD, **changed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["", "{}", '{"model": "m", "dataset": "d", "epoch": 2}', '{"model": 1, "dataset": "d"}']
)
def test_a_word_that_no_rank_knows_is_refused(text: str) -> None:
    with pytest.raises(UsageProblem):
        workload_from_json(text)


def test_processors_that_trap_on_amx_are_spared_by_default() -> None:
    assert as_environment(WORKLOAD, {})["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE"
    assert as_environment(WORKLOAD, {"ONEDNN_MAX_CPU_ISA": "AVX2"})["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    assert "ONEDNN_MAX_CPU_ISA" not in as_environment(replace(WORKLOAD, device="cuda"), {})


def test_a_missing_result_names_its_rank(tmp_path: Path) -> None:
    directory = tmp_path / "rank-3"
    directory.mkdir()
    keep_result(directory, result(3))
    assert read_result(tmp_path, 3) == result(3)
    assert [path.name for path in directory.iterdir()] == ["result.json"]
    with pytest.raises(CannotJudge, match="rank 4 left no result"):
        read_result(tmp_path, 4)
    (directory / "result.json").write_text("{}")
    with pytest.raises(CannotJudge, match="is not a valid result"):
        read_result(tmp_path, 3)


def test_a_rank_that_said_why_it_ends_is_quoted(tmp_path: Path) -> None:
    died = RankFailed("rank 0 ended with exit status 3: error", None, 0, "raw")
    job = Job((), 1, {}, tmp_path, [Host("node1", "10.0.0.1"), Host("node2", "10.0.0.2")])
    assert explained(died, job) is died
    (tmp_path / "rank-1").mkdir()
    keep_error(tmp_path / "rank-1", CannotJudge("`a.jpg` cannot be read", "copy it again"))
    error = explained(died, job)
    assert isinstance(error, RankFailed)
    assert (error.message, error.hint, error.rank) == ("rank 1 on `node2`: `a.jpg` cannot be read", "copy it again", 1)
    (tmp_path / "rank-0").mkdir()
    keep_error(tmp_path / "rank-0", UsageProblem("`lora` is wrong", "mend it"))
    assert isinstance(explained(died, job), UsageProblem), "what the first to fail said goes first"


def test_an_illegal_instruction_has_its_hint(tmp_path: Path) -> None:
    error = explained(RankFailed("rank 0 was ended by SIGILL: no message", "other", 0), Job((), 1, {}, tmp_path))
    assert error.hint is not None
    assert "ONEDNN_MAX_CPU_ISA" in error.hint


def test_bytes_read_are_counted_by_the_kernel(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(b"x" * 300_000)
    before = reads()
    assert len(file.read_bytes()) == 300_000
    assert 300_000 <= reads().since(before).logical < 400_000
    assert reads(str(tmp_path / "none")) == Read(), "a kernel that does not count"


def test_a_recorder_adds_up(tmp_path: Path) -> None:
    beats: list[int] = []
    points: list[tuple[str, float, int, str, float | None]] = []
    recorder = Recorder(0, 0, 1, None, beat=lambda: beats.append(1))
    recorder.scalars = lambda *point: points.append(point)
    with recorder.phase("imports"):
        pass
    with recorder.phase("imports"), recorder.reading("model"):
        (tmp_path / "a").write_text("x" * 5000)
        (tmp_path / "a").read_text()
    recorder.step(0.5, 0.4, 1.0, 3.0, 1e-4, 100, 2)
    recorder.step(0.1, 0.4, 0.9, 2.0, 1e-5, 100, 2)
    figures_of_rank = recorder.result()
    assert figures_of_rank.seconds["first_batch"] == 0.5
    assert figures_of_rank.seconds["end_to_end"] >= figures_of_rank.seconds["imports"]
    assert "rendezvous" not in figures_of_rank.seconds, "nobody launched it"
    assert (
        figures_of_rank.data_seconds,
        figures_of_rank.step_seconds,
        figures_of_rank.tokens,
        figures_of_rank.images,
    ) == ([0.5, 0.1], [1.0, 0.9], 200, 4)
    assert figures_of_rank.read_bytes["model"]["logical"] >= 5000
    assert len(beats) == 4
    assert ("loss", 2.0, 1, "1", None) in points


def test_a_trainer_that_tells_no_wait_is_not_said_to_wait_0_s() -> None:
    points: list[tuple[str, float, int, str, float | None]] = []
    recorder = Recorder(0, 0, 1, None, libraries={"torch": "theirs"})
    recorder.scalars = lambda *point: points.append(point)
    recorder.step(None, None, 1.0, 3.0, 1e-4, 100, 2, at=1234.5)
    figures_of_rank = recorder.result()
    assert (figures_of_rank.data_seconds, figures_of_rank.load_seconds, figures_of_rank.step_seconds) == ([], [], [1.0])
    assert "first_batch" not in figures_of_rank.seconds
    assert sorted(points) == [
        ("learning_rate", 1e-4, 0, "1", 1234.5),
        ("loss", 3.0, 0, "1", 1234.5),
        ("step_time", 1.0, 0, "s", 1234.5),
    ]
    assert figures_of_rank.versions == {"torch": "theirs"}


def test_a_picture_too_few_and_a_full_dev_shm_are_said() -> None:
    assert batches.steps_per_epoch(17, 2, 4) == 2
    with pytest.raises(UsageProblem, match="3 samples are too few for 2 ranks"):
        batches.steps_per_epoch(3, 2, 2)
    assert batches.enough_memory(0, 10**9, 8, free=0) is None
    assert batches.enough_memory(2, 10**6, 2, free=14 * 10**6) is None
    reason = batches.enough_memory(2, 10**6, 2, free=14 * 10**6 - 1)
    assert reason is not None
    assert "/dev/shm" in reason


def test_a_model_too_large_for_memory_is_not_made(tmp_path: Path) -> None:
    need_memory(10**9, full=False, ranks=2, available=(10 * 10**9, "RAM"))
    with pytest.raises(CannotJudge, match="/docker/x has 10 GB left"):
        need_memory(10**9, full=True, ranks=2, available=(10 * 10**9, "/docker/x"))
    done = bench("--model", "7b", "--target", str(tmp_path), "--device", "cpu", "--ranks-per-node", "1000", "--dry-run")
    assert isinstance(done.exception, CannotJudge)
    assert "1000 rank(s) need" in done.exception.message
    assert list(tmp_path.iterdir()) == []


def test_gpus_are_counted_by_their_nodes_and_what_may_be_seen(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    root = str(tmp_path)
    assert gpus({}, root) == 2
    assert gpus({"CUDA_VISIBLE_DEVICES": "1"}, root) == 1
    assert gpus({"CUDA_VISIBLE_DEVICES": ""}, root) == 0
    assert gpus({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, root) == 2


def test_ranks_of_a_node() -> None:
    two, four = replace(READY, gpus=2), replace(READY, host="node2", gpus=4)
    assert ranks_per_host(Cluster(), (), [two]) == 2
    assert ranks_per_host(Cluster(), (), [four, two]) == 2, "the poorest node decides"
    assert ranks_per_host(Cluster(device="cpu"), (), [four]) == 1
    assert ranks_per_host(Cluster(), (Host("a", "a", 1), Host("b", "b")), [two, four]) == 1, "the inventory's slots"
    assert ranks_per_host(Cluster(ranks_per_node=3, device="cpu"), (), [replace(READY, gpus=0)]) == 3
    with pytest.raises(CannotJudge, match="`node1` has no GPU"):
        ranks_per_host(Cluster(device="cuda"), (), [replace(READY, gpus=0)])
    with pytest.raises(CannotJudge, match="2 GPU"):
        ranks_per_host(Cluster(device="cuda", ranks_per_node=3), (), [two])


def test_every_figure_of_every_rank_names_rank_host_and_medium() -> None:
    measurements = figures.measurements(run(result(0), result(1)))
    for rank in (0, 1):
        mine = {each.name: each for each in measurements if each.rank == rank}
        assert mine["finetune.model_bandwidth"].value == MODEL / 8.0
        assert mine["finetune.model_bandwidth"].medium == "md RAID0 (8 x nvme)"
        assert mine["finetune.step"].value == 1.9
        assert mine["finetune.step"].samples == [1.9] * 9, "the first makes buffers"
        assert mine["finetune.step"].medium == "cpu"
        assert mine["finetune.data"].value == 0.1
        assert mine["finetune.tokens"].value == pytest.approx(20_000 / (1.3 + 22.1))
        assert all(each.host == "node1" for each in mine.values())
        assert "finetune.checkpoint" not in mine, "nothing was saved"
    whole = {each.name: each.value for each in measurements if each.rank is None}
    assert whole["finetune.all.tokens"] == pytest.approx(40_000 / (1.3 + 22.1))
    assert whole["finetune.all.end_to_end"] == 40.0


@pytest.mark.parametrize(
    ("storage", "kind"),
    [((MODEL, 0), "block"), ((MODEL // 2, MODEL // 2), "block"), ((0, 0), "memory"), ((10**9, 0), "none")],
)
def test_where_a_model_came_from_is_counted_over_the_node(storage: tuple[int, int], kind: str) -> None:
    ranks = [
        result(rank, read_bytes={"model": {"storage": count, "logical": MODEL}}) for rank, count in enumerate(storage)
    ]
    finished = run(*ranks, workload=replace(WORKLOAD, cold=True))
    evidence = figures.model_evidence(finished, ranks[1])
    assert evidence.kind == kind
    assert evidence.counted_bytes == sum(storage)
    assert judged(finished).status == ("pass" if kind == "block" else "unproven")
    assert judged(run(*ranks)).status == "pass", "nobody asked for a cold cache"


def test_a_cold_cache_on_one_node_proves_nothing_of_another() -> None:
    there = replace(READY, host="node2")
    cached = {"model": {"storage": 0, "logical": MODEL}}
    ranks = [result(0), result(1), result(2, read_bytes=cached), result(3, read_bytes=cached)]
    doubts = figures.doubts(run(*ranks, workload=replace(WORKLOAD, cold=True), ready=(READY, there)))
    assert [line.partition(":")[0] for line in doubts] == ["`node2`"]
    shm = replace(there, model_medium="tmpfs", in_memory=True)
    assert figures.doubts(run(*ranks, workload=replace(WORKLOAD, cold=True), ready=(READY, shm))) == []


@pytest.mark.parametrize(
    ("losses", "status", "code"),
    [
        ([5.0, 4.0, 3.0, 2.0, 1.0, 1.0, 1.0, 1.0], "pass", 0),
        ([1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0], "unproven", 3),
        ([1.0, 2.0], "pass", 0),
        ([5.0, float("nan"), 3.0, 2.0, 1.0, 1.0, 1.0, 1.0], "fail", 1),
        ([5.0, float("inf")], "fail", 1),
    ],
)
def test_that_it_learns_is_judged(losses: list[float], status: str, code: int) -> None:
    steps = {"step_seconds": [1.0] * len(losses), "data_seconds": [0.1] * len(losses)}
    verdict = judged(run(result(0, losses=losses, **steps)))
    assert verdict.status == status
    assert exit_code([verdict.status]) == code
    if status == "fail":
        assert "no number on rank 0 at step 1" in verdict.reasons[0]


def skipping(*steps: int, **more: object) -> RankResult:
    recorder = Recorder(0, 0, 1, precision="fp16")
    for step in range(10):
        loss = float("nan") if step in steps else 5.0 - 0.4 * step
        recorder.step(0.1, 0.1, 0.5 if step in steps else 2.0, loss, 1e-4, 10, 2, skipped=step in steps)
    recorded = recorder.result()
    kept = {
        "precision": "fp16",
        "skipped_steps": recorded.skipped_steps,
        "notes": recorded.notes,
        "losses": recorded.losses,
    }
    return result(**{**kept, "step_seconds": recorded.step_seconds, **more})


def test_a_skipped_step_is_said_and_breaks_nothing(tmp_path: Path) -> None:
    (tmp_path / "rank-0").mkdir()
    keep_result(tmp_path / "rank-0", skipping(0, 1, 4))
    back = read_result(tmp_path, 0)
    assert back.skipped_steps == [0, 1, 4]
    assert back.notes == [
        "loss scaling skipped the update of 3 of 10 steps (step 0, 1, 4): their gradients overflowed in fp16"
    ]
    short_run = run(back)
    assert judged(short_run).status == "pass"
    measured = {each.name: each for each in figures.measurements(short_run)}
    # A step without an update is shorter, so it is not a sample of the step's time.
    assert set(measured["finetune.step"].samples or []) == {2.0}
    assert measured["finetune.step"].parameters["precision"] == "fp16"
    assert measured["finetune.step"].parameters["skipped_steps"] == 3


def test_a_loss_that_is_no_number_needs_loss_scaling() -> None:
    in_bf16 = skipping(4, precision="bf16")
    assert judged(run(in_bf16)).status == "fail"
    elsewhere = skipping(4, losses=[float("nan"), *skipping(4).losses[1:]])
    assert "no number on rank 0 at step 0" in judged(run(elsewhere)).reasons[0]


def test_a_run_whose_every_update_was_skipped_proves_nothing() -> None:
    none = skipping(*range(10))
    verdict = judged(run(none))
    assert verdict.status == "unproven"
    assert "none of 10 steps made an update" in verdict.reasons[0]


def test_the_format_is_in_what_is_printed() -> None:
    assert "cpu in fp16 with loss scaling" in on_screen(record_of(run(skipping(0))), None, 200)


def test_ranks_with_other_steps_fail_and_a_dead_one_is_an_error() -> None:
    short = result(1, step_seconds=[1.0], data_seconds=[0.1], losses=[1.0])
    assert judged(run(result(0), short)).status == "fail"
    assert judged(run(), ("rank 1 died",)).status == "error"


def test_what_binds() -> None:
    start = {"rendezvous": 1.0, "imports": 2.0, "communicator": 0.0, "model_load": 30.0, "engine": 1.0}
    assert "bottleneck: the start. 34.00 of 44.00 s" in binds(Shares(start, 1.0, 9.0))
    assert "model load (30.00 s)" in binds(Shares(start, 1.0, 9.0))
    assert "bottleneck: data. Waiting for batches takes 40%" in binds(Shares(start, 40.0, 60.0))
    assert "bottleneck: the step. Waiting for batches takes 10.0%" in binds(Shares(start, 10.0, 90.0))
    assert "how long it waited for batches is not known" in binds(Shares(start, None, 90.0))


def test_the_start_of_llamafactory_counts() -> None:
    seconds = {"rendezvous": 2.0, "imports": 0.1, "communicator": 1.0, "start": 40.0, "end_to_end": 56.0}
    other = result(seconds=seconds, data_seconds=[], load_seconds=[], step_seconds=[0.6] * 10)
    spent = shares(by_name(record_of(run(other))))
    assert (spent.data, spent.start["start"]) == (None, 40.0)
    assert "LLaMA-Factory outside of its training (40.00 s)" in binds(spent)


@pytest.mark.parametrize("said", ["NVIDIA H200", b"NVIDIA H200"])
def test_a_gpu_is_named_without_a_cuda_context(said: str | bytes) -> None:
    library = SimpleNamespace(NVMLError=RuntimeError, nvmlDeviceGetName=lambda handle: said)
    assert Gpu(library, 1).name() == "NVIDIA H200"


def test_the_slowest_rank_says_what_binds() -> None:
    slow = result(1, seconds={**result().seconds, "end_to_end": 60.0}, data_seconds=[10.0] * 10)
    spent = shares(by_name(record_of(run(result(0), slow))))
    assert spent.data == pytest.approx(0.4 + 9 * 10.0)


def shown(finished: figures.Run) -> str:
    return on_screen(record_of(finished), None, 100)


def test_what_people_see() -> None:
    text = " ".join(shown(run(result(0), result(1, seconds={**result().seconds, "model_load": 16.0}))).split())
    assert "8,000 million parameters, 20 million trained" in text
    assert "each of 2 ranks reads all 16 GB from md RAID0 (8 x nvme), the slowest at 1 GB/s" in text
    assert "drives read 16 GB, 16 GB" in text
    assert "model load 12.00 8.00 16.00 rank 1" in text
    assert "loss: from 4.8 to 1.6" in text
    assert text.endswith("PASS")
    assert "least" not in shown(run()), "one rank has no slowest"


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["bench", "finetune", *arguments], standalone_mode=False)


def test_the_preset_is_the_published_experiment(tmp_path: Path) -> None:
    done = bench("--preset", "qwen2.5-vl-7b-lora", "--target", str(tmp_path), "--dry-run", "--prepare")
    assert "fine-tunes `7b` (LoRA of rank 8, ZeRO-2) on 2000 synthetic images: 10 epoch(s)" in done.stderr
    # Without room for 16 GB and 2,000 images there is one message, about that.
    assert done.exception is None or isinstance(done.exception, CannotJudge)
    assert list(tmp_path.iterdir()) == []


def test_material_that_is_there_needs_no_target() -> None:
    assert Material("/m", Path("/d")).target is None
