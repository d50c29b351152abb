"""`tunetool advise io`: which rank reads and writes what, the layer that limits it, and the strategies."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import advised
from advised import refused
from builders import PROVEN, measurement, record, sampled
from tunetool.advise.io import Asked, ways
from tunetool.advise.layers import PUBLISHED, Layers, of_record, published
from tunetool.advise.layout import Layout, Part, held, parts_of, place, stages
from tunetool.advise.read_model import load_model
from tunetool.advise.shapes import Model, Tensor
from tunetool.record import FleetHost, Ladder, Loss, Measurement, Record, Verdict, dumps
from tunetool.verdict import NO_EXPECTATION

MIXED = Model(
    "mixed",
    "made by hand",
    (
        Tensor("model.embed_tokens.weight", (100, 8)),
        *(
            Tensor(f"model.layers.{layer}.{name}", shape)
            for layer in range(4)
            for name, shape in (
                ("self_attn.q_proj.weight", (8, 8)),
                ("input_layernorm.weight", (8,)),
                *((f"mlp.experts.{number}.up_proj.weight", (16, 8)) for number in range(8)),
            )
        ),
        Tensor("model.norm.weight", (8,)),
        Tensor("lm_head.weight", (100, 8)),
    ),
    experts_per_token=2,
)


answered = partial(advised.answered, "io")
printed = partial(advised.printed, "io")


def way(document: dict[str, Any], what: str, name: str) -> dict[str, Any]:
    (found,) = (each for each in document["ways"] if (each["what"], each["name"]) == (what, name))
    return dict(found)


def strategies(document: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each["sentence"] for each in document["strategies"]}


def test_ranks_are_numbered_as_in_megatron() -> None:
    layout = Layout(tensor=2, pipeline=2, data=2, fsdp=1)
    places = [place(layout, rank) for rank in range(layout.world)]
    assert [(at.stage, at.sampler, at.tensor) for at in places] == [
        (stage, sampler, tensor) for stage in (0, 1) for sampler in (0, 1) for tensor in (0, 1)
    ]
    assert place(Layout(data=2, fsdp=4), 6).fsdp == 2


def test_the_first_stage_embeds_and_the_last_puts_out() -> None:
    first, *middle, last = stages(MIXED, 4)
    layer = (64, 8, 8 * 16 * 8)
    assert (first.matrices, first.vectors, first.experts) == (layer[0] + 800, layer[1], layer[2])
    assert [(each.matrices, each.vectors, each.experts) for each in middle] == [layer, layer]
    assert (last.matrices, last.vectors, last.experts) == (layer[0] + 800, layer[1] + 8, layer[2])


def test_a_vision_tower_runs_on_the_first_stage() -> None:
    model = load_model("tiny")
    tower = sum(tensor.numel for tensor in model.tensors if tensor.name.startswith("visual."))
    embedding = next(tensor.numel for tensor in model.tensors if "embed_tokens" in tensor.name)
    first, last = stages(model, 2)
    outside = model.numel - sum(tensor.numel for tensor in model.tensors if tensor.layer is not None)
    assert tower > 0
    assert first.matrices + first.vectors > tower + embedding
    assert first.matrices + first.vectors + last.matrices + last.vectors == model.numel
    assert outside > 0


DEGREES = st.sampled_from([1, 2, 4, 8])


@given(DEGREES, st.sampled_from([1, 2, 3, 4]), DEGREES, DEGREES, DEGREES, st.integers(1, 16))
def test_the_parts_of_all_ranks_are_the_model(
    tensor: int, pipeline: int, data: int, experts: int, fsdp: int, of_node: int
) -> None:
    layout = Layout(tensor, pipeline, data, experts, fsdp, of_node)
    assume(layout.samplers % experts == 0)
    layout.check(MIXED)
    elements = stages(MIXED, pipeline)
    parts: dict[Part, float] = {}
    for rank in range(layout.world):
        at = place(layout, rank)
        for key, size in parts_of(layout, elements[at.stage], at).items():
            assert parts.setdefault(key, size) == size
    assert sum(parts.values()) == pytest.approx(MIXED.numel)
    found = held(MIXED, layout)
    assert MIXED.numel <= found.job_once * (1 + 1e-9)
    assert found.job_once <= found.job * (1 + 1e-9)
    assert found.node_once <= found.node * (1 + 1e-9)
    assert found.node <= found.rank * min(of_node, layout.world) * (1 + 1e-9)
    if layout.nodes == 1:
        assert found.job_once == pytest.approx(MIXED.numel)
    if tensor == 1 and layout.of_experts == layout.samplers and data == 1:
        assert found.job == pytest.approx(MIXED.numel), "no two ranks hold the same"
    asked = Asked(MIXED, layout, 1000, layout.samplers * 3)
    for each in ways(asked, published()):
        assert each.times >= 1 - 1e-9
        assert each.rank <= each.node * (1 + 1e-9)
        assert each.node <= each.job * (1 + 1e-9)


def test_tensor_ranks_share_samples_and_pipeline_ends_read() -> None:
    document = answered("--model", "tiny", "--tp", "4", "--pp", "2", "--dp", "2", "--sample", "1kB", "--batch", "8")
    every, one = way(document, "step", "every rank reads"), way(document, "step", "one rank of a tensor group reads")
    assert (every["rank_bytes"], every["job_bytes"]) == (4000, 16 * 4000)
    # 8 samples on the first stage, and again on the last.
    assert (one["job_bytes"], one["times"], one["node_bytes"]) == (16000, 2, 8000)
    named = strategies(document)
    assert "the 4 tensor ranks of a group need the same samples" in named["read once and broadcast samples"]
    assert {"pre-shard", "double-buffer"} <= set(named)


def test_ddp_reads_samples_once_and_the_model_on_every_node() -> None:
    document = answered("--model", "70b", "--dp", "16")
    assert [each["times"] for each in document["ways"] if each["what"] == "step"] == [1]
    numel = 70_553_706_496
    own, once = way(document, "load", "each rank reads its part"), way(document, "load", "each node reads a part once")
    assert (own["rank_bytes"], own["node_bytes"], own["times"]) == (2 * numel, 16 * numel, 16)
    assert (once["node_bytes"], once["times"]) == (2 * numel, 2)
    assert "12%" in strategies(document)["read once and broadcast weights"]


def test_fsdp_ranks_have_their_own_samples_and_read_once() -> None:
    """Against the published table, by which they all read the same batch."""
    document = answered("--model", "70b", "--fsdp", "16")
    named = strategies(document)
    assert "each of the 16 data-parallel ranks (FSDP 16)" in named["pre-shard"]
    (step,) = (each for each in document["ways"] if each["what"] == "step")
    assert (step["rank_bytes"], step["job_bytes"], step["times"]) == (2**14, 16 * 2**14, 1)
    assert way(document, "load", "each rank reads its part")["times"] == pytest.approx(1)
    assert "no byte is read twice" in named["load"]
    written = way(document, "checkpoint", "each rank writes what it holds")
    assert written["times"] == pytest.approx(1)
    assert "write each copy once" not in named


def test_copies_amplify_a_checkpoint() -> None:
    document = answered("--model", "70b", "--fsdp", "8", "--dp", "2")
    assert way(document, "checkpoint", "each rank writes what it holds")["times"] == pytest.approx(2)
    assert "2 times the state" in strategies(document)["write each copy once"]
    once = way(document, "checkpoint", "each part is written once")
    assert once["node_bytes"] == pytest.approx(14 * 70_553_706_496 / 2)
    assert once["node_seconds"] == pytest.approx(once["node_bytes"] / PUBLISHED["write"].value)


def test_experts_are_read_for_each_token() -> None:
    document = answered("--model", "mixtral-8x7b", "--dp", "8", "--ep", "8")
    expert = 3 * 4096 * 14336 * 2
    assert document["experts"]["expert_bytes"] == expert
    assert document["experts"]["token_bytes"] == 32 * 2 * expert
    assert document["experts"]["tokens_per_second"] == pytest.approx(48e9 / (64 * expert))
    assert "in training all experts stay in memory" in strategies(document)["expert cache"]
    assert answered("--model", "70b")["experts"] is None


def speed(name: str, value: float, direction: str = "read", **parameters: Any) -> Measurement:
    fields = {"evidence": PROVEN, "parameters": {"direction": direction, **parameters}}
    return sampled(name, *(value * (1 + part / 1000) for part in range(-3, 4)), **fields)


UNPROVEN = Verdict(status="unproven", reasons=[NO_EXPECTATION], kinds=["expectation"])
LADDER = (
    speed("drives.read.2", 12e9, drives=2),
    speed("drives.read.8", 48e9, drives=8),
    speed("array.read", 30e9),
    speed("sequential.read", 40e9),
    speed("sequential.write", 20e9, "write"),
    speed("sustained.write", 15e9, "write"),
    speed("deepspeed.cpu.read", 35e9),
    speed("checkpoint.load", 2e9),
    speed("checkpoint.save", 1e9, "write"),
)
RANDOM = measurement(
    "random.read.1m", 9000, "rate", evidence=PROVEN, parameters={"direction": "read", "block_bytes": 2**20}
)


def verified(*figures: Measurement, **fields: Any) -> Record:
    return record(*figures, **{"verdict": UNPROVEN, **fields})


def test_the_slowest_layer_of_the_storage_binds() -> None:
    layers = of_record(verified(*LADDER, RANDOM))
    assert layers.binds("read").name == "array raw read"
    assert layers.binds("write").name == "fs sustained write"
    # Two of the drives are no layer: eight are there.
    assert [each.name for each in layers.storage["read"]] == ["8 drives together", "array raw read", "fs libaio read"]
    assert layers.random is not None
    assert layers.random.value == 9000 * 2**20


def test_one_process_of_a_library_binds_below_so_many(tmp_path: Path) -> None:
    loss = Loss(rung="array.read", cause="slow-drive", found="drive `NV5` is slow", remedy="replace it")
    path = tmp_path / "record.json"
    path.write_text(dumps(verified(*LADDER, ladder=Ladder(rungs=[], loss=loss))))
    text = printed("--model", "70b", "--dp", "8", "--record", str(path))
    assert "measured on `n1` by `verify`" in text
    assert "read: `array raw read` binds, 30 GB/s" in text
    assert "torch.load reaches 2 GB/s" in text
    assert "below 15 such processes" in text
    assert "aio_handle pinned read reaches" not in text
    assert "first loss, slow-drive: drive `NV5` is slow; replace it" in text
    document = answered("--model", "70b", "--dp", "8", "--record", str(path))
    assert document["storage"]["measured"] is True
    first = way(document, "load", "each node reads a part once")
    assert first["node_seconds"] == pytest.approx(first["node_bytes"] / 30e9)


def test_a_record_of_level_quick_has_the_file_system_alone() -> None:
    layers = of_record(verified(*LADDER[3:5]))
    assert {way: [each.name for each in found] for way, found in layers.storage.items()} == {
        "read": ["fs libaio read"],
        "write": ["fs libaio write"],
    }
    assert layers.random is None


def test_without_a_record_it_says_whose_figures_these_are() -> None:
    text = printed("--model", "70b")
    assert "storage of a node: published for eight Gen5 drives (DeepNVMe, 2025), not measured here" in text
    assert answered("--model", "70b")["storage"]["measured"] is False
    layers: Layers = published()
    assert (layers.binds("read").value, layers.binds("write").value) == (48e9, 26e9)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (verified(LADDER[3]), "has no proven sequential write"),
        (verified(LADDER[5]), "has no sequential figure that is proven"),
        (verified(*LADDER, verdict=Verdict(status="fail", reasons=["array.members: one is missing"])), "array.members"),
        (verified(*LADDER, kind="fleet", hosts=[FleetHost(host="n1", status="pass", reasons=[])]), "of a fleet"),
    ],
)
def test_a_record_that_proves_too_little_is_refused(made: Record, message: str) -> None:
    with refused(message):
        of_record(made)
