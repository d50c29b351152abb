"""The strategies' experiment without ranks: cells, fits, predictions, figures and reports."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import record
from calls import benchmark
from shown_records import on_screen
from tunetool.advise.communication import Call, Kind, Module, Parameter, Zero, parameters, trained
from tunetool.advise.qwen2_5_vl import CONFIGURATIONS
from tunetool.advise.zero_steps import Ask, Wait, Work
from tunetool.bench.defaults import MATRIX
from tunetool.bench.strategies import figures
from tunetool.bench.strategies.hooks import AGAIN, CASES, KEPT, REPLICATED, configuration, hooks_of
from tunetool.bench.strategies.job import job as job_of
from tunetool.bench.strategies.link import Fit, Network, fit
from tunetool.bench.strategies.matrix import ALONE, Cell, Fitted, Layout, layouts, parse
from tunetool.bench.strategies.matrix import fit as fitted
from tunetool.bench.strategies.network import RankFigures
from tunetool.bench.strategies.predict import LEFT_OUT, Hooks, Job, Layouts, Prediction, predict
from tunetool.bench.strategies.replay import compute_of, replay
from tunetool.bench.strategies.samples import Row, Sample, Study, sample
from tunetool.bench.strategies.view import view
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.record import Node, Record
from tunetool.report.kinds import page_text
from tunetool.training.workload import RankResult, Workload
from tunetool.verdict import judge

SLOW = 125e6
"""1 Gb/s."""


def cell(text: str) -> Cell:
    return parse(text)[0]


def net(bandwidth: float, latency: float = 1e-3) -> Network:
    """A link that carries ``bandwidth`` bytes/s of an all-reduce's vector on two ranks, twice that of an all-gather's."""
    kinds: dict[Kind, Fit] = {
        "all_reduce": Fit(latency, 1 / bandwidth, 0.0),
        "all_gather": Fit(latency, 0.5 / bandwidth, 0.0),
        "reduce_scatter": Fit(latency, 1 / bandwidth, 0.0),
    }
    return Network(kinds, latency / 10)


# Cells


def test_the_default_matrix_is_the_published_experiment() -> None:
    assert [str(each) for each in parse(MATRIX)] == ["1x1:z2", "1x8:z2", "2x8:z2", "2x8:z3", "1x8:z3"]
    option = next(each for each in benchmark("strategies").params if each.name == "matrix")
    assert option.default == MATRIX


@pytest.mark.parametrize("bad", ["1x1", "0x1:z2", "2x8:z4", "2x8:3", "x8:z2", "1x1:z2,", "2*8:z3", "1x1:z2 1x2:z2"])
def test_a_bad_cell_is_named(bad: str) -> None:
    with pytest.raises(UsageProblem) as refused:
        parse(f"1x4:z2,{bad}")
    assert f"`{bad.rpartition(',')[2] if bad.endswith(',') else bad}`" in refused.value.message


def test_a_cell_that_stands_twice_is_named() -> None:
    with pytest.raises(UsageProblem, match="`1x2:z3` occurs twice"):
        parse("1x2:z3,1x1:z2, 1x2:z3")


def test_cells_are_scaled_to_what_there_is_and_told() -> None:
    scaled = fitted(parse(MATRIX), nodes=2, ranks=2)
    assert [str(each) for each in scaled.cells] == ["1x1:z2", "1x2:z2", "2x2:z2", "2x2:z3", "1x2:z3"]
    assert scaled.notes[1] == "2x8:z2 -> 2x2:z2: there are 2 node(s) with 2 each"


def test_without_a_second_node_its_network_is_left_out() -> None:
    scaled = fitted(parse(MATRIX), nodes=1, ranks=1)
    assert [str(each) for each in scaled.cells] == ["1x1:z2", "1x1:z3"]
    assert [(str(each), reason.split(",")[0]) for each, reason in scaled.left_out] == [
        ("1x8:z2", "scaled to what there is"),
        ("2x8:z2", "it needs 2 nodes"),
        ("2x8:z3", "it needs 2 nodes"),
    ]


def test_one_rank_alone_is_always_measured() -> None:
    assert layouts(parse("2x1:z3,2x1:z2")) == [ALONE, Layout(2, 1)]


# Fits


@given(st.floats(1e-6, 0.1), st.floats(1e7, 1e11))
def test_a_fit_finds_the_line_that_made_the_points(latency: float, bandwidth: float) -> None:
    line = fit([(size, latency + size / bandwidth) for size in (4096, 2**16, 2**20, 2**26)])
    assert line.worst < 1e-6
    assert line.seconds(2**24) == pytest.approx(latency + 2**24 / bandwidth, rel=1e-6)


@given(st.lists(st.tuples(st.integers(1, 2**28), st.floats(1e-6, 100)), min_size=1, max_size=8))
def test_no_fit_has_negative_parts(points: list[tuple[int, float]]) -> None:
    line = fit(points)
    assert line.latency >= 0
    assert line.per_byte >= 0


def test_small_sizes_count_as_much_as_large_ones() -> None:
    noisy = fit([(4096, 1e-3), (2**26, 0.5 * 1.1), (2**24, 0.125)])
    assert noisy.latency == pytest.approx(1e-3, rel=0.1)


# A step, replayed


def test_a_collective_is_hidden_by_what_is_computed_meanwhile() -> None:
    asked = Ask(Call("all_gather", 1000), 1)
    line = Network({"all_gather": Fit(0.0, 1e-3, 0.0)}, 0.0)  # type: ignore[dict-item]
    assert replay([asked, Work(1), Wait(1)], line, 4.0).seconds == 4.0
    late = replay([asked, Wait(1), Work(1)], line, 4.0)
    assert (late.seconds, late.exposed) == (5.0, 1.0)


def test_collectives_queue_and_then_pay_less_latency() -> None:
    asks = [Ask(Call("all_gather", 0), number) for number in (1, 2, 3)]
    line = Network({"all_gather": Fit(1.0, 0.0, 0.0)}, 0.1)  # type: ignore[dict-item]
    assert replay([*asks, Wait(3)], line, 0.0).seconds == pytest.approx(1.2)


@settings(max_examples=25)  # each replays a whole step
@given(st.floats(0.01, 10), st.floats(1e6, 1e10))
def test_computation_is_found_again_in_a_measured_step(compute: float, bandwidth: float) -> None:
    events = tiny().events(cell("2x1:z3"))
    step = replay(events, net(bandwidth), compute).seconds
    again = compute_of(events, net(bandwidth), step)
    assert replay(events, net(bandwidth), again).seconds == pytest.approx(step, rel=1e-6)


def tiny(*, full: bool = False) -> Job:
    return job_of(Workload(model="m", dataset="d", full=full), CONFIGURATIONS["tiny"], cuda=False)


def big() -> Job:
    return job_of(Workload(model="m", dataset="d"), CONFIGURATIONS["7b"], cuda=True)


def one_gbit(job: Job, layout: str = "2x1") -> Layouts:
    return Layouts({cell(f"{layout}:z2").layout: net(SLOW)}, {ALONE: 1.0, cell(f"{layout}:z2").layout: 1.0})


def test_nothing_is_predicted_from_nothing() -> None:
    assert predict(cell("1x1:z2"), tiny(), Layouts({}, {ALONE: 1.0}), {}) is None


def test_two_stages_are_ranked_as_published() -> None:
    """7B LoRA over 1 Gb/s: ZeRO-3 on two nodes several times slower than one GPU, ZeRO-2 hardly slower."""
    job = big()
    measured = {cell("1x1:z2"): 2.0}
    second, third = (predict(cell(f"2x1:z{stage}"), job, one_gbit(job), measured) for stage in (2, 3))
    assert second is not None
    assert third is not None
    assert 2.0 < second.step < 3.0
    assert third.step > 20 * second.step
    assert third.exposed > 0.9 * third.step


def test_costs_of_a_stage_and_of_shared_cores_are_told_apart() -> None:
    job = tiny()
    layouts_ = Layouts({cell("1x2:z2").layout: net(1e9)}, {ALONE: 1.0, cell("1x2:z2").layout: 1.5})
    guess = predict(cell("1x2:z3"), job, layouts_, {cell("1x2:z2"): 0.4})
    assert guess is not None
    assert "(a cell `1x1:z3` before it would measure that)" in guess.basis
    alone = predict(cell("1x2:z3"), job, layouts_, {cell("1x1:z3"): 0.4})
    assert alone is not None
    assert alone.compute == pytest.approx(0.6)
    assert "times 1.50" in alone.basis
    pair = predict(cell("1x2:z3"), job, layouts_, {cell("1x1:z2"): 0.2, cell("1x1:z3"): 0.4, cell("1x2:z2"): 0.5})
    assert pair is not None
    assert pair.compute == pytest.approx(2 * compute_of(job.events(cell("1x2:z2")), net(1e9), 0.5), rel=1e-6)
    disturbed = predict(cell("1x2:z3"), job, layouts_, {cell("1x1:z2"): 9.0, cell("1x1:z3"): 0.4, cell("1x2:z2"): 0.5})
    assert disturbed is not None
    assert disturbed.compute == pytest.approx(pair.compute / 2, rel=1e-6)
    assert pair.basis == "1x2:z2 less its communication, times 1x1:z3 / 1x1:z2"


# The cost of stage 3's hooks


def small() -> Job:
    return job_of(Workload(model="m", dataset="d"), configuration(), cuda=False)


def probed_steps(hooks: Hooks, layout: Layout, network: Network | None, compute: float) -> dict[str, float]:
    """The steps of a probe whose hooks take exactly that time."""
    steps = {}
    for case, fields in CASES.items():
        job = small()
        job = replace(job, settings={**job.settings, fields["stage"]: replace(job.settings[fields["stage"]], **fields)})
        used = Cell(layout, fields["stage"])
        more = hooks.seconds(*job.counts(used)) if fields["stage"] == 3 else 0.0
        steps[case] = replay(job.events(used), network, compute + more).seconds
    return steps


@settings(max_examples=25)  # each replays three whole steps
@given(st.floats(0.0, 2e-3), st.floats(0.0, 2e-3), st.sampled_from(["1x1", "1x2", "2x1"]), st.floats(0.01, 1.0))
def test_a_probe_finds_what_each_module_and_each_gather_cost(
    per_use: float, per_gather: float, where: str, compute: float
) -> None:
    layout = cell(f"{where}:z3").layout
    network = None if layout == ALONE else net(1e9, 1e-4)
    cost = hooks_of(small(), layout, network, probed_steps(Hooks(per_use, per_gather), layout, network, compute))
    assert cost.per_use == pytest.approx(per_use, abs=2e-6)
    assert cost.per_gather == pytest.approx(per_gather, abs=2e-6)


@pytest.mark.parametrize(
    "steps",
    [
        {REPLICATED: 0.5, KEPT: 0.4, AGAIN: 0.3},
        {REPLICATED: 0.1, KEPT: 0.2, AGAIN: 0.1},
        {REPLICATED: 0.1, KEPT: 0.11, AGAIN: 0.9},
    ],
)
def test_a_disturbed_probe_has_no_negative_parts(steps: dict[str, float]) -> None:
    cost = hooks_of(small(), ALONE, None, steps)
    assert cost.per_use >= 0
    assert cost.per_gather >= 0


def test_the_probe_gathers_more_in_one_case_than_in_the_other() -> None:
    counts = {}
    for case in (KEPT, AGAIN):
        job = small()
        job = replace(job, settings={**job.settings, 3: replace(job.settings[3], **CASES[case])})
        counts[case] = job.counts(cell("1x1:z3"))
    assert counts[KEPT][0] == counts[AGAIN][0]
    assert counts[AGAIN][1] > counts[KEPT][1] > 0


def hooked(job: Job, hooks: Hooks, second: float = 1.0, bandwidth: float = 1e11) -> tuple[Layouts, dict[Cell, float]]:
    """One rank and two ranks with the steps of the prediction's model, and hooks that take exactly that time."""
    pair = Layout(1, 2)
    layouts_ = Layouts({pair: net(bandwidth, 1e-5)}, {ALONE: 1.0, pair: 1.2}, {ALONE: hooks, pair: hooks})
    steps = {}
    for text, compute in (("1x1:z2", second), ("1x1:z3", second), ("1x2:z2", 1.2 * second), ("1x2:z3", 1.2 * second)):
        each = cell(text)
        more = hooks.seconds(*job.counts(each)) if each.stage == 3 else 0.0
        steps[each] = replay(job.events(each), layouts_.networks.get(each.layout), compute + more).seconds
    return layouts_, steps


@pytest.mark.parametrize("text", ["1x1:z2", "1x1:z3", "1x2:z2", "1x2:z3"])
def test_each_cell_is_predicted_from_the_others_hooks_and_all(text: str) -> None:
    job = big()
    layouts_, steps = hooked(job, Hooks(5e-4, 3e-4))
    made = predict(cell(text), job, layouts_, steps)
    assert made is not None
    assert made.step == pytest.approx(steps[cell(text)], rel=0.02)
    assert ("hooks by a probe" in made.basis) == text.endswith("z3")


def test_hooks_are_in_the_first_prediction_of_stage_3_already() -> None:
    job = big()
    layouts_, steps = hooked(job, Hooks(5e-4, 3e-4), second=0.5)
    first = predict(cell("1x1:z3"), job, layouts_, {cell("1x1:z2"): 0.5})
    assert first is not None
    assert first.step == pytest.approx(steps[cell("1x1:z3")], rel=1e-6)
    assert first.step > 2 * 0.5
    without = predict(cell("1x1:z3"), job, replace(layouts_, hooks={}), {cell("1x1:z2"): 0.5})
    assert without is not None
    assert without.step == pytest.approx(0.5)
    assert "without the cost of stage 3's own hooks" in without.basis


def test_another_cell_of_stage_3_corrects_the_probe() -> None:
    job = big()
    layouts_, steps = hooked(job, Hooks(5e-4, 3e-4))
    half = replace(layouts_, hooks={layout: Hooks(2.5e-4, 1.5e-4) for layout in layouts_.hooks})
    made = predict(cell("1x2:z3"), job, half, steps)
    assert made is not None
    assert made.step == pytest.approx(steps[cell("1x2:z3")], rel=0.02)
    assert "times 2.00 as 1x1:z3 took of it" in made.basis


def test_stage_2_is_predicted_from_stage_3_without_its_hooks() -> None:
    job = big()
    layouts_, steps = hooked(job, Hooks(5e-4, 3e-4))
    made = predict(cell("1x2:z2"), job, layouts_, {cell("1x2:z3"): steps[cell("1x2:z3")]})
    assert made is not None
    assert made.step == pytest.approx(steps[cell("1x2:z2")], rel=0.02)
    assert made.basis == "1x2:z3 less communication and less hooks by a probe"


def test_a_cell_is_never_predicted_from_itself() -> None:
    job = big()
    layouts_, steps = hooked(job, Hooks(5e-4, 3e-4))
    for each in steps:
        assert predict(each, job, layouts_, steps) == predict(each, job, layouts_, {**steps, each: 99.0})
        assert predict(each, job, layouts_, {each: 1.0}) is None


def test_the_prediction_is_the_middle_of_those_from_warm_cells() -> None:
    def made(step: float) -> Prediction:
        return Prediction(step, step, 0.0, 0.0, 0, "x")

    row = Row(cell("1x1:z2"), [None, made(9.0)])
    assert row.prediction == made(9.0)
    row = Row(cell("1x1:z2"), [made(99.0), made(3.0), made(1.0), made(2.0)])
    assert row.prediction == made(2.0)
    assert Row(cell("1x1:z2"), [made(5.0)]).prediction == made(5.0)
    assert Row(cell("1x1:z2"), [None]).prediction is None
    row.samples = [Sample(step, 0.0, {}, []) for step in (50.0, 1.0, 3.0)]
    assert (row.step, row.warm_step) == (3.0, 2.0)


# Figures


def result(rank: int, steps: list[float], losses: list[float]) -> RankResult:
    return RankResult(
        rank=rank,
        host="node1",
        local_rank=rank,
        device="cpu",
        seconds={"rendezvous": 1.0 + rank, "imports": 2.0, "communicator": 0.1, "model_load": 0.2, "engine": 0.3},
        data_seconds=[0.01] * len(steps),
        step_seconds=steps,
        losses=losses,
        learning_rates=[1e-4] * len(steps),
        tokens=10,
        images=2,
        model_bytes=100,
        read_bytes={},
        parameters=9_640_960,
        trainable=0,
        versions={"deepspeed": "0.19.8", "torch": "2.13.0"},
    )


def test_the_slowest_rank_counts_and_the_first_steps_do_not() -> None:
    taken = sample([result(0, [9, 9, 1, 4, 1], [3, 2, 1, 1, 1]), result(1, [9, 9, 2, 2, 2], [1, 2, 1, 1, 1])])
    assert taken.step == 2
    assert taken.start["rendezvous"] == 2.0
    assert taken.losses[0] == 2.0
    with pytest.raises(CannotJudge, match="no more than 2 steps"):
        sample([result(0, [1, 1], [1, 1])])


def networks_of(layout: Layout, memory: int = 8 * 10**9) -> list[RankFigures]:
    points: Any = {
        kind: [(size, [1e-3 + size * per / SLOW] * 3) for size in (4096, 2**20, 2**24)]
        for kind, per in (("all_reduce", 1.0), ("all_gather", 0.5), ("reduce_scatter", 1.0))
    }
    return [
        RankFigures(
            rank=rank,
            host=f"node{rank}",
            backend="gloo",
            device="cpu",
            work=[0.01, 0.011],
            memory_bytes=memory,
            points=points if layout.world > 1 else {},
            queued=[1e-4] * 5 if layout.world > 1 else [],
            latency=[1e-3] * 5 if layout.world > 1 else [],
        )
        for rank in range(layout.world)
    ]


def study(
    losses: float = 1.0, memory: int = 100 * 10**9, third: float = 4.0, job: Job | None = None
) -> tuple[Study, Job]:
    job = job or tiny()
    cells = parse("1x1:z2,2x1:z2,2x1:z3")
    made = Study(Fitted(tuple(cells), (), ((cell("4x1:z2"), "there is one"),)), {each: Row(each) for each in cells})
    made.rank_figures = {layout: networks_of(layout, memory) for layout in layouts(cells)}
    measured: dict[Cell, float] = {}
    for each, step, loss in zip(cells, (1.0, 1.2, third), (1.0, 1.0, losses), strict=True):
        row = made.rows[each]
        row.predictions = [predict(each, job, made.layouts(), measured)]
        row.samples = [Sample(step * drift, 0.01, {"imports": 3.0, "engine": 1.0}, [loss] * 4) for drift in (1, 1.1)]
        measured[each] = row.step
    sizes = [sum(each.numel for each in tensors) for tensors in (parameters(job.modules), trained(job.modules))]
    made.first = replace(result(0, [1.0] * 4, [1.0] * 4), parameters=sizes[0], trainable=sizes[1])
    return made, job


CONDITIONS: dict[str, Any] = {
    "model": "m",
    "tuning": "LoRA, rank 8",
    "batch_size": 2,
    "steps": 8,
    "images": 16,
    "launcher": "ssh",
    "compute": "cpu",
    "deepspeed_version": "0.19.8",
}


def kept(made: Study, job: Job) -> Record:
    measurements = figures.measurements(made, job, CONDITIONS)
    checks, verdict = figures.checks(made, job), judge(figures.case(made, job, CONDITIONS))
    return record(*measurements, kind="bench.strategies", node=Node(host="node1"), checks=checks, verdict=verdict)


def shown(record: Record) -> str:
    return on_screen(record, Path("/runs/x/record.json"), 100)


def test_each_round_says_how_far_off_its_prediction_was() -> None:
    made, job = study()
    row = made.rows[cell("2x1:z3")]
    first = row.predictions[0]
    assert first is not None
    row.predictions = [first, replace(first, step=3.0), replace(first, step=6.0)]
    row.samples = [replace(row.samples[0], step=step) for step in (4.0, 4.0, 5.0)]
    by_name = {each.name: each for each in kept(made, job).measurements}
    error = by_name["strategies.prediction_error.2x1.z3"]
    assert error.samples == pytest.approx([0.25, 0.2])  # not of the first round, whose cells were cold
    assert (error.unit, error.better) == ("1", "lower")
    row.predictions = [None, None, None]
    assert "strategies.prediction_error.2x1.z3" not in {each.name for each in kept(made, job).measurements}


def test_prediction_and_measurement_stand_side_by_side() -> None:
    made, job = study()
    by_name = {each.name: each for each in kept(made, job).measurements}
    step = by_name["strategies.step.2x1.z3"]
    parameters = step.parameters
    assert step.value == pytest.approx(4.2)
    assert float(parameters["predicted_seconds"]) == pytest.approx(4.2 * (1 + float(parameters["prediction_error"])))
    assert by_name["strategies.versus_zero2.2x1.z3"].value == pytest.approx(4.0 / 1.2)
    # Two ranks, twice the samples in a step.
    assert by_name["strategies.versus_alone.2x1.z3"].value == pytest.approx(2.0)
    assert by_name["strategies.efficiency.2x1.z2"].value == pytest.approx(1 / 1.2)
    assert by_name["strategies.start.2x1.z2"].value == pytest.approx(4.0)
    bus = by_name["strategies.network.2x1.all_gather.bus_bandwidth"]
    assert bus.value == pytest.approx(SLOW, rel=1e-3), "an all-gather's vector at twice the link, half of it sent"
    assert "strategies.network.1x1.latency" not in by_name


def test_the_advice_names_the_times_and_what_the_link_would_need() -> None:
    """7B over 1 Gb/s: 18.6 GB a step, and a second of computation."""
    made, job = study(third=120.0, job=big())
    (line, *_) = view(kept(made, job)).advice
    assert line.startswith(
        "ZeRO-3 on 2 nodes x 1 rank takes 100.0x the time of ZeRO-2: use ZeRO-2 or a faster link: each"
    )
    assert "per step at 0.125 GB/s" in line
    made, job = study(third=120.0, job=big(), memory=16 * 10**9)
    assert "which does not fit: ZeRO-2 needs 16.77 GB on each rank" in view(kept(made, job)).advice[0]


def test_the_advice_tells_a_slow_network_from_slow_hooks() -> None:
    made, job = study()
    assert "it does not wait for the network" in view(kept(made, job)).advice[0]
    made, job = study(third=1.2)
    assert "takes about as long as ZeRO-2 (1.00x" in view(kept(made, job)).advice[0]


def test_page_and_screen_have_every_cell() -> None:
    made, job = study()
    whole = kept(made, job)
    text, html = shown(whole), page_text(whole, None)
    for name in ("1x1:z2", "2x1:z2", "2x1:z3"):
        assert name in text
        assert name in html
    assert "left out, there is one" in text
    assert "2x1:z3 predicted" in html
    assert max(map(len, text.splitlines())) <= 100


def test_published_epochs_are_beside_ours_with_their_corrections() -> None:
    made, job = study()
    whole = kept(made, job)
    text, html = " ".join(shown(whole).split()), page_text(whole, None)
    # 16 images, 2 samples of one rank in a step: 8 steps of 1.05 s. Two nodes stand for 2x8.
    assert "1x1 a little over an hour 1 1x1:z2 8.40 s 1" in text
    assert "2x8:z3 about 3 times as long as one GPU ~3 2x1:z3 16.80 s 2.00" in text
    assert "1x8:z2 ~ 9 minutes 0.11-0.16 - - -" in text
    for words in ("Mark III Systems Blog", "1000 Mb/s are 0.125 GB/s", "only where most of them are frozen"):
        assert words in text
        assert words in html
    assert LEFT_OUT.partition(";")[0] in text
    assert LEFT_OUT.partition(";")[0] in html


def test_what_the_probe_found_or_why_it_did_not_is_in_the_record() -> None:
    made, job = study()
    made.hooks = {Layout(2, 1): Hooks(5e-4, 3e-4)}
    made.unprobed = {ALONE: "the probe failed: no module `peft`"}
    whole = kept(made, job)
    by_name = {each.name: each.value for each in whole.measurements}
    assert by_name["strategies.network.2x1.hooks_per_use"] == 5e-4
    assert by_name["strategies.network.2x1.hooks_per_gather"] == 3e-4
    assert "hooks.1x1: left out, the probe failed: no module `peft`" in " ".join(shown(whole).split())
    assert whole.verdict is not None
    assert whole.verdict.status == "pass"


def test_stages_that_compute_different_things_fail() -> None:
    made, job = study(losses=1.2)
    assert judge(figures.case(made, job, CONDITIONS)).status == "fail"
    assert any("they differ by up to 20" in check.found for check in figures.checks(made, job))
    assert judge(figures.case(*study(), CONDITIONS)).status == "pass"


def test_the_cure_of_a_loss_that_is_no_number_has_its_own_option() -> None:
    made, job = study(losses=float("nan"))
    checks = {check.id: check for check in figures.checks(made, job)}
    failed = checks["strategies.2x1.z3"]
    assert failed.status == "fail"
    own = {name for option in benchmark("strategies").params for name in option.opts}
    named = re.findall(r"`(--[a-z-]+)`", failed.remedy or "")
    assert [name for name in named if name not in own] == []
    assert "`tunetool bench finetune --learning-rate`" in (failed.remedy or "")


def test_a_cell_that_died_is_no_pass() -> None:
    made, _ = study()
    row = made.rows[cell("2x1:z3")]
    row.samples, row.failed = [], "rank 1 on `node2` died"
    verdict = judge(figures.case(made, None, CONDITIONS))
    assert verdict.status == "error"
    assert verdict.reasons == ["strategies.2x1.z3: rank 1 on `node2` died"]


def test_predictions_of_another_model_prove_nothing() -> None:
    made, job = study()
    assert made.first is not None
    made.first = replace(made.first, parameters=1)
    verdict = judge(figures.case(made, job, CONDITIONS))
    assert verdict.status == "unproven"
    assert "the predictions are for another model" in verdict.reasons[0]
    assert [check.status for check in figures.checks(made, job) if check.id == "strategies.model"] == ["unknown"]


def test_zero_of_the_ranks_own_configuration_is_what_is_replayed() -> None:
    cpu, gpu = tiny().settings, big().settings
    assert cpu[3] == Zero(3, 50_000_000, 50_000_000, overlap=False)
    assert gpu[2] == Zero(2, 50_000_000, overlap=True)
    assert (tiny().element_bytes, big().element_bytes) == (4, 2)


def test_a_module_without_work_takes_no_time() -> None:
    lookup = Module("embed", (Parameter("w", 1000, trained=False),), works=False)
    job = Job([lookup], {2: Zero(2)}, 4, "gloo")
    assert all(event.elements == 0 for event in job.events(cell("1x1:z2")) if isinstance(event, Work))
