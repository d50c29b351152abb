"""A trace and a config.json of a stranger: what is no file, too large or of no sense is refused, sizes are right."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tunetool.bench.kv_cache.model import kv_of_config
from tunetool.bench.kv_cache.trace import read_mooncake
from tunetool.errors import UsageProblem

LLAMA = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}


def test_a_trace_is_a_file_of_bounded_size(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"[" + b"1," * (1 << 20))
    with pytest.raises(UsageProblem, match="line 1 has"):
        read_mooncake(path)
    os.truncate(path, 10 << 30)
    with pytest.raises(UsageProblem, match="more than"):
        read_mooncake(path)


def test_a_trace_that_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "t.jsonl")
    with pytest.raises(UsageProblem, match="FIFO"):
        read_mooncake(tmp_path / "t.jsonl")


@pytest.mark.parametrize(
    "sizes",
    [
        {"head_dim": -128, "num_key_value_heads": -8},
        {"kv_lora_rank": 512, "qk_rope_head_dim": -64},
        {"kv_lora_rank": 0, "qk_rope_head_dim": 64},
        {"sliding_window": -5},
        {"layer_types": ["sliding_attention"] * 32},
        {"attn_layer_period": 8},
        {"hybrid_override_pattern": "M-M*"},
    ],
    ids=str,
)
def test_a_config_without_sense_is_refused(sizes: dict[str, Any]) -> None:
    with pytest.raises(UsageProblem):
        kv_of_config({**LLAMA, **sizes}, "c")


@pytest.mark.parametrize(
    ("sizes", "token_bytes"),
    [
        ({"num_key_value_heads": None, "num_kv_heads": 8, "multi_query": True}, 131_072),
        ({"num_key_value_heads": None, "multi_query": True}, 16_384),
        ({"num_key_value_heads": None, "multi_query_group_num": 2}, 32_768),
        ({"num_kv_shared_layers": 20}, 49_152),
        (
            {
                "num_kv_shared_layers": 16,
                "layer_types": ["sliding_attention", "full_attention"] * 16,
                "sliding_window": 512,
            },
            65_536,
        ),
    ],
    ids=["Falcon 40B", "Falcon 7B", "ChatGLM", "shared", "Gemma 3n"],
)
def test_other_names_of_kv_heads_and_shared_layers(sizes: dict[str, Any], token_bytes: int) -> None:
    assert kv_of_config({**LLAMA, **sizes}, "c").token_bytes == token_bytes


def test_the_first_layers_of_qwen2_have_no_window() -> None:
    kv = kv_of_config({**LLAMA, "sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 28}, "c")
    assert (kv.layers, kv.windowed) == (28, 4)
