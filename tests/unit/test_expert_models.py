"""Models with experts by their config.json: as many parameters as published, and which of them a token uses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import expert_models
from made_weights import safetensors
from tunetool.advise.ds_config import KINDS, NVME_KINDS, plan
from tunetool.advise.ds_config_plan import Job, Node
from tunetool.advise.expert_decoder import MOST_EXPERTS, active, routed
from tunetool.advise.read_model import load_model
from tunetool.advise.shapes import Model
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.tune.settings import DEFAULTS

MIXTRAL = expert_models.MODELS["Mixtral 8x7B"].config


def loaded(directory: Path, **config: Any) -> Model:
    (directory / "config.json").write_text(json.dumps(config))
    return load_model(str(directory))


@pytest.mark.parametrize("name", expert_models.MODELS)
def test_a_model_has_as_many_parameters_as_published(name: str, tmp_path: Path) -> None:
    published = expert_models.MODELS[name]
    model = loaded(tmp_path, **published.config)
    assert model.numel == published.total
    used = active(model)
    # Authors count the embedding, the output layer, both or none of them.
    outside = sum(tensor.numel for tensor in model.tensors if tensor.block is None)
    assert used is not None
    assert used - outside <= published.active * 1.02e9
    assert used >= published.active * 0.98e9


def test_the_name_of_mixtral_is_its_config(tmp_path: Path) -> None:
    preset = load_model("mixtral-8x7b")
    assert preset.tensors == loaded(tmp_path, **MIXTRAL).tensors
    experts = routed(preset)
    assert experts is not None
    assert (experts.layers, experts.count, experts.per_layer) == (32, 256, 8)
    assert experts.numel == 256 * 3 * 4096 * 14336
    assert experts.used == experts.numel / 4


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, [0, 1, 2, 3]),
        ({"decoder_sparse_step": 2}, [1, 3]),
        ({"mlp_only_layers": [0, 3]}, [1, 2]),
    ],
)
def test_the_layers_that_have_experts(changes: dict[str, Any], layers: list[int], tmp_path: Path) -> None:
    config = {**expert_models.MODELS["Qwen3 30B-A3B"].config, "num_hidden_layers": 4, **changes}
    names = [tensor.name for tensor in loaded(tmp_path, **config).tensors]
    assert [number for number in range(4) if f"model.layers.{number}.mlp.experts.0.up_proj.weight" in names] == layers
    assert sum("mlp.gate_proj" in name for name in names) == 4 - len(layers)


def test_deepseek_counts_its_layers_from_zero(tmp_path: Path) -> None:
    config = {**expert_models.MODELS["DeepSeek-V3"].config, "num_hidden_layers": 6, "moe_layer_freq": 2}
    names = [tensor.name for tensor in loaded(tmp_path, **config).tensors]
    assert [number for number in range(6) if f"model.layers.{number}.mlp.gate.weight" in names] == [4]


def test_other_spellings_of_the_number_of_experts_count_too(tmp_path: Path) -> None:
    config = dict(expert_models.MODELS["Qwen3 30B-A3B"].config)
    config["num_local_experts"] = config.pop("num_experts")
    assert loaded(tmp_path, **config).numel == 30_532_122_624


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_local_experts": None}, "'num_experts' is missing"),
        ({"num_experts_per_tok": 9}, "9 of 8 experts"),
        ({"num_local_experts": MOST_EXPERTS}, "experts in 32 layers"),
        ({"num_local_experts": 0}, "a size is less than 1"),
        ({"num_local_experts": "many"}, "'num_local_experts' is missing or not a number"),
        ({"num_experts_per_tok": True}, "'num_experts_per_tok' is missing or not a number"),
        ({"hidden_size": 4096.5}, "'hidden_size' is missing or not a number"),
        ({"num_attention_heads": 0}, "a size is 0 that others are divided by, such as `num_attention_heads`"),
        ({"model_type": "qwen2_moe", "moe_intermediate_size": 8, "mlp_only_layers": "12"}, "'mlp_only_layers'"),
        ({"model_type": "qwen2_moe", "moe_intermediate_size": 8, "mlp_only_layers": [None]}, "'mlp_only_layers'"),
        ({"model_type": "gpt_oss"}, "does not give its tensors"),
    ],
)
def test_a_config_without_usable_experts_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageProblem) as refused:
        loaded(tmp_path, **{**MIXTRAL, **changes})
    assert message in refused.value.message
    assert refused.value.hint
    if changes.get("model_type") == "gpt_oss":
        assert "deepseek_v3" in refused.value.hint


@pytest.mark.parametrize("joined", [False, True])
def test_weights_name_experts_and_the_config_how_many_are_used(joined: bool, tmp_path: Path) -> None:
    shapes = {"model.layers.0.mlp.gate.weight": [4, 8]}
    if joined:
        shapes |= {"model.layers.0.mlp.experts.down_proj": [4, 8, 2]}
    else:
        shapes |= {f"model.layers.0.mlp.experts.{number}.down_proj.weight": [8, 2] for number in range(4)}
    safetensors(tmp_path / "model.safetensors", shapes)
    assert active(load_model(str(tmp_path))) is None
    (tmp_path / "config.json").write_text('{"num_experts_per_tok": 1}')
    assert active(load_model(str(tmp_path))) == 32 + 16
    (tmp_path / "config.json").write_text('{"num_experts_per_tok": "one"}')
    assert active(load_model(str(tmp_path))) is None


@pytest.mark.parametrize(
    ("name", "billions"), [("33b", 32.5), ("65b", 65.2), ("175b", 175.0), ("llama2-7b", 6.7), ("13b", 13.0)]
)
def test_models_of_the_published_table_have_their_size(name: str, billions: float) -> None:
    """arXiv 2302.13971, table 2, and arXiv 2005.14165, table 2.1."""
    assert load_model(name).numel / 1e9 == pytest.approx(billions, rel=0.006)


def test_a_ds_config_with_buffers_is_refused_for_experts() -> None:
    aio = DEFAULTS.block()
    for kind in KINDS:
        job = Job(kind, load_model("mixtral-8x7b"), aio, "/mnt/nvme_raid0", world=16)
        if kind not in NVME_KINDS:
            assert plan(job, Node(2**42)).values
            continue
        with pytest.raises(CannotJudge, match="`mixtral-8x7b` has experts"):
            plan(job, Node(2**42))


def test_a_config_of_gpt_2_counts_as_transformers_does(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
    assert loaded(tmp_path, n_positions=1024, **config).numel == 124_439_808
    with pytest.raises(UsageProblem, match="'n_positions' is missing"):
        loaded(tmp_path, **config)
    with pytest.raises(UsageProblem, match="'n_positions' is missing or not a number"):
        loaded(tmp_path, n_positions="1024", **config)
