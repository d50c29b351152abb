"""`bench experts` without a disk: its cache, its traces, the experts of a config.json, figures, tables, wrong calls."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import builders
import expert_models
from shown_records import on_screen
from tunetool.advise.expert_decoder import FAMILIES
from tunetool.bench.experts import figures, preflight
from tunetool.bench.experts.blocks import block_bytes, write
from tunetool.bench.experts.cache import ExpertCache
from tunetool.bench.experts.model import StoredExperts, stored_experts
from tunetool.bench.experts.request import Request
from tunetool.bench.experts.samples import Reading, Row
from tunetool.bench.experts.trace import Demand, Pattern
from tunetool.bench.experts.view import view
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.measure.evidence import Counted
from tunetool.node.machine.block_stack import BlockStack, Leaf, read_stack
from tunetool.record import Record
from tunetool.report.kinds import write_any_page
from tunetool.verdict import judge

GB = 10**9
DISK = Leaf("vda", "disk", None, True, ("vda",))


@st.composite
def accesses(draw: st.DrawFn) -> tuple[int, list[int], list[list[int]]]:
    """Slots, an order to fill them by, and steps that want no more than these."""
    slots, experts = draw(st.integers(1, 6)), draw(st.integers(1, 12))
    order = draw(st.permutations(range(experts)))
    step = st.lists(st.integers(0, experts - 1), max_size=slots, unique=True)
    return slots, order, draw(st.lists(step, max_size=30))


@given(accesses())
def test_the_cache_is_a_list_that_is_sorted_by_use(case: tuple[int, list[int], list[list[int]]]) -> None:
    slots, order, steps = case
    cache = ExpertCache(slots)
    cache.fill(order)
    model = order[:slots][::-1]
    memory = {slot: expert for expert, slot in cache.held()}
    for wanted in steps:
        there = [expert for expert in wanted if expert in model]
        missing = [expert for expert in wanted if expert not in model]
        model = ([expert for expert in model if expert not in wanted] + there + missing)[-slots:]
        taken = cache.take(wanted)
        assert [(access.expert, access.is_hit) for access in taken] == [
            *((expert, True) for expert in there),
            *((expert, False) for expert in missing),
        ]
        for access in taken:
            # What is called a hit is what was read into that slot before.
            assert not access.is_hit or memory[access.slot] == access.expert
            memory[access.slot] = access.expert
        assert len({access.slot for access in taken}) == len(taken)
        assert [expert for expert, _ in cache.held()] == model
        assert all(memory[slot] == expert for expert, slot in cache.held())
        assert all(0 <= slot < slots for _, slot in cache.held())


def test_without_slots_everything_is_read() -> None:
    cache = ExpertCache(0)
    cache.fill([1, 2])
    for _ in range(2):
        assert [tuple(access) for access in cache.take([5, 3])] == [(5, 0, False), (3, 1, False)]
    assert cache.held() == []


def hit_rate(demand: Demand, slots: int, steps: int) -> float:
    cache = demand.warm_cache(slots, 1)
    taken = [cache.take(wanted) for wanted in itertools.islice(demand.steps(1), steps)]
    return sum(access.is_hit for step in taken for access in step) / (steps * demand.top_k)


@pytest.mark.parametrize("top_k", [1, 2, 8])
@pytest.mark.parametrize("slots", [8, 16, 32])
def test_even_demand_hits_the_cache_as_often_as_it_holds_experts(top_k: int, slots: int) -> None:
    demand = Demand("uniform", 64, top_k)
    assert demand.expected_hit_rate(slots) == slots / 64
    # Of 16,000 accesses, 0.4 % are one standard deviation at most; the trace is that of its seed.
    assert hit_rate(demand, slots, 16_000 // top_k) == pytest.approx(slots / 64, abs=0.016)


def test_uneven_demand_hits_more_often_and_as_expected() -> None:
    demand = Demand("zipf", 64, 4, exponent=1.0)
    for slots in (8, 32):
        expected = demand.expected_hit_rate(slots)
        assert expected > slots / 64 + 0.1
        assert hit_rate(demand, slots, 4000) == pytest.approx(expected, abs=0.02)
    assert replace(demand, exponent=0.0).expected_hit_rate(16) == pytest.approx(0.25, abs=0.02)
    assert demand.expected_hit_rate(0) == 0


@given(
    pattern=st.sampled_from(["uniform", "zipf"]),
    experts=st.integers(1, 40),
    seed=st.integers(0, 3),
    exponent=st.floats(0, 4),
    data=st.data(),
)
def test_a_step_wants_different_experts_of_its_seed(
    pattern: Pattern, experts: int, seed: int, exponent: float, data: st.DataObject
) -> None:
    demand = Demand(pattern, experts, data.draw(st.integers(1, experts)), seed, exponent)
    steps = list(itertools.islice(demand.steps("round", 1), 5))
    assert steps == list(itertools.islice(demand.steps("round", 1), 5))
    for wanted in steps:
        assert len(set(wanted)) == len(wanted) == demand.top_k
        assert set(wanted) <= set(range(experts))
    slots = data.draw(st.integers(demand.top_k, experts))
    assert len(demand.warm_cache(slots).held()) == slots


def test_the_weights_decide_how_often_an_expert_comes_first() -> None:
    demand = Demand("zipf", 4, 2, exponent=1.0)
    steps = list(itertools.islice(demand.steps(1), 8000))
    weights = demand.weights()
    assert sorted(weights) == [1 / 4, 1 / 3, 1 / 2, 1]
    firsts = Counter(wanted[0] for wanted in steps)
    for expert, weight in enumerate(weights):
        assert firsts[expert] / 8000 == pytest.approx(weight / sum(weights), abs=0.02)
    # After the heaviest, the others come by their own weights.
    heaviest = weights.index(1.0)
    seconds = Counter(wanted[1] for wanted in steps if wanted[0] == heaviest)
    for expert, count in seconds.items():
        assert count / seconds.total() == pytest.approx(weights[expert] / (sum(weights) - 1), abs=0.03)
    race = Demand("zipf", 4, 4, exponent=4.0)
    assert all(len(set(wanted)) == 4 for wanted in itertools.islice(race.steps(1), 50))


BF16, FP8 = {"torch_dtype": "bfloat16"}, {"torch_dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}}
STORED: dict[str, tuple[dict[str, Any], int, int, float]] = {
    # The number format of the published config.json; layers with experts; bytes of one; billions of weights in them.
    "Mixtral 8x7B": (BF16, 32, 352_321_536, 45.1),
    "OLMoE 1B-7B": (BF16, 16, 12_582_912, 6.44),
    "Qwen1.5 MoE A2.7B": (BF16, 24, 17_301_504, 12.46),
    "Qwen3 30B-A3B": (BF16, 48, 9_437_184, 28.99),
    "DeepSeek-V2-Lite": (BF16, 26, 17_301_504, 14.39),
    "DeepSeek-V3": (FP8, 58, 44_040_192, 653.9),
    "Kimi K2": (FP8, 60, 44_040_192, 1014.7),
    "GLM-4.5-Air": ({"dtype": "bfloat16"}, 45, 34_603_008, 99.66),
}
MIXTRAL = {**expert_models.MODELS["Mixtral 8x7B"].config, **BF16}
QWEN = {**expert_models.MODELS["Qwen3 30B-A3B"].config, **BF16}


@pytest.mark.parametrize("name", expert_models.MODELS)
def test_published_models_have_their_published_sizes(name: str) -> None:
    number_format, layers, size, billions = STORED[name]
    document = {**expert_models.MODELS[name].config, **number_format}
    experts = stored_experts(document, "config.json")
    assert (experts.model_type, experts.layers, experts.bytes) == (document["model_type"], layers, size)
    width = 1 if "quantization_config" in document else 2
    assert experts.total_bytes / width / 1e9 == pytest.approx(billions, rel=0.001)
    assert 0.85 * expert_models.MODELS[name].total < experts.total_bytes / width < expert_models.MODELS[name].total
    assert experts.bytes_per_token == layers * document["num_experts_per_tok"] * size


def test_the_published_models_are_of_every_family_that_is_known() -> None:
    assert {each.config["model_type"] for each in expert_models.MODELS.values()} == set(FAMILIES)


def test_some_layers_have_no_experts() -> None:
    document = {**QWEN, "decoder_sparse_step": 2, "mlp_only_layers": [1, 2]}
    # Layers 1, 3, 5 ... 47 less layer 1.
    assert stored_experts(document, "c").layers == 23
    renamed = {"num_local_experts" if key == "num_experts" else key: value for key, value in document.items()}
    assert stored_experts(renamed, "c").each_layer == 128


@pytest.mark.parametrize(
    ("model", "change", "words"),
    [
        (MIXTRAL, {"model_type": "llama"}, "a model of type `llama` has no experts that are known"),
        (MIXTRAL, {"model_type": ["mixtral"]}, "has no experts that are known"),
        (MIXTRAL, {"num_experts_per_tok": 9}, "9 of 8 experts"),
        (MIXTRAL, {"hidden_size": 2**40}, "a size is too large"),
        (MIXTRAL, {"num_hidden_layers": 10**9}, "a size is too large"),
        (MIXTRAL, {"torch_dtype": "int3"}, "its format is `int3`"),
        (MIXTRAL, {"quantization_config": {"quant_method": "awq"}}, "its format is `quantized by awq`"),
        (QWEN, {"mlp_only_layers": list(range(48))}, "no layer has experts"),
    ],
)
def test_a_config_without_what_is_needed_is_refused(model: dict[str, Any], change: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageProblem) as error:
        stored_experts({**model, **change}, "config.json")
    assert words in error.value.message
    assert error.value.hint


def test_the_caller_may_say_how_many_bytes_an_expert_has() -> None:
    document = {**MIXTRAL, "quantization_config": {"quant_method": "awq"}}
    assert stored_experts(document, "c", expert_bytes=90 * 10**6).bytes == 90 * 10**6


KEYS = sorted({key for each in expert_models.MODELS.values() for key in each.config})
KEYS += ["torch_dtype", "quantization_config", "moe_layer_freq", "num_local_experts"]
LEAVES = st.none() | st.booleans() | st.integers(-2, 9) | st.floats() | st.sampled_from([*FAMILIES, "bfloat16"])
CHANGES = st.dictionaries(
    st.sampled_from(KEYS), LEAVES | st.lists(LEAVES) | st.dictionaries(st.text(), LEAVES), max_size=4
)


@given(st.sampled_from([{}, *(each.config for each in expert_models.MODELS.values())]), CHANGES)
def test_any_config_is_understood_or_refused(model: dict[str, Any], changes: dict[str, Any]) -> None:
    understood, hint = 0, None
    try:
        understood = stored_experts({**model, **BF16, **changes}, "c").bytes_per_token
    except UsageProblem as error:
        hint = error.hint
    assert understood > 0 or hint


def stack(directory: Path, **more: Any) -> BlockStack:
    plain = {"medium": "disk", "in_memory": False, "redundant": False, "leaves": (DISK,)}
    return replace(read_stack(str(directory)), **{**plain, **more})


def readings(seconds: Sequence[float], **more: Any) -> dict[int, Reading]:
    plain: dict[str, Any] = {"claimed_bytes": GB, "wanted_bytes": GB, "latencies": [0.1, 0.2, 0.3], "wanted": 64}
    plain |= {"counted": Counted(GB, GB, {})}
    return {number: Reading(each, moment=float(number), **{**plain, **more}) for number, each in enumerate(seconds, 1)}


def rows(directory: Path) -> list[Row]:
    known = stack(directory)
    half = {"hits": 32, "claimed_bytes": GB // 2, "counted": Counted(GB // 2, GB // 2, {})}
    return [
        Row("target", known, "direct", readings=readings([0.5] * 6)),
        Row("target", known, "buffered", readings=readings([1.0] * 6, cached_bytes=(0, GB))),
        Row("target", known, pattern="uniform", readings=readings([1.0] * 6)),
        Row("target", known, pattern="uniform", slots=32, expected=0.5, readings=readings([0.5] * 6, **half)),
        Row("target", known, pattern="zipf"),
    ]


CONDITIONS: dict[str, Any] = {"block_bytes": GB // 64, "experts": 64, "threads": 8, "top_k": 8, "steps": 16}
MODEL = StoredExperts("mixtral", 10, 64, 2, 2 * 10**6)


def record_of(made: list[Row]) -> Record:
    case = figures.case(made, CONDITIONS, MODEL, [])
    return builders.record(
        *case.measurements, kind="bench.experts", target="/mnt", checks=list(case.checks), verdict=judge(case)
    )


def test_figures_have_speeds_latencies_hits_and_tokens(tmp_path: Path) -> None:
    made = record_of(rows(tmp_path))
    by_name = {each.name: each for each in made.measurements}
    assert by_name["experts.target.direct.bandwidth"].value == 2 * GB
    assert by_name["experts.target.direct.p50"].value == 0.2
    assert by_name["experts.target.direct.p99"].value == 0.3
    assert by_name["experts.target.direct.gain"].value == 2.0
    assert by_name["experts.target.direct.gain"].parameters["decided"] is True
    assert by_name["experts.target.buffered.bandwidth"].parameters["page_cache_after_bytes"] == GB
    assert "experts.target.buffered.gain" not in by_name
    cached = by_name["experts.uniform.cached-32.hit_rate"]
    assert (cached.value, cached.parameters["expected"]) == (0.5, 0.5)
    assert by_name["experts.uniform.cached-32.gain"].parameters["against"] == "uniform.cached-0"
    # 2 GB/s over 10 layers x 2 experts x 2 MB for each token.
    assert by_name["experts.uniform.cached-32.tokens"].value == pytest.approx(50)
    assert by_name["experts.uniform.cached-32.bandwidth"].medium == "disk, cache in DRAM"
    evidence = by_name["experts.uniform.cached-32.bandwidth"].evidence
    assert evidence is not None
    assert evidence.claimed_bytes == 3 * GB, "only what was read is claimed"
    assert not any("zipf" in name for name in by_name)


def test_a_trace_that_reads_nothing_claims_nothing(tmp_path: Path) -> None:
    made = rows(tmp_path)
    made[3].readings = readings([0.5] * 6, claimed_bytes=0, counted=None, hits=64)
    (bandwidth,) = [m for m in record_of(made).measurements if m.name == "experts.uniform.cached-32.bandwidth"]
    assert bandwidth.evidence is None


def test_only_the_bytes_are_judged(tmp_path: Path) -> None:
    made = rows(tmp_path)
    assert [check.status for check in figures.checks(made, {"experts": 8})] == ["pass"]
    made[1].readings[2] = replace(made[1].readings[2], wrong=3)
    verdict = judge(figures.case(made, CONDITIONS, None, []))
    assert verdict.status == "fail"
    assert "experts.target.bytes: 3 of 1536 hold other bytes" in verdict.reasons[0]
    assert [check.status for check in figures.checks([Row("target", stack(tmp_path))], {"experts": 8})] == ["skip"]


def test_a_pass_that_the_drives_did_not_see_proves_nothing(tmp_path: Path) -> None:
    made = rows(tmp_path)
    made[1].readings = readings([1.0] * 6, counted=Counted(GB, GB // 10, {}))
    assert any("counted only 0.100" in reason for reason in figures.unproven_reasons(made))
    assert judge(figures.case(made, CONDITIONS, None, [])).status == "unproven"


def shown(made: list[Row]) -> str:
    return " ".join(on_screen(record_of(made), None, 100).split())


def test_the_tables_end_with_a_sentence_of_advice(tmp_path: Path) -> None:
    made = rows(tmp_path)
    text = shown(made)
    assert (
        "read experts with O_DIRECT, 2.00 times (2.00 to 2.00) the speed of the page cache; a cache in memory gives "
        "2.00 times (2.00 to 2.00) the speed for even demand with 32 of 64 experts and at most 50.0"
    ) in text or "at most 50.00 tokens/s" in text
    assert "50.0%" in text
    made[0].readings = readings([2.0] * 6)
    assert "through the page cache: O_DIRECT has 0.50 times" in shown(made)
    made[0].readings = readings([0.5, 1.5] * 3)
    made[3].readings = readings([0.9, 1.1] * 3)
    undecided = shown(made)
    assert "these rounds do not decide which is faster; whether a cache pays is not decided" in undecided
    made[0].readings = readings([0.5] * 2)
    assert "do not decide" in shown(made), "two rounds are too few"
    assert view(record_of(made[4:])).advice == []
    page = write_any_page(record_of(rows(tmp_path)), tmp_path / "record.json")
    assert "experts.uniform.cached-32" in page.read_text()


@pytest.fixture
def on_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The temporary directory may lie in memory."""
    monkeypatch.setattr(preflight, "read_stack", lambda _: stack(tmp_path))


@pytest.mark.usefixtures("on_a_disk")
def test_a_plan_takes_what_is_not_given_from_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    made = preflight.plan(Request(target=tmp_path, config=tmp_path))
    assert (made.expert_bytes, made.top_k, made.cached, made.steps) == (352_321_536, 2, (0, 8, 16, 32), 64)
    text = " ".join(preflight.announcement(Request(target=tmp_path, config=tmp_path), made))
    assert "32 layers with 8 experts of 352.3 MB" in text
    assert "22.55 GB, removed afterwards" in text
    plain = preflight.plan(Request(target=tmp_path, experts=20))
    assert (plain.expert_bytes, plain.block, plain.top_k, plain.cached) == (19_000_000, 19_001_344, 8, (0, 10))
    assert block_bytes(plain.block) == plain.block


@pytest.mark.usefixtures("on_a_disk")
def test_what_does_not_fit_is_said_before(tmp_path: Path) -> None:
    huge = Request(target=tmp_path, expert_bytes=60 << 30, experts=4096, top_k=1)
    with pytest.raises(CannotJudge, match="4096 experts take"):
        preflight.check_room(huge, preflight.plan(huge))
    one = Request(target=tmp_path, expert_bytes=8192, experts=2, top_k=1)
    planned = preflight.plan(one)
    preflight.check_room(one, planned)
    with pytest.raises(CannotJudge, match="of memory"):
        # Each thread has room for an expert.
        preflight.check_room(replace(one, threads=10**12), planned)


def test_drives_are_directories_on_one_drive_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "read_stack", lambda _: stack(tmp_path, leaves=(DISK, DISK), medium="md RAID0"))
    with pytest.raises(UsageProblem, match="lies on md RAID0, on 2 drives"):
        preflight.plan(Request(target=tmp_path, drive_targets=(tmp_path,)))
    with pytest.raises(UsageProblem, match="`/nonexistent` does not exist") as error:
        preflight.plan(Request(target=tmp_path, drive_targets=(Path("/nonexistent"),)))
    assert error.value.hint == "`--drive-target` takes a writable directory"


def test_every_page_of_the_file_says_which_it_is(tmp_path: Path) -> None:
    path, block = tmp_path / "experts", (4 << 20) + 8192
    write(path, 2, block, 7, lambda: None)
    data = path.read_bytes()
    assert len(data) == 2 * block
    for expert, page in ((0, 0), (0, 1025), (1, 3), (1, 1025)):
        start = expert * block + page * 4096
        assert data[start : start + 16] == expert.to_bytes(8, "little") + page.to_bytes(8, "little")
    assert len({data[start : start + 4096] for start in range(0, len(data), 4096)}) == len(data) // 4096
