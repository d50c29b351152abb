"""The shapes of the states that `bench checkpoint` saves, and the names of its engines. No torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunetool.advise.read_model import load_model
from tunetool.advise.shapes import preset
from tunetool.bench.checkpoint import engines
from tunetool.bench.checkpoint.engines import ENGINES, REFERENCE
from tunetool.bench.checkpoint.states import BYTES_PER_PARAMETER, named, rank_bytes, rows_of, shape
from tunetool.bench.engine_choice import choose
from tunetool.errors import UsageProblem
from tunetool.origin import install_hint


# Numbers of the model cards and of `sum(p.numel() for p in model.parameters())`.
@pytest.mark.parametrize(
    ("model", "parameters"),
    [("llama2-7b", 6_738_415_616), ("13b", 13_015_864_320), ("phi3-mini", 3_821_079_552), ("70b", 70_553_706_496)],
)
def test_a_state_has_the_published_parameters_at_14_bytes(model: str, parameters: int) -> None:
    assert shape(model).bytes == 14 * parameters
    assert shape(model).tensors == 4 * len(preset(model).tensors)


def test_phi_3_has_its_fused_projections_by_name_and_by_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "phi3",
                "hidden_size": 3072,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 32,
                "intermediate_size": 8192,
                "vocab_size": 32064,
                "tie_word_embeddings": False,
            }
        )
    )
    shapes = {tensor.name: tensor.shape for tensor in preset("phi3-mini").tensors}
    assert shapes["model.layers.31.self_attn.qkv_proj.weight"] == (9216, 3072)
    assert shapes["model.layers.31.mlp.gate_up_proj.weight"] == (16384, 3072)
    assert load_model(str(tmp_path)).tensors == preset("phi3-mini").tensors


def test_64_shards_are_the_70b_model_to_the_byte() -> None:
    single, two = shape("70b-shard"), shape("70b-shard", shards=2)
    assert 64 * single.bytes == 32 * two.bytes == shape("70b").bytes
    assert [rank_bytes(two, rank, 2) for rank in (0, 1)] == [single.bytes, single.bytes]
    assert {name: size for name, size, _ in named(single)}["model.lm_head.weight"] == (128256 // 64, 8192)
    with pytest.raises(UsageProblem, match="64 shards, not 65"):
        shape("70b-shard", shards=65)


@given(st.integers(3 * 10**9, 10**11))
def test_no_more_whole_layers_are_dropped_than_needed(bound: int) -> None:
    full, bounded = shape("llama2-7b"), shape("llama2-7b", bound)
    assert bounded.bytes <= bound
    left = [tensor for tensor in full.parameters if tensor.layer is None or int(tensor.layer) < bounded.layers]
    assert list(bounded.parameters) == [tensor for tensor in left if bounded.outside or tensor.layer is not None]
    assert 1 <= bounded.layers <= bounded.of_layers == 32
    layer = BYTES_PER_PARAMETER * sum(tensor.numel for tensor in full.parameters if tensor.layer == "0")
    if bounded.layers < 32:
        assert bounded.bytes + layer > bound
        assert f"{bounded.layers} of 32 layers" in bounded.describe()


def test_a_bound_below_one_layer_is_refused_with_what_it_takes() -> None:
    with pytest.raises(UsageProblem, match=r"too little for `--model llama2-7b`: its first layer takes 2\.833 GB"):
        shape("llama2-7b", 10**9)


@pytest.mark.parametrize(("model", "more"), [("70b-shard", False), ("70b", True)])
def test_the_hint_for_too_small_a_bound_works(model: str, more: bool) -> None:
    with pytest.raises(UsageProblem) as caught:
        shape(model, 10**7)
    hint = str(caught.value.hint)
    assert ("`70b-shard`" in hint) is more
    least = int(hint.split("`")[1].removesuffix("B"))
    assert shape(model, least).layers == 1


@given(st.integers(21, 800))
def test_a_state_is_cut_into_so_many_tensors_of_the_same_bytes(parameters: int) -> None:
    whole, state = shape("llama-tiny"), shape("llama-tiny", tensors=4 * parameters)
    assert (state.bytes, state.tensors) == (whole.bytes, 4 * parameters)
    assert len({name for name, *_ in named(state)}) == state.tensors
    names = [tensor.name.partition(".part")[0] for tensor in state.parameters]
    counts = {tensor.name: names.count(tensor.name) for tensor in whole.parameters}
    rows = {tensor.name: 0 for tensor in whole.parameters}
    for name, tensor in zip(names, state.parameters, strict=True):
        assert tensor.shape[0] > 0
        rows[name] += tensor.shape[0]
    assert rows == {tensor.name: tensor.shape[0] for tensor in whole.parameters}
    # No part was cut while there was a larger one.
    largest = max(tensor.numel // counts[tensor.name] for tensor in whole.parameters)
    assert all(t.numel // (counts[t.name] - 1) >= largest - 1 for t in whole.parameters if counts[t.name] > 1)


@pytest.mark.parametrize(("tensors", "hint"), [(1, "ask for 84"), (1343, "ask for 1340"), (10**9, "ask for")])
def test_an_impossible_number_of_tensors_names_a_possible_one(tensors: int, hint: str) -> None:
    with pytest.raises(UsageProblem, match=f"`--tensors {tensors}`") as caught:
        shape("llama-tiny", tensors=tensors)
    assert str(caught.value.hint).startswith(hint)
    nearest = int(str(caught.value.hint).removeprefix("ask for ").partition(",")[0])
    assert shape("llama-tiny", tensors=nearest).tensors == nearest


def test_a_model_of_two_towers_loses_layers_of_each_by_itself() -> None:
    full = shape("7b")
    assert full.of_layers == 32 + 28
    part = shape("7b", full.bytes // 2)
    kept = {tensor.block for tensor in part.parameters if tensor.block is not None}
    assert {name for name in kept if name.startswith("visual.")} == {f"visual.blocks.{n}." for n in range(32)}
    assert kept - {f"visual.blocks.{n}." for n in range(32)} == {f"model.layers.{n}." for n in range(part.layers - 32)}


@given(st.integers(0, 5000), st.integers(1, 70))
def test_ranks_share_rows_without_a_gap(rows: int, world: int) -> None:
    parts = [rows_of(rows, rank, world) for rank in range(world)]
    assert [row for first, count in parts for row in range(first, first + count)] == list(range(rows))


@given(st.integers(1, 70))
def test_ranks_hold_the_state_together_or_each_all_of_it(world: int) -> None:
    state = shape("phi3-mini")
    assert sum(rank_bytes(state, rank, world) for rank in range(world)) == state.bytes
    assert rank_bytes(state, world - 1, world, "replicated") == state.bytes


def test_engines_are_chosen_by_globs_in_one_order() -> None:
    assert choose(ENGINES, []) == list(ENGINES)
    assert REFERENCE in ENGINES
    assert choose(ENGINES, ["direct*", "dcp-t4-*"]) == [
        "dcp-t4-single",
        "dcp-t4-multi",
        "direct",
        "direct-async",
        "direct-gds",
    ]
    with pytest.raises(UsageProblem, match="`torch` is not an engine") as caught:
        choose(ENGINES, ["direct", "torch"])
    assert "torch-save-zip" in str(caught.value.hint)


def test_an_absent_library_is_named_with_its_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda _: None)
    said = {name: missing for name, entry in ENGINES.items() if (missing := entry.missing())}
    assert said.pop("safetensors") == f"safetensors is not installed: {install_hint('engines')}"
    assert said == {
        "nvidia-resiliency-ext": "nvidia-resiliency-ext is not installed: pip install -U nvidia-resiliency-ext",
        "megatron-dist": "Megatron-core is not installed: pip install megatron-core",
        "orbax": "Orbax is not installed: pip install orbax-checkpoint",
        "orbax-async": "Orbax is not installed: pip install orbax-checkpoint",
    }


def test_every_engine_is_in_the_document() -> None:
    document = (Path(__file__).parents[2] / "docs/concepts/checkpoint-engines.md").read_text()
    rows = document.partition("| engine | files |")[2].partition("\n\n")[0].splitlines()[2:]
    listed = [name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])]
    assert listed == list(dict.fromkeys(re.sub(r"^dcp-t\d+", "dcp-tN", name) for name in ENGINES))


def test_naming_engines_and_shapes_imports_no_torch() -> None:
    code = (
        "import sys, tunetool.bench.checkpoint.engines, tunetool.bench.checkpoint.states\n"
        "sys.exit(' '.join({'torch', 'deepspeed', 'numpy', 'safetensors'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""
