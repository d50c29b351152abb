"""The tensors of models by their config.json against transformers' own classes, on torch's device without memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import expert_models
from tunetool.advise.read_model import load_model

SMALL = {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 8, "vocab_size": 1000}
DENSE = {"intermediate_size": 320, "head_dim": 32, "pad_token_id": 0}
BIASED = {"attention_bias": True, "mlp_bias": True}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100, "n_positions": 32}


def _by_layer(named: dict[str, int]) -> dict[str, int]:
    """Elements of each layer, and of what is outside of them: names inside of a layer differ by version."""
    sums: dict[str, int] = {}
    for name, numel in named.items():
        parts = name.split(".")
        layer = ".".join(parts[:3]) if "layers" in parts or "h" in parts else name
        sums[layer] = sums.get(layer, 0) + numel
    return sums


@pytest.mark.parametrize(
    "config",
    [
        *(each.config for name, each in expert_models.MODELS.items() if name != "Kimi K2"),
        {**expert_models.MODELS["Qwen3 30B-A3B"].config, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
        {**expert_models.MODELS["GLM-4.5-Air"].config, "use_qk_norm": True, "attention_bias": False},
        *({**each.config, **BIASED} for name, each in expert_models.MODELS.items() if name != "Kimi K2"),
        *({"model_type": kind, **DENSE, **BIASED} for kind in ("llama", "mistral", "phi3", "qwen2", "qwen3")),
        {"model_type": "llama", **DENSE, "attention_bias": True},
        {"model_type": "llama", **DENSE, "mlp_bias": True},
        GPT2,
    ],
    ids=lambda config: config["model_type"] + ", biased" * ("attention_bias" in config),
)
def test_transformers_builds_as_many_elements_in_every_layer(config: dict[str, Any], tmp_path: Path) -> None:
    small = config if config is GPT2 else {**config, **SMALL, "num_key_value_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(small))
    rest = {name: value for name, value in small.items() if name != "model_type"}
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **rest))
    theirs = _by_layer({name: parameter.numel() for name, parameter in built.named_parameters()})
    assert _by_layer({tensor.name: tensor.numel for tensor in load_model(str(tmp_path)).tensors}) == theirs
