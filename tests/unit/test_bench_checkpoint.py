"""The pure parts of `bench checkpoint`: checks, verdict and report."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

import builders
from shown_records import on_screen
from tunetool import record as records
from tunetool.bench.checkpoint import figures, preflight
from tunetool.bench.checkpoint.figures import best_other
from tunetool.bench.checkpoint.fio_best import SLACK_BYTES, FioSample, counts
from tunetool.bench.checkpoint.footprint import footprint, reset_peaks
from tunetool.bench.checkpoint.request import KIND, Request, Training
from tunetool.bench.checkpoint.samples import FioRows, Matrix, Moved, Row, Sample
from tunetool.bench.checkpoint.view import view
from tunetool.errors import UsageProblem
from tunetool.launch.local import rank_environment
from tunetool.measure import page_cache
from tunetool.measure.evidence import Counted
from tunetool.measure.fio import Outcome
from tunetool.measure.pace import Pace
from tunetool.measure.rounds import drawn_order, ratio
from tunetool.measure.tester import cores_open_to
from tunetool.node.machine.block_stack import BlockStack, Leaf
from tunetool.node.units import format_size
from tunetool.record import Node, Record
from tunetool.report.kinds import page_text, write_any_page, write_page
from tunetool.verdict import TESTER_CEILING, TESTER_CPU_SHARE, exit_code, judge
from tunetool.view.plots import Bar, bars
from waiting import until

STATE = 10**9
DISK = BlockStack(
    "/mnt/scratch",
    None,
    "ext4",
    "vda",
    "254:0",
    "disk",
    (Leaf("vda", "disk", None, True, ("vda",)),),
    redundant=False,
    in_memory=False,
)
MEMORY = BlockStack("/dev/shm", None, "tmpfs", None, None, "tmpfs", (), redundant=False, in_memory=True)


def moved(seconds: float, ratio: float = 1.0, cpu: float = 0.5) -> Moved:
    return Moved(seconds, STATE, cpu, counted=Counted(STATE, int(STATE * ratio), {}, SLACK_BYTES))


def row(name: str, seconds: list[float], **changed: object) -> Row:
    made = Row(name)
    for number, each in enumerate(seconds, start=1):
        made.samples[number] = Sample(each, moved(each), 10**8, moved(each / 2))
    for key, value in changed.items():
        setattr(made, key, value)
    return made


def matrix(*rows: Row, stack: BlockStack = DISK, fio: FioRows | None = None) -> Matrix:
    return Matrix(stack, stack.in_memory, STATE, {each.name: each for each in rows}, fio)


def usual() -> Matrix:
    fio = FioRows("3.33", True, {"write": {1: 2e9, 4: 4e9}, "read": {1: 5e9}}, {"write": 4, "read": 1})
    fio.ceilings = {"write": [Outcome(10**11, 1.0, {}, "")]}
    for number in range(1, 7):
        fio.samples["write"][number] = FioSample(4.1e9, STATE, Counted(STATE, STATE, {}), cores=0.5)
        fio.samples["read"][number] = FioSample(8e9, STATE, Counted(STATE, STATE, {}))
    return matrix(
        row("torch-save-zip", [1.0, 1.1, 1.0, 1.2, 1.0, 1.1]),
        row("dcp-t4-multi", [0.5, 0.5, 0.6, 0.5, 0.5, 0.5]),
        row("direct", [0.25, 0.25, 0.26, 0.25, 0.24, 0.25]),
        Row("orbax", left_out="`orbax` is not installed"),
        fio=fio,
    )


def record_of(*matrices: Matrix, errors: list[str] | None = None) -> Record:
    conditions: dict[str, records.Scalar] = {
        "state": "tiny", "ranks": 1, "torch": "2.13.0", "device": "cpu", "rounds": 6
    }  # fmt: skip
    return builders.record(
        *(each for each_matrix in matrices for each in figures.measurements(each_matrix, conditions)),
        kind=KIND,
        node=Node(host="node1"),
        target="/mnt/scratch",
        checks=[each for each_matrix in matrices for each in figures.checks(each_matrix)],
        verdict=judged(*matrices, errors=errors or []),
    )


def judged(*matrices: Matrix, errors: Sequence[str] = (), doubts: Sequence[str] = ()) -> records.Verdict:
    case = figures.case(matrices, {}, doubts)
    return judge(replace(case, errors=[*errors, *case.errors]))


def text_of(record: Record) -> str:
    return on_screen(record, None, 100)


def test_speed_is_held_against_others_of_the_same_round() -> None:
    by_name = {each.name: each for each in record_of(usual()).measurements}
    versus = by_name["checkpoint.direct.versus_torch_save"]
    assert versus.value == pytest.approx(4.2, abs=0.3)
    assert versus.parameters["decided"] is True
    other = by_name["checkpoint.direct.versus_best_other"]
    assert other.parameters["against"] == "dcp-t4-multi"
    assert other.value == pytest.approx(2.0, abs=0.05)
    assert by_name["checkpoint.direct.of_fio_write"].value == pytest.approx(1 / 0.25 * 1e9 / 4.1e9, rel=0.01)
    assert "checkpoint.dcp-t4-multi.versus_best_other" not in by_name
    assert by_name["checkpoint.direct.durable"].evidence is not None
    assert by_name["checkpoint.direct.durable"].evidence.ratio == 1.0
    assert by_name["checkpoint.fio.write"].parameters["files"] == 4


def test_the_size_of_a_checkpoint_has_its_compression() -> None:
    packed = row("orbax", [1.0, 1.0])
    packed.samples = {
        number: replace(sample, write=replace(sample.write, bytes=STATE * 9 // 10))
        for number, sample in packed.samples.items()
    }
    record = record_of(matrix(row("dcp-t4-multi", [0.5, 0.5]), packed))
    sizes = {each.name: each for each in record.measurements if each.name.endswith(".size")}
    assert {name: size.value for name, size in sizes.items()} == {
        "checkpoint.dcp-t4-multi.size": 1.0,
        "checkpoint.orbax.size": 0.9,
    }
    assert {size.better for size in sizes.values()} == {"lower"}
    assert sizes["checkpoint.dcp-t4-multi.size"].parameters["compression"] == "none"
    shown = " ".join(text_of(record).split())
    assert "orbax: its files hold 900 MB, 0.900 of the state, by zstd, level 1" in shown
    assert "without compression 1.000 to 1.000" in shown
    assert "its files hold" not in text_of(record_of(usual()))


def test_the_limits_of_fio_itself_are_in_the_record() -> None:
    by_name = {each.name: each.parameters for each in record_of(usual()).measurements}
    write, read = by_name["checkpoint.fio.write"], by_name["checkpoint.fio.read"]
    assert write[TESTER_CEILING] == 1e11
    assert write[TESTER_CPU_SHARE] == pytest.approx(0.5 / cores_open_to(4), abs=1e-4)
    # Where it could not be measured, the record does not have it.
    assert TESTER_CEILING not in read


def test_a_short_call_does_not_cut_off_the_training_loop() -> None:
    asked = Request(model="tiny")
    assert (asked.pace.rounds, asked.pace.budget) == (15, 300.0)
    assert replace(asked, train=True).pace == Pace(3)
    assert replace(asked, train=True, budget=60.0).pace == Pace(3, 60.0)
    assert replace(asked, train=True, rounds=7).pace == Pace(7)
    assert replace(asked, train=True, thorough=True).pace == Pace(6)


def test_a_short_call_announces_all_that_it_may_write() -> None:
    asked = Request(model="tiny")
    state, names = preflight.state(asked), ["direct", "torch-save-zip"]
    _, writes, rounds, more = preflight.announcement(asked, state, names, [DISK])
    assert f": {format_size(30 * state.bytes)} in all at most, " in writes
    assert rounds.startswith("3 rounds of 2 engines")
    assert more.startswith("more than 3 rounds, up to 15")
    _, writes, _ = preflight.announcement(replace(asked, thorough=True), state, names, [DISK])
    assert f": {format_size(12 * state.bytes)} in all, " in writes


def test_a_ratio_whose_interval_holds_one_decides_nothing() -> None:
    near = ratio("other", {1: 1.0, 2: 1.0, 3: 1.0}, {1: 0.9, 2: 1.1, 3: 0.8})
    assert near is not None
    assert not near.decided
    assert near.pairs == 3
    apart = ratio("other", {1: 1.0, 2: 1.0, 3: 1.0}, {1: 0.5, 2: 0.6, 3: 0.6})
    assert apart is not None
    assert not apart.decided, "three on one side are chance once in four times"
    clear = ratio("other", {1: 1.0, 2: 1.0, 3: 1.0, 9: 1.0}, {1: 0.1, 2: 0.102, 3: 0.102, 4: 0.01})
    assert clear is not None
    assert clear.decided
    assert clear.pairs == 3, "only rounds that have both"
    single = ratio("other", {1: 1.0}, {1: 0.5})
    assert single is not None
    assert not single.decided, "one pair has no interval"
    assert ratio("other", {1: 1.0}, {2: 1.0}) is None
    undecided = matrix(row("torch-save-zip", [1.0, 1.0]), row("direct", [0.9, 1.1]))
    assert "~1.0" in text_of(record_of(undecided))
    (line, *_) = view(record_of(undecided)).advice
    assert line.startswith("`direct` or `torch-save-zip` on ")
    assert "these rounds do not decide which is faster" in line
    assert "not decided" in line
    once = matrix(row("torch-save-zip", [1.0]), row("direct", [0.2]))
    assert "do not decide" in view(record_of(once)).advice[0], "one round is no reason to use an engine"


def test_an_engine_that_brings_back_something_else_fails() -> None:
    liar = row("safetensors", [0.1, 0.1])
    liar.samples[2] = Sample(0.1, moved(0.1), 0, moved(0.1), "rank 1: `model.norm.weight` differs from byte 0 of 512")
    measured = matrix(row("torch-save-zip", [1.0, 1.0]), liar)
    verdict = judged(measured, errors=["something broke"], doubts=["a doubt"])
    assert verdict.status == "fail"
    assert exit_code([verdict.status]) == 1
    assert "`safetensors`" in verdict.reasons[0]
    assert "`model.norm.weight`" in verdict.reasons[0]
    shown = text_of(record_of(measured))
    assert "NO" in shown
    assert shown.rstrip().endswith("FAIL")
    assert not any("use `safetensors`" in line for line in view(record_of(measured)).advice)
    assert best_other(measured, row("direct", [1.0])).name == "torch-save-zip"  # type: ignore[union-attr]


def test_an_async_engine_that_was_overtaken_fails_too() -> None:
    late = row("direct-async", [0.1], first=Sample(0.01, moved(0.1), 0, moved(0.1), "rank 0: `x` differs"))
    assert judged(matrix(late)).status == "fail"


@pytest.mark.parametrize(
    ("ratios", "status", "said"),
    [
        ([1.0, 1.01], "pass", ""),
        ([1.0, 0.4], "unproven", "counted only 0.400 of the 1 GB that it calls durable"),
        ([1.0, 1.5], "unproven", "something else used the drives beside 1 of the figures"),
        ([2.0, 2.01, 2.0], "pass", ""),  # an engine that writes everything twice, each time
        ([2.0], "unproven", "something else used the drives"),  # once may be a neighbour
    ],
)
def test_what_an_engine_calls_durable_is_held_against_the_drives(ratios: list[float], status: str, said: str) -> None:
    direct = Row("direct")
    for number, each in enumerate(ratios):
        direct.samples[number] = Sample(1.0, moved(1.0, each), 0, moved(1.0))
    verdict = judged(matrix(direct))
    assert verdict.status == status
    assert said in " ".join(verdict.reasons)


def test_who_disturbed_an_engine_s_save_is_named() -> None:
    disturbed = moved(1.0, 2.0)
    assert disturbed.counted is not None
    disturbed = replace(disturbed, counted=replace(disturbed.counted, others="`dd` (pid 812) wrote 1 GB"))
    direct = Row("direct", samples={1: Sample(1.0, disturbed, 0, moved(1.0))})
    (reason,) = judged(matrix(direct)).reasons
    assert "times what its files hold at a write: `dd` (pid 812) wrote 1 GB; stop it" in reason


def test_a_restore_from_the_page_cache_proves_nothing() -> None:
    direct = Row("direct", samples={1: Sample(1.0, moved(1.0), 0, moved(0.1, 0.0))})
    verdict = judged(matrix(direct))
    assert verdict.status == "unproven"
    assert "page cache" in verdict.reasons[0]


def test_memory_is_marked_in_the_record_and_in_every_table() -> None:
    measured = matrix(row("torch-save-zip", [1.0] * 6), row("direct", [0.1] * 6), stack=MEMORY)
    record = record_of(usual(), measured)
    assert [each.title for each in view(record).sections] == ["engines on disk", "engines on tmpfs"]
    names = [each.name for each in record.measurements]
    assert "checkpoint.memory.direct.durable" in names
    assert len(names) == len(set(names)), "compare and Prometheus tell figures apart by name"
    shown = text_of(record)
    assert "tmpfs: memory, a stand-in for a medium of that speed" in shown
    assert "on tmpfs" in shown
    assert "a stand-in for a medium of that speed" in page_text(record, None)


def test_an_engine_that_failed_is_told_and_the_others_stay() -> None:
    measured = matrix(row("torch-save-zip", [1.0] * 6), Row("dcp-t4-multi", failed="rank 1 was ended by SIGKILL"))
    record = record_of(measured)
    assert record.verdict is not None
    assert record.verdict.status == "error"
    shown = " ".join(text_of(record).split())
    assert "dcp-t4-multi: failed, rank 1 was ended by SIGKILL" in shown
    assert "torch-save-zip" in shown


def test_the_page_says_what_to_use_and_what_binds() -> None:
    shown = " ".join(text_of(record_of(usual())).split())
    assert "use `direct` on disk: 4 GB/s" in shown
    assert (
        "2.00 times the speed of the best other, `dcp-t4-multi` (2.00 to 2.31); the medium is the bottleneck: this is 98% of the best of fio"
        in shown
    )
    assert "orbax: left out, `orbax` is not installed" in shown
    assert shown.endswith("PASS")
    slow = matrix(row("torch-save-zip", [0.5] * 6), row("safetensors", [1.0] * 6))
    assert "one core of each rank is busy all the time" in " ".join(text_of(record_of(slow)).split())


def test_the_first_save_of_an_async_engine_stands_apart() -> None:
    late = row("direct-async", [1.0, 1.0], first=Sample(7.5, moved(9.0), 0, moved(1.0)))
    for number, sample in late.samples.items():
        late.samples[number] = Sample(0.2, sample.write, 0, sample.read)
    record = record_of(matrix(row("torch-save-zip", [1.0, 1.0]), late))
    values = {each.name: each.value for each in record.measurements}
    assert values["checkpoint.direct-async.first_stall"] == 7.5
    assert values["checkpoint.direct-async.stall"] == 0.2
    assert "direct-async: its first save, not in the figures, stalled the loop for 7.50 s" in text_of(record)


def test_the_html_page_stands_alone_and_escapes(tmp_path: Path) -> None:
    record = record_of(usual())
    text = write_any_page(record, tmp_path / "record.json").read_text()
    assert text.count("<svg") == 3
    assert "src=" not in text, "nothing is fetched"
    assert "direct" in text
    drawn = bars("a <b>", [Bar("x & y", 2.0, 1.0, 3.0, "#000"), Bar("lost", -0.1, -0.2, 0.1, "#000")])
    assert "a &lt;b&gt;" in drawn
    assert "x &amp; y" in drawn
    assert 'width="-' not in drawn
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
    assert write_page(record_of(), tmp_path / "none.json") is None


def test_every_round_has_an_order_that_the_seed_repeats() -> None:
    names = [f"engine-{number}" for number in range(8)]
    orders = [drawn_order(names, 3, number) for number in range(6)]
    assert all(sorted(order) == names for order in orders)
    assert len({tuple(order) for order in orders}) > 1
    assert orders == [drawn_order(names, 3, number) for number in range(6)]
    assert orders != [drawn_order(names, 4, number) for number in range(6)]


def test_wrong_calls_are_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageProblem, match="no directory to write to"):
        preflight.targets(Request(model="7b"))
    with pytest.raises(UsageProblem, match="in memory") as caught:
        preflight.targets(Request(model="7b", target=Path("/dev/shm")))
    assert "--memory-target" in (caught.value.hint or "")
    for free, hint in ((75 * 10**9, "`--state-bytes 30GB`"), (10**8, "a directory with more space")):
        monkeypatch.setattr(preflight, "free_bytes", lambda _, free=free: free)
        with pytest.raises(UsageProblem, match="too little space") as caught:
            preflight.check_space(Request(model="7b"), tmp_path, 10**11)
        assert hint in (caught.value.hint or "")
    with pytest.raises(UsageProblem, match="too little memory"):
        preflight.check_memory(Request(model="7b", device="cpu"), 10**9, ["direct", "direct-async"], [DISK], 3 * 10**9)
    preflight.check_memory(Request(model="7b", device="cpu"), 10**9, ["direct", "direct-async"], [DISK], 4 * 10**9)


@pytest.mark.parametrize("asked", [8 * 10**9, 4 * 10**9])
def test_a_smaller_state_that_is_hinted_at_is_one_that_fits(asked: int, tmp_path: Path) -> None:
    names = ["direct", "direct-async", "dcp-async-thread"]
    request = Request(model="phi3-mini", state_bytes=asked, device="cpu")
    with pytest.raises(UsageProblem, match=r"needed: 5 times the state of [84] GB") as caught:
        preflight.check_memory(request, asked, names, [DISK], 16 * 10**9)
    hint = caught.value.hint or ""
    assert hint.startswith("use a smaller state: `--state-bytes 3GB`")
    assert ("`--engines` without asynchronous ones" in hint) is (asked == 4 * 10**9), "three times 8 GB are too much"
    preflight.check_memory(request, 3 * 10**9, names, [DISK], 16 * 10**9)
    # A first layer of phi3-mini takes 1.4 GB: nothing smaller is left to name.
    with pytest.raises(UsageProblem, match="too little memory") as caught:
        preflight.check_memory(request, asked, ["direct"], [DISK], 10**9)
    assert caught.value.hint == "use a smaller `--model`, or a machine with more memory"


def test_memory_that_checkpoints_fill_counts_as_memory() -> None:
    with pytest.raises(UsageProblem, match="too little memory"):
        preflight.check_memory(Request(model="7b", device="cpu"), 10**9, ["direct"], [MEMORY], 4 * 10**9)


def test_training_keeps_what_it_saves_until_its_loop_is_over() -> None:
    loop = Training(steps=24, sharded_every=6, consolidated_every=12)
    assert loop.saves(loop.every("direct")) == 3, "none after the last step"
    assert loop.saves(loop.every("fsdp-consolidated")) == 1
    assert loop.saves(0) == 0
    plain, trained = (preflight.space_needed(Request(model="7b", train=each), 10**9) for each in (False, True))
    assert trained - plain == pytest.approx(2 * 1.02e9)


def test_fio_gives_each_file_a_few_requests_at_least() -> None:
    assert counts(2**30) == [1, 2, 4, 8, 16]
    assert counts(9 * 2**20) == [1, 2]


def test_a_footprint_counts_children_and_the_most_that_was_held() -> None:
    assert reset_peaks()
    before = footprint()
    held = bytearray(64 * 2**20)
    held[::4096] = b"x" * len(held[::4096])
    del held
    busy = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\ntime.sleep(6000)"
    with subprocess.Popen([sys.executable, "-c", busy]) as child:
        until(lambda: footprint().cpu_seconds - before.cpu_seconds >= 0.3, "0.3 s of CPU", child)
        alive = footprint()
        child.kill()
    after = footprint()
    assert alive.cpu_seconds - before.cpu_seconds >= 0.3
    assert after.cpu_seconds - before.cpu_seconds >= 0.3, "a child that ended has been counted too"
    assert after.peak_bytes is not None
    assert after.peak_bytes - before.resident_bytes >= 60 * 2**20
    assert after.resident_bytes < after.peak_bytes
    assert alive.resident_bytes > after.resident_bytes - 2**20


def test_files_at_any_depth_count_and_leave_the_page_cache(tmp_path: Path) -> None:
    (tmp_path / "deep/er").mkdir(parents=True)
    (tmp_path / "deep/er/data").write_bytes(os.urandom(2**20))
    (tmp_path / "head").write_bytes(b"x" * 100)
    (tmp_path / "link").symlink_to(tmp_path / "head")
    assert page_cache.size_of(tmp_path) == 2**20 + 100
    page_cache.drop(tmp_path)
    assert (tmp_path / "deep/er/data").stat().st_size == 2**20


def test_ranks_share_the_cores_and_run_no_foreign_code() -> None:
    environment = rank_environment({"LD_PRELOAD": "/tmp/x.so", "HOME": "/root"}, 4, 16)
    assert "LD_PRELOAD" not in environment
    assert environment["OMP_NUM_THREADS"] == "4"
    assert rank_environment({"OMP_NUM_THREADS": "1"}, 4, 16)["OMP_NUM_THREADS"] == "1", "the user's own"
