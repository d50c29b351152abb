"""`bench offload` without DeepSpeed: its swap files, handles, models, figures, tables, page, wrong calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import builders
from shown_records import node, on_screen
from tunetool.advise import zero
from tunetool.advise.read_model import load_model
from tunetool.advise.shapes import Model, Tensor
from tunetool.advise.zero import SwapFiles, swap_files
from tunetool.bench import media
from tunetool.bench.offload import figures, preflight
from tunetool.bench.offload.architecture import architecture
from tunetool.bench.offload.preflight import Configured
from tunetool.bench.offload.request import Request
from tunetool.bench.offload.samples import DRAM, Moved, Place, Row, Rung, Step, moved_in
from tunetool.bench.offload.swap_handles import CountedHandle, Ledger, SwapHandles, union
from tunetool.bench.offload.view import view
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.measure.evidence import Counted
from tunetool.node.machine.block_stack import BlockStack, Leaf, read_stack
from tunetool.record import Record
from tunetool.report.kinds import page_text
from tunetool.tune.check import Facts
from tunetool.tune.settings import DEFAULTS, AioSettings
from tunetool.verdict import judge

GB, MIB = 10**9, 2**20
DISK = Leaf("vda", "disk", None, True, ("vda",))
CPU = Facts("cpu", bf16=True)
TUNED = AioSettings(2 * MIB, 64, 3, single_submit=False, overlap_events=True)


def model(*sizes: int) -> Model:
    return Model("m", "made up", tuple(Tensor(f"layers.{number}.w", (size,)) for number, size in enumerate(sizes)))


def test_swap_files_have_the_sizes_that_deepspeed_gives_them() -> None:
    # 1 Mi elements are 4 MiB in fp32, of which 4 KiB are one thread's part at a parallelism of 4; 100 are too few.
    made = swap_files(model(MIB, 100, MIB // 2 + 100), 1, 0, MIB, MIB, 4, parameters=True)
    # Two sub-groups: the tensor that fills one is its last.
    second = zero.aligned(MIB // 2 + 200, 4, zero.FP32) * zero.FP32
    assert made.states == [4 * MIB] * 3 + [second] * 3
    # A gradient is cut to what the handle can move, and the rest of it stays in memory.
    assert made.gradients == [4 * MIB, 2 * MIB]
    # A parameter is rounded up.
    assert made.parameters == [2 * MIB, MIB + 4096]
    assert made.total == made.written == sum(made.sizes)
    assert made.read == made.total + sum(made.parameters)
    assert swap_files(model(MIB), 1, 0, MIB, MIB, 4, parameters=False).parameters == []
    assert swap_files(model(MIB), 1, 0, MIB, 8 * MIB, 4, parameters=True).total == 0, "smaller than a block"


def test_a_partition_of_padding_alone_has_no_gradient() -> None:
    # 5 parts of a tensor of 4 x 2^20 + 1 elements would leave nothing for the last of 8 ranks.
    whole = model(2 * MIB * 7 - 6)
    sizes = [swap_files(whole, 8, rank, 10**9, MIB, 1, parameters=False) for rank in range(8)]
    assert all(each.gradients for each in sizes[:7])
    part = zero.partition(whole.numel, 8)
    assert bool(sizes[7].gradients) == (7 * part < whole.numel)
    tiny = swap_files(model(300_000 * 3), 4, 3, 10**9, MIB // 4, 1, parameters=False)
    assert tiny.states == []


@given(st.lists(st.integers(1, 5 * MIB), min_size=1, max_size=6), st.integers(1, 4), st.integers(1, 8))
def test_files_hold_about_the_bytes_of_the_formula(sizes: list[int], world: int, parallelism: int) -> None:
    whole = model(*sizes)
    made = swap_files(whole, world, 0, 2 * MIB, MIB, parallelism, parameters=True)
    parts = zero.partitions(whole, world)
    padding = 2 * 1024 * parallelism * (4 * len(parts) + 4)
    assert made.total <= zero.nvme_bytes(parts, states=True, parameters=True) + padding
    assert all(size % (512 * parallelism) == 0 for size in made.sizes)


class Clock:
    """Goes on by what each call of the handle takes."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Buffer:
    def __init__(self, size: int) -> None:
        self.size = size

    def numel(self) -> int:
        return self.size

    def element_size(self) -> int:
        return 2


class Handle:
    """Takes a second to start a transfer and three to wait."""

    def __init__(self, clock: Clock, *settings: object) -> None:
        self.clock, self.pending, self.settings = clock, 0, settings

    def async_pread(self, buffer: Buffer, path: str, offset: int) -> int:
        self.clock.now += 1
        self.pending += 1
        return 0

    async_pwrite = async_pread

    def wait(self) -> int:
        self.clock.now += 3
        completed, self.pending = self.pending, 0
        return completed

    def is_pinned(self, buffer: Buffer) -> bool:
        return True


def test_a_counted_handle_counts_bytes_and_waiting() -> None:
    clock, ledger = Clock(), Ledger()
    handle = CountedHandle(Handle(clock), lambda: ledger, clock)
    assert handle.is_pinned(Buffer(1)), "all other calls go through"
    handle.async_pread(Buffer(50), "a")
    clock.now += 10  # computation beside it
    handle.async_pread(Buffer(50), "b")
    assert not handle.is_idle
    assert handle.wait() == 2
    assert handle.is_idle
    handle.async_pwrite(Buffer(10), "a")
    handle.wait()
    answer = ledger.answer()
    assert answer["read"] == {"bytes": 200, "waited": 5.0, "flights": [(0.0, 15.0)]}
    assert answer["write"] == {"bytes": 20, "waited": 4.0, "flights": [(15.0, 19.0)]}
    # Both at once: the wait belongs to each by its bytes.
    ledger = Ledger()
    handle.async_pread(Buffer(30), "a")
    handle.async_pwrite(Buffer(10), "b")
    handle.wait()
    assert ledger.waited == {"read": 1 + 3 * 0.75, "write": 1 + 3 * 0.25}
    assert handle.wait() == 0


def test_the_handles_of_an_engine_change_together() -> None:
    class Swapper:
        aligned_bytes = 2048
        read_aio_handle = write_aio_handle = aio_handle = None

    class Optimizer(Swapper):
        def __init__(self) -> None:
            self.gradient_swapper, self.swap_buffer_manager = Swapper(), Swapper()
            self.swap_params_info = {1: Swapper()}

    class Engine:
        def __init__(self) -> None:
            self.optimizer, self.module = self, self
            self.optimizer_swapper = Optimizer()

        def parameters(self) -> list[object]:
            return []

    clock, engine = Clock(), Engine()
    blocks = {"default": DEFAULTS.block(), "tuned": replace(TUNED, intra_op_parallelism=4).block()}
    handles = SwapHandles(engine, blocks, lambda *settings: Handle(clock, *settings))
    swapper = engine.optimizer_swapper
    for name, threads in (("default", 1), ("tuned", 4), ("default", 1)):
        handles.use(name)
        read: Any = swapper.read_aio_handle
        write: Any = swapper.write_aio_handle
        assert (read.settings[4], write.settings[4]) == (threads, threads)
        assert read is not write
        for holder in (swapper, swapper.gradient_swapper, swapper.swap_buffer_manager, swapper.swap_params_info[1]):
            assert holder.aio_handle is write
    write.async_pwrite(Buffer(5), "a", 0)
    assert handles.ledger.moved == {"read": 0, "write": 10}
    with pytest.raises(RuntimeError, match="still in flight"):
        handles.use("tuned")
    write.wait()
    handles.use("tuned")
    assert handles.ledger.moved["write"] == 0, "each step has a ledger of its own"
    with pytest.raises(ValueError, match="no multiples of 1536 bytes"):
        SwapHandles(engine, {"odd": TUNED.block()}, lambda *settings: Handle(clock, *settings))


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), max_size=12))
def test_a_union_has_every_second_once(pairs: list[tuple[int, int]]) -> None:
    flights = [(float(begin), float(begin + length)) for begin, length in pairs]
    joined = union(flights)
    covered = {second for begin, length in pairs for second in range(begin, begin + length)}
    assert sum(end - begin for begin, end in joined) == len(covered)
    assert all(first[1] < second[0] for first, second in pairwise(joined))


def test_ranks_move_together() -> None:
    answers = [
        {"read": {"bytes": 10, "waited": 1.0, "flights": [[0.0, 2.0], [5.0, 6.0]]}},
        {"read": {"bytes": 20, "waited": 3.0, "flights": [[1.0, 4.0]]}},
    ]
    moved = moved_in(answers, "read")
    assert (moved.claimed_bytes, moved.waited, moved.in_flight) == (30, 2.0, 5.0)
    assert moved.bandwidth == 6.0
    assert Moved(0, 0.0, 0.0).bandwidth == 0


@pytest.mark.parametrize("name", ["tiny", "7b", "3b", "70b", "llama-tiny", "phi3-mini"])
def test_a_name_is_the_same_model_as_everywhere(name: str) -> None:
    assert architecture(name).model.tensors == load_model(name).tensors
    assert (architecture(name).vision is not None) == (name in ("tiny", "7b", "3b"))


def test_other_families_are_refused(tmp_path: Path) -> None:
    for name in ("mixtral-8x7b", "175b", "nothing"):
        with pytest.raises(UsageProblem) as error:
            architecture(name)
        assert "known families: Llama" in (error.value.hint or "")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(UsageProblem, match="type `gpt2`"):
        architecture(str(tmp_path))


def stack(directory: Path, **more: Any) -> BlockStack:
    plain = {"medium": "disk", "in_memory": False, "redundant": False, "leaves": (DISK,)}
    return replace(read_stack(str(directory)), **{**plain, **more})


@pytest.fixture
def on_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The temporary directory may lie in memory, and this machine may be small."""
    monkeypatch.setattr(media, "read_stack", lambda _: stack(tmp_path))
    monkeypatch.setattr(preflight, "bytes_left", lambda: 64 * GB)
    monkeypatch.setattr(preflight, "free_bytes", lambda _: 100 * GB)
    monkeypatch.setattr(preflight, "memlock", lambda: None)
    monkeypatch.setattr(preflight, "aio_left", lambda: 65536)
    monkeypatch.setattr(preflight, "device_nodes", lambda _: [])


@pytest.mark.usefixtures("on_a_disk")
def test_files_are_laid_out_so_that_both_blocks_can_move_them(tmp_path: Path) -> None:
    other = replace(TUNED, intra_op_parallelism=4)
    request = Request(model="llama-tiny", target=tmp_path, parameters="nvme", ranks=2)
    planned = preflight.plan(request, other)
    assert planned.aio["intra_op_parallelism"] == 4
    assert planned.aio["block_size"] == MIB, "what the default swaps, the tuned block moves too"
    assert preflight.layout(
        [{"intra_op_parallelism": 6, "block_size": 4}, {"intra_op_parallelism": 4, "block_size": 2}]
    ) == {
        "intra_op_parallelism": 12,
        "block_size": 2,
    }
    made = preflight.configure(request, planned, CPU)
    target, dram = made.configs["target"], made.configs["dram"]
    changed = {"offload_optimizer", "offload_param"}
    assert {name: value for name, value in target["zero_optimization"].items() if name not in changed} == {
        name: value for name, value in dram["zero_optimization"].items() if name not in changed
    }, "only the place differs"
    assert dram["zero_optimization"]["offload_param"]["device"] == "cpu"
    assert "aio" not in dram
    here = preflight.placed(target, tmp_path / "run")["zero_optimization"]
    assert {here[name]["nvme_path"] for name in changed} == {str(tmp_path / "run")}
    expected = 2 * zero.nvme_bytes(zero.partitions(planned.model, 2), states=True, parameters=True)
    assert made.file_bytes == pytest.approx(expected, rel=0.01)
    kept = preflight.configure(replace(request, parameters="device"), planned, CPU)
    assert "offload_param" not in kept.configs["target"]["zero_optimization"]
    assert kept.file_bytes < made.file_bytes
    assert preflight.plan(request, DEFAULTS).blocks.keys() == {"default"}


@pytest.mark.usefixtures("on_a_disk")
def test_what_does_not_fit_is_said_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    huge = Request(model="70b", target=tmp_path)
    with pytest.raises(CannotJudge, match=r"1\.411 TB of it with its states in DRAM; 64 GB are left") as error:
        preflight.configure(huge, preflight.plan(huge), CPU)
    assert "--without-dram" in (error.value.hint or "")
    less = replace(huge, without_dram=True)
    with pytest.raises(CannotJudge, match=r"in each node's memory|GiB"):
        preflight.configure(less, preflight.plan(less), CPU)
    seven = Request(model="llama2-7b", target=tmp_path, without_dram=True)
    with pytest.raises(CannotJudge, match=r"has 9\d.* GB free, but the swap files of `llama2-7b` take 12"):
        preflight.configure(seven, preflight.plan(seven), CPU)
    monkeypatch.setattr(preflight, "aio_left", lambda: 10)
    with pytest.raises(CannotJudge, match=r"asynchronous requests, `fs.aio-max-nr` leaves 10"):
        preflight.plan(seven)


def test_files_that_are_short_or_have_holes_are_seen(tmp_path: Path) -> None:
    expected = SwapFiles([8192, 8192], [4096], [])
    configured = Configured({}, [expected, expected], 0, "bf16")
    for rank in (0, 1):
        folder = tmp_path / f"zero_stage_3/optimizer/rank{rank}"
        folder.mkdir(parents=True)
        for number, size in enumerate(expected.sizes):
            (folder / f"{number}.tensor.swp").write_bytes(bytes([1]) * size)
    assert preflight.shortfall(configured, tmp_path) is None
    hole = tmp_path / "zero_stage_3/optimizer/rank1/2.tensor.swp"
    hole.unlink()
    with hole.open("wb") as file:
        file.truncate(8192)
    assert preflight.shortfall(configured, tmp_path) == ("rank 1's swap files hold 12288 of 20480 bytes", 8192)
    hole.write_bytes(b"1" * 4096)
    what, missing = preflight.shortfall(configured, tmp_path) or ("", 0)
    assert what == "rank 1 has 3 swap files of 16384 bytes in all, and must have 3 of 20480"
    assert missing == 4096


def step(seconds: float, known: BlockStack | None, moment: float = 1.0, counted: int = GB) -> Step:
    if known is None:
        return Step(seconds, 5.0, {})
    moved = Moved(GB, seconds / 4, seconds / 2, Counted(GB, counted, {}), moment)
    return Step(seconds, 5.0, {"read": moved, "write": moved})


def row(place: str, block: str, known: BlockStack | None, seconds: Sequence[float]) -> Row:
    medium = known.medium if known is not None else DRAM
    made = Row(place, block, medium, known)
    for number, each in enumerate(seconds, 1):
        made.steps[number] = step(each, known, float(number))
        if known is not None:
            for direction in made.rungs:
                made.rungs[direction][number] = Rung(GB, 0.25, Counted(GB, GB, {}), float(number))
    return made


def rows(directory: Path, default: float = 4.0, tuned: float = 2.0, dram: float = 1.0, rounds: int = 6) -> list[Row]:
    known = stack(directory)
    return [
        row("target", "default", known, [default] * rounds),
        row("target", "tuned", known, [tuned] * rounds),
        row("dram", "", None, [dram] * rounds),
    ]


BLOCKS = {"default": DEFAULTS.block(), "tuned": TUNED.block()}
CONDITIONS: Mapping[str, Any] = {
    "model": "llama-tiny",
    "parameters": 34_000_000,
    "parameters_on": "device",
    "ranks": 1,
    "tokens": 512,
    "swap_bytes": GB,
    "device": "cpu",
}


def places(*ours: float) -> list[Place]:
    losses = list(ours or (5.0, 4.0, 3.0))
    return [Place("target", "disk", losses, 3, GB), Place("dram", DRAM, [5.0, 4.0, 3.0])]


def record_of(made: list[Row], found: list[Place] | None = None) -> Record:
    case = figures.case(made, places() if found is None else found, CONDITIONS, BLOCKS, [])
    return builders.record(
        *case.measurements,
        kind="bench.offload",
        target="/mnt",
        node=node(),
        checks=list(case.checks),
        verdict=judge(case),
    )


def test_a_step_is_split_and_compared(tmp_path: Path) -> None:
    record = record_of(rows(tmp_path))
    by_name = {each.name.removeprefix("offload."): each for each in record.measurements}
    values = {name: by_name[f"target.default.{name}"].value for name in ("step", "compute", "read", "write")}
    assert values == {"step": 4.0, "compute": 2.0, "read": 1.0, "write": 1.0}
    # 1 GB in the 2 s for which reads were in flight; the handle alone moves 4 GB/s.
    assert by_name["target.default.read.bandwidth"].value == 0.5 * GB
    assert by_name["target.default.read.rung"].value == 4 * GB
    assert by_name["target.default.read.share"].value == 0.125
    assert by_name["target.tuned.gain"].value == 2.0
    assert by_name["target.tuned.gain"].parameters["decided"] is True
    assert by_name["target.default.against_dram"].value == 0.25
    assert "target.default.gain" not in by_name
    assert "dram.against_dram" not in by_name
    assert by_name["dram.step"].medium == DRAM
    evidence = by_name["target.tuned.write.bandwidth"].evidence
    assert evidence is not None
    assert (evidence.kind, evidence.claimed_bytes) == ("block", 6 * GB)
    assert record.verdict is not None
    assert record.verdict.status == "pass"


def test_files_and_losses_are_judged(tmp_path: Path) -> None:
    def statuses(found: list[Place]) -> dict[str, str]:
        return {check.id.removeprefix("offload."): check.status for check in figures.checks(found)}

    assert statuses(places()) == {"target.files": "pass", "target.losses": "pass", "dram.losses": "pass"}
    assert statuses(places(5.0, 4.01, 3.0))["target.losses"] == "pass"
    for wrong in ((5.0, 4.0, 3.1), (5.0, float("nan"), 3.0)):
        assert statuses(places(*wrong))["target.losses"] == "fail"
        verdict = judge(figures.case(rows(tmp_path), places(*wrong), CONDITIONS, BLOCKS, []))
        assert verdict.status == "fail"
    nothing = [replace(place, losses=[0.0, 0.0]) for place in places()]
    assert statuses(nothing)["target.losses"] == "pass", "two losses of 0 are equal"
    made = places()
    made[0].wrong_files = "after target.default-1: rank 0 has 3 swap files"
    assert statuses(made)["target.files"] == "fail"
    assert statuses(places()[:1]) == {"target.files": "pass", "target.losses": "pass"}, "it falls"
    assert statuses([replace(places()[0], losses=[5.0, 5.0])])["target.losses"] == "fail"
    assert set(statuses([Place("target", "disk")]).values()) == {"skip"}


def test_bytes_that_the_drives_did_not_see_prove_nothing(tmp_path: Path) -> None:
    made = rows(tmp_path)
    made[0].steps[1] = step(4.0, made[0].stack, counted=GB // 10)
    assert any("counted only 0.100" in reason for reason in figures.unproven_reasons(made))
    memory = [row("memory", "default", stack(tmp_path, in_memory=True, medium="tmpfs"), [1.0])]
    assert figures.unproven_reasons(memory) == []


def shown(made: list[Row], found: list[Place] | None = None) -> str:
    return " ".join(on_screen(record_of(made, found), None, 120).split())


def test_the_tables_end_with_a_sentence_of_advice(tmp_path: Path) -> None:
    text = shown(rows(tmp_path))
    assert "disk, default 4.00 4.00 to 4.00 2.00 1.00 1.00 - 0.25 " in text
    assert "disk, tuned 1.00 4.00 0.25 1.00 4.00 0.25 " in text
    assert (
        "offload to DRAM while the states fit there, else to disk: disk has 0.25 times (0.25 to 0.25) its speed"
        in text.replace("0.250", "0.25")
    )
    assert f"use the tuned block, {TUNED}, on disk: 2.00 times (2.00 to 2.00) the default's speed" in text
    assert "DRAM suffices on this node up to" in text
    assert "(18 bytes each" in text
    undecided = shown(rows(tmp_path, rounds=2))
    assert (
        "offload to disk where memory is short: these rounds do not decide whether DRAM is faster than disk"
        in undecided
    )
    assert "keep the default `aio` block on disk: these rounds do not decide" in undecided
    assert "(2.00)" in undecided
    slower = shown(rows(tmp_path, tuned=8.0))
    assert "has 0.5 times (0.5 to 0.5) its speed" in slower
    alone = shown(rows(tmp_path)[:1], places()[:1])
    assert "DRAM was not measured beside it; use DeepSpeed's default `aio` block, the only one" in alone
    memory = [replace(each, place="memory", medium="tmpfs") if each.block else each for each in rows(tmp_path)]
    assert "a tmpfs is memory too, and saves none: tmpfs has 0.25 times" in shown(memory)
    dram_only = record_of(rows(tmp_path)[2:])
    assert view(dram_only).advice == []


def test_the_page_has_the_tables_and_a_plot_for_each_direction(tmp_path: Path) -> None:
    text = page_text(record_of(rows(tmp_path)), None)
    assert text.count("<svg") == 3
    assert "offload.target.losses" in text
    assert page_text(record_of([], []), None) == ""


def test_without_deepspeed_everything_is_left_out() -> None:
    missing = CannotJudge("deepspeed is not installed in `/usr/bin/python3`", "`pip install ...`")
    case = figures.case([], [], {}, BLOCKS, [], missing)
    (check,) = case.checks
    assert (check.id, check.status, check.remedy) == ("offload.deepspeed", "skip", "`pip install ...`")
    verdict = judge(case)
    assert verdict.status == "unproven"
    assert "`pip install ...`" in verdict.reasons[0]
