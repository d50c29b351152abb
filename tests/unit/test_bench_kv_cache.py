"""`bench kv-cache` without a disk: sizes of KV, traces, the index of a store, figures, the page, wrong calls."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunetool.advise.read_model import NAMES, load_model
from tunetool.bench.kv_cache import trace
from tunetool.bench.kv_cache.model import PAGE, kv_of, kv_of_config, matrices
from tunetool.bench.kv_cache.trace import Demand, Index, Wanted
from tunetool.errors import UsageProblem

BF16 = {"torch_dtype": "bfloat16"}
LLAMA_8B = {**BF16, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
DEEPSEEK = {
    **BF16, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "hidden_size": 7168,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip
QWEN_72B = {
    **BF16, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192,
    "sliding_window": 131072, "use_sliding_window": False,
}  # fmt: skip
LLAMA_405B = {
    **BF16, "num_hidden_layers": 126, "num_attention_heads": 128, "num_key_value_heads": 8, "hidden_size": 16384
}  # fmt: skip
GEMMA_27B = {
    "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128,
    "hidden_size": 5376, "sliding_window": 1024, "sliding_window_pattern": 6,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "size"),
    [
        # Table 1 of "Insights into DeepSeek-V3" (arXiv 2505.09343): KB of KV for a token in BF16, of the first three.
        pytest.param(DEEPSEEK, 70_272, id="DeepSeek-V3"),
        pytest.param(QWEN_72B, 327_680, id="Qwen2.5 72B"),
        pytest.param(LLAMA_405B, 516_096, id="Llama 3.1 405B"),
        pytest.param(LLAMA_8B, 131_072, id="Llama 3.1 8B"),
        pytest.param({"text_config": GEMMA_27B, "dtype": "bfloat16"}, 507_904, id="Gemma 3 27B"),
        pytest.param({**BF16, "n_layer": 12, "n_embd": 768, "n_head": 12}, 36_864, id="GPT-2"),
    ],
)
def test_a_token_takes_what_its_config_says(config: dict[str, Any], size: int) -> None:
    known = kv_of_config(config, "config.json")
    assert known.token_bytes == size
    assert kv_of_config(config, "config.json", "fp8").token_bytes == size // 2


def test_known_models_have_their_sizes() -> None:
    assert (kv_of("70b").token_bytes, kv_of("7b").token_bytes) == (327_680, 57_344)
    assert all(kv_of(name).token_bytes > 0 for name in NAMES)


def test_layers_with_a_window_need_its_tokens_alone() -> None:
    known = kv_of_config(GEMMA_27B, "c")
    assert (known.layers, known.windowed, known.window) == (10, 52, 1024)
    assert known.needed_bytes(1024) == 1024 * known.token_bytes
    assert known.needed_bytes(10_240) == (10 * 10_240 + 52 * 1024) * 2 * 16 * 128 * 2
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    hybrid = kv_of_config({**LLAMA_8B, "layer_types": 8 * kinds}, "c")
    assert hybrid.token_bytes == 131_072 // 4


@given(
    layers=st.integers(1, 200), heads=st.integers(1, 64), group=st.integers(1, 16), size=st.sampled_from([64, 96, 128]),
    tokens=st.integers(1, 1024), window=st.integers(0, 9000),
)  # fmt: skip
def test_sizes_follow_from_heads_and_layers(
    layers: int, heads: int, group: int, size: int, tokens: int, window: int
) -> None:
    config = {
        "num_hidden_layers": layers, "num_attention_heads": heads * group, "num_key_value_heads": heads,
        "hidden_size": heads * group * size, "sliding_window": window,
    }  # fmt: skip
    known = kv_of_config(config, "c")
    assert known.token_bytes == 2 * 2 * layers * heads * size
    block = known.block_bytes(tokens)
    assert block % PAGE == 0
    assert 0 <= block - tokens * known.token_bytes < PAGE
    assert known.needed_bytes(tokens) == known.token_bytes * (min(tokens, window) if window else tokens)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 0}, "a size is less than 1"),
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"num_attention_heads": 0, "num_key_value_heads": 0}, "a size is 0"),
        ({"torch_dtype": "int3"}, "the number format `int3`"),
        ({"layer_types": ["full_attention"]}, "1 `layer_types` of 32 layers"),
        ({"layer_types": ["odd"] * 32}, "`odd` in `layer_types`"),
        ({"layer_types": ["mamba"] * 32}, "no layer keeps keys and values"),
        ({"hidden_size": 2**60}, "a size is too large"),
    ],
)
def test_a_config_that_gives_no_size_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageProblem) as error:
        kv_of_config({**LLAMA_8B, **change}, "config.json")
    assert words in error.value.message
    assert error.value.hint


def test_prefill_multiplies_by_what_a_token_uses() -> None:
    used = sum(rows * columns * count for rows, columns, count in matrices(load_model("mixtral-8x7b")))
    # 12.9 billion active parameters (arXiv 2401.04088), of which embedding and output are 0.26.
    assert used == pytest.approx(12.9e9 - 0.26e9, rel=0.01)
    assert sum(rows * columns * count for rows, columns, count in matrices(load_model("70b"))) == pytest.approx(
        70.55e9 - 2 * 128256 * 8192, rel=0.001
    )


@st.composite
def prompts(draw: st.DrawFn) -> list[Wanted]:
    """Paths in a tree of blocks."""
    made = []
    for names in draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=40)):
        blocks = [
            sum((name + 1) * 4**depth for depth, name in enumerate(names[: end + 1])) for end in range(len(names))
        ]
        made.append(Wanted(blocks[: draw(st.integers(0, len(blocks)))], blocks))
    return made


@given(prompts(), st.integers(4, 12))
def test_a_store_holds_what_was_written_to_its_slots(requests: list[Wanted], slots: int) -> None:
    index = Index(slots)
    memory = dict(enumerate(index.held()))
    first, steps = dict(memory), []
    for wanted in requests:
        step = index.take(wanted)
        steps.append(step)
        assert [read.block for read in step.reads] == list(wanted.prompt[: len(step.reads)])
        assert all(memory[read.slot] == read.block for read in step.reads)
        # What comes after the hits was not there.
        assert len(step.reads) == len(wanted.prompt) or wanted.prompt[len(step.reads)] not in memory.values()
        for write in step.writes:
            assert memory[write.slot] == write.evicted
            assert write.evicted not in wanted.after
            memory[write.slot] = write.block
        assert set(wanted.after) <= set(memory.values())
        assert index.held() == [memory[slot] for slot in range(slots)]
    memory.update(trace.undo(steps))
    assert memory == first


def test_the_end_of_a_prefix_goes_before_its_beginning() -> None:
    index = Index(4)
    index.take(Wanted([], [1, 2, 3]))
    index.take(Wanted([], [7, 8]))
    assert sorted(index.held()) == [1, 2, 7, 8]
    assert [read.block for read in index.take(Wanted([1, 2, 3], [1, 2, 3])).reads] == [1, 2]


@given(st.integers(0, 5), st.sampled_from([16, 64, 256, 512]), st.floats(0, 4))
def test_requests_are_those_of_their_seed(seed: int, tokens: int, exponent: float) -> None:
    demand = Demand(tokens, 4096, exponent, seed)
    drawn = list(itertools.islice(demand.requests(), 60))
    assert drawn == list(itertools.islice(demand.requests(), 60))
    for wanted in drawn:
        assert list(wanted.after[: len(wanted.prompt)]) == list(wanted.prompt)
        assert len(set(wanted.after)) == len(wanted.after) <= 4096 // tokens


def test_uneven_demand_finds_more_and_conversations_grow() -> None:
    rates = []
    for exponent in (0.0, 2.0):
        requests = Demand(256, 8192, exponent).requests()
        index = Index(64).warmed(requests, 1000)
        rates.append(trace.hit_rate([index.take(each) for each in itertools.islice(requests, 400)]))
    assert 0 < rates[0] < rates[1] < 1
    grown = [each.after for each in itertools.islice(Demand(256, 8192).requests(), 50)]
    assert any(
        list(one) == list(other[: len(one)]) and len(one) < len(other)
        for one, other in itertools.combinations(grown, 2)
    )


LINE = {"timestamp": 27482, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 2353]}


def test_a_trace_of_mooncake_gives_whole_blocks(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{json.dumps(LINE)}\n\n{json.dumps({**LINE, 'timestamp': 30482, 'hash_ids': [46, 48, 9]})}\n")
    requests = trace.read_mooncake(path)
    assert requests == [Wanted((46, 47), (46, 47), 27.482), Wanted((46, 48), (46, 48), 30.482)]
    index = Index(8)
    stream = trace.repeated(requests)
    steps = [index.take(next(stream)) for _ in range(3)]
    # The trace begins again with blocks of its own.
    assert [len(step.reads) for step in steps] == [0, 1, 0]
    assert trace.written_a_second(requests, steps[:2]) == pytest.approx(1.0)
    assert trace.hit_rate(steps[:2]) == 0.25


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "is no JSON"),
        ("[1]", "is no JSON object"),
        (json.dumps({**LINE, "timestamp": "x"}), "`timestamp`"),
        (json.dumps({**LINE, "input_length": -1}), "`input_length`"),
        (json.dumps({**LINE, "output_length": True}), "`output_length`"),
        (json.dumps({**LINE, "input_length": float("nan")}), "`input_length`"),
        (json.dumps({**LINE, "hash_ids": [1, 2]}), "2 `hash_ids` are not the different blocks of 1100 tokens"),
        (json.dumps({**LINE, "hash_ids": [1, 1, 2]}), "3 `hash_ids` are not the different blocks"),
        (json.dumps({**LINE, "hash_ids": [1, 2, -3]}), "`hash_ids` is missing or no list"),
        (json.dumps({**LINE, "hash_ids": None}), "`hash_ids` is missing or no list"),
    ],
)
def test_a_wrong_line_of_a_trace_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{json.dumps(LINE)}\n{line}\n")
    with pytest.raises(UsageProblem) as error:
        trace.read_mooncake(path)
    assert f"`{path}` line 2" in error.value.message
    assert words in error.value.message
    assert error.value.hint


def test_a_trace_without_a_whole_block_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({**LINE, "input_length": 100, "hash_ids": [1]}))
    for wrong in (path, tmp_path / "none", tmp_path):
        with pytest.raises(UsageProblem):
            trace.read_mooncake(wrong)
