"""The traffic of ZeRO, compared with the papers' counts and with observations of DeepSpeed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunetool.advise.communication import Backend, Module, Parameter, Zero, buckets, bus_factor, sent_share
from tunetool.advise.modules import in_full, modules_of, with_lora
from tunetool.advise.qwen2_5_vl import CONFIGURATIONS, LORA_TARGETS, is_tied, tensors
from tunetool.advise.zero import state_bytes
from tunetool.advise.zero_steps import Ask, Wait, events, traffic, uses

GB = 10**9


def qwen(size: str, *, full: bool = False) -> list[Module]:
    configuration = CONFIGURATIONS[size]
    listed = tensors(configuration, size)
    return modules_of(in_full(listed) if full else with_lora(listed, 8, LORA_TARGETS), is_tied(configuration))


@st.composite
def models(draw: st.DrawFn) -> list[Module]:
    """Layers with a large tensor and perhaps a small one, some of them trained."""
    made = []
    for number in range(draw(st.integers(1, 6))):
        sizes = draw(st.lists(st.integers(1, 3_000_000), min_size=1, max_size=3))
        held = tuple(Parameter(f"{number}.{index}", size, draw(st.booleans())) for index, size in enumerate(sizes))
        made.append(Module(str(number), held, block=number // 2))
    return made


stages = st.sampled_from([0, 1, 2, 3])
backends: st.SearchStrategy[Backend] = st.sampled_from(["gloo", "nccl"])
three = st.builds(
    Zero,
    st.just(3),
    reduce_bucket=st.sampled_from([100_000, 50_000_000]),
    prefetch_bucket=st.sampled_from([0, 1, 1_000_000, 50_000_000]),
    persistence=st.sampled_from([0, 100_000]),
    live=st.sampled_from([1_000_000, 10**9]),
    reuse=st.sampled_from([0, 1_000_000, 10**9]),
    recompute=st.booleans(),
)


@given(models(), stages, backends)
def test_one_rank_alone_sends_nothing(model: list[Module], stage: int, backend: Backend) -> None:
    sent = traffic(model, Zero(stage), 1, 2, backend)
    assert sent.calls == ()
    assert sent.sent == 0


@given(models(), stages, backends, st.integers(2, 64), st.integers(2, 4))
def test_more_ranks_send_no_less_each(
    model: list[Module], stage: int, backend: Backend, world: int, times: int
) -> None:
    fewer = traffic(model, Zero(stage), world, 2, backend).sent
    more = traffic(model, Zero(stage), world * times, 2, backend).sent
    assert more >= fewer * (1 - 1e-12)


@given(models(), three, st.integers(2, 16), backends)
def test_stage_3_gathers_all_that_stage_2_leaves_where_it_is(
    model: list[Module], zero: Zero, world: int, backend: Backend
) -> None:
    third = traffic(model, zero, world, 2, backend)
    whole = sum(each.numel for module in model for each in module.parameters)
    trained = sum(each.numel for module in model for each in module.parameters if each.trained)
    assert third.sizes["all_gather"] >= 2 * whole
    assert third.sizes["reduce_scatter"] >= 2 * trained
    second = traffic(model, Zero(2), world, 2, "gloo")
    assert second.sizes["all_reduce"] - 4 == second.sizes["all_gather"] == 2 * trained or trained == 0
    # On gloo a reduce-scatter is an all-reduce, so stage 3 is never cheaper.
    assert traffic(model, zero, world, 2, "gloo").sent >= second.sent


@given(models(), three, st.integers(2, 8))
def test_what_was_asked_for_is_waited_for_and_nothing_else(model: list[Module], zero: Zero, world: int) -> None:
    asked: list[int] = []
    waited: set[int] = set()
    for event in events(model, zero, world, 2):
        if isinstance(event, Ask):
            assert event.number not in asked
            asked.append(event.number)
        elif isinstance(event, Wait):
            assert event.number in asked
            waited.add(event.number)
    assert waited == set(asked)


@given(models(), three)
def test_every_parameter_is_there_when_its_module_runs(model: list[Module], zero: Zero) -> None:
    """The number of gathered elements equals that of the replay: without reuse and prefetch, each use is a gather."""
    strict = Zero(3, prefetch_bucket=0, persistence=0, reuse=0, recompute=zero.recompute)
    needed = traffic(model, strict, 2, 2, "nccl")
    wanted = sum(each.numel + each.numel % 2 for use in uses(model, zero.recompute) for each in use.module.parameters)
    # The last module of the forward pass is the first one of the backward pass: it is kept in between.
    kept = sum(each.numel + each.numel % 2 for each in model[-1].parameters)
    assert 2 * (wanted - kept) <= needed.sizes["all_gather"] <= 2 * wanted


@pytest.mark.parametrize(
    ("kind", "world", "backend", "share"),
    # Bytes that crossed a veth between two namespaces, over the bytes of a vector of 16 MiB: gloo of torch 2.13.
    [
        ("all_reduce", 2, "gloo", 1.001),
        ("all_gather", 2, "gloo", 0.501),
        ("reduce_scatter", 2, "gloo", 1.001),
        ("all_reduce", 4, "gloo", 1.502),
        ("all_gather", 4, "gloo", 0.751),
        ("reduce_scatter", 4, "gloo", 1.502),
    ],
)
def test_what_a_rank_sends_is_what_the_wire_carried(kind: str, world: int, backend: Backend, share: float) -> None:
    assert sent_share(kind, world, backend) == pytest.approx(share, abs=0.005)  # type: ignore[arg-type]


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    assert [bus_factor(kind, 8) for kind in ("all_reduce", "all_gather", "reduce_scatter")] == [1.75, 0.875, 0.875]


def test_the_paper_s_counts_and_what_deepspeed_makes_of_them() -> None:
    """psi all trained, many ranks: 3 psi for stage 3 (2 gathers, 1 reduce-scatter) and for DeepSpeed's stage 2 as well,
    whose gradients are all-reduced."""
    layers = [Module(str(n), (Parameter(str(n), 2_000_000, trained=True),)) for n in range(50)]
    psi = 2 * 100_000_000
    far = Zero(3, prefetch_bucket=0, reuse=0)
    assert traffic(layers, far, 1000, 2, "nccl").sent == pytest.approx(3 * psi, rel=0.02)
    assert traffic(layers, Zero(2), 1000, 2, "nccl").sent == pytest.approx(3 * psi, rel=0.01)


def test_a_small_model_is_gathered_once() -> None:
    layers = [Module(str(n), (Parameter(str(n), 2_000_000, trained=True),)) for n in range(50)]
    assert traffic(layers, Zero(3), 2, 4, "gloo").sizes["all_gather"] == 4 * 100_000_000
    assert traffic(layers, Zero(3, live=10_000_000, reuse=0), 2, 4, "gloo").sizes["all_gather"] > 7 * 100_000_000


def test_buckets_go_out_before_the_gradient_that_overfills_them() -> None:
    assert list(buckets([3, 3, 3, 9, 1], 6)) == [6, 3, 9, 1]
    assert list(buckets([], 6)) == []


def test_lora_sends_adapters_or_the_model_twice() -> None:
    """Qwen2.5-VL-7B on 16 ranks over 1 Gb/s, where the published job was three times slower than on one GPU."""
    model = qwen("7b")
    second, third = (traffic(model, Zero(stage), 16, 2, "nccl") for stage in (2, 3))
    adapters = sum(each.numel for module in model for each in module.parameters if each.trained)
    assert adapters == 20_185_088, "peft's own count of LoRA of rank 8 on every linear layer of the decoder"
    assert second.sent == pytest.approx(3 * 15 / 16 * 2 * adapters, rel=1e-6)
    # The decoder forward and backward; the vision tower and the embedding forward alone, since nothing before is trained.
    whole, tower, embedding = 8_292_166_656, 676_550_144, 152064 * 3584
    most = 2 * 15 / 16 * (2 * whole - tower - embedding)
    # DeepSpeed keeps parameters that were used less than a billion elements ago.
    assert most - 2 * 2 * GB < third.sent < most * 1.01
    assert third.sent / 125e6 > 150, "seconds of each step"


def test_recomputation_gathers_once_more() -> None:
    model = qwen("7b")
    plain, again = (traffic(model, Zero(3, recompute=recompute), 8, 2, "nccl").sizes for recompute in (False, True))
    assert plain["all_gather"] <= again["all_gather"] <= 1.6 * plain["all_gather"]


def test_a_tied_output_layer_is_one_parameter() -> None:
    model = qwen("3b", full=True)
    assert model[-1].parameters == next(module for module in model if not module.works).parameters
    moved = traffic(model, Zero(2), 2, 2, "nccl")
    assert moved.sizes["all_gather"] == 2 * 3_754_622_976, "the published count: the embedding once"


def test_states_take_what_the_paper_says() -> None:
    """Table 1 of arXiv 1910.02054: 7.5 billion parameters, 64 ranks: 120, 31.4, 16.6 and 1.9 GB."""
    gigabytes = [state_bytes(stage, 7_500_000_000, 7_500_000_000, 64, 2) / 1e9 for stage in range(4)]
    assert gigabytes == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)
    assert state_bytes(2, 7_500_000_000, 0, 64, 2) == 15e9, "nothing trained: weights alone"
