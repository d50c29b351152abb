"""`bench kv-cache` without a disk: sizes of KV, traces, the index of a store, figures, the page, wrong calls."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import builders
from shown_records import on_screen
from tunetool.advise.drive_life import Drives
from tunetool.advise.read_model import NAMES, load_model
from tunetool.bench.kv_cache import figures, store, trace
from tunetool.bench.kv_cache.figures import Reading, Row, Setting
from tunetool.bench.kv_cache.model import PAGE, kv_of, kv_of_config, matrices
from tunetool.bench.kv_cache.trace import Demand, Index, Wanted
from tunetool.errors import UsageProblem
from tunetool.measure.evidence import Counted
from tunetool.node.machine.block_stack import Leaf, read_stack
from tunetool.record import Record
from tunetool.report.kinds import write_any_page
from tunetool.verdict import judge

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
    for write in itertools.chain.from_iterable(trace.undo(steps)):
        assert memory[write.slot] == write.evicted
        memory[write.slot] = write.block
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


BLOCK = 2 * PAGE


def order(directory: Path, engine: str, **more: Any) -> dict[str, Any]:
    plain = {"directory": str(directory), "block": BLOCK, "slots": 4, "memory": 2, "threads": 2, "device": "cpu"}
    return {"do": "open", "engine": engine, "direct": False, "seed": 0, **plain, **more}


def filled(directory: Path, engine: str) -> store.Replay:
    replay = store.Replay(order(directory, engine))
    replay.write([(slot, slot + 10, -1) for slot in range(4)])
    return replay


layouts = pytest.mark.parametrize("engine", ["direct", "page-cache"])


@layouts
def test_a_store_gives_what_was_written_and_evicts(tmp_path: Path, engine: str) -> None:
    replay = filled(tmp_path, engine)
    done = replay.steps(
        [{"reads": [(0, 10), (3, 13)], "writes": [(1, 20, 11)]}, {"reads": [], "writes": [(2, 21, 12)]}]
    )
    assert done["wrong"] == 0
    assert done["reading"][0] > 0 == done["reading"][1]
    assert replay.read([(1, 20), (2, 21)])[1] == 0
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in kept) == 4 * BLOCK
    if engine == "page-cache":
        # As LMCache calls them: model, ranks, rank, hash and number format.
        assert {path.name for path in kept} == {f"kv@1@0@{block:x}@bfloat16.pt" for block in (10, 13, 20, 21)}


@layouts
def test_a_damaged_block_and_a_wrong_one_are_seen(tmp_path: Path, engine: str) -> None:
    replay = filled(tmp_path, engine)
    path = tmp_path / store.SLAB if engine == "direct" else tmp_path / store.FILES / "kv@1@0@b@bfloat16.pt"
    with path.open("r+b") as file:
        file.seek((BLOCK if engine == "direct" else 0) + BLOCK // 2 + 100)
        file.write(b"x")
    assert replay.read([(0, 10), (1, 11)])[1] == 1
    assert replay.read([(0, 10), (2, 12)])[1] == 0
    if engine == "direct":
        assert replay.read([(0, 13)])[1] == 1


def test_a_block_that_ends_early_is_an_error(tmp_path: Path) -> None:
    replay = filled(tmp_path, "page-cache")
    (tmp_path / store.FILES / "kv@1@0@a@bfloat16.pt").write_bytes(b"short")
    with pytest.raises(OSError, match="a block ends too early"):
        replay.read([(0, 10)])


def test_vllm_gets_the_blocks_of_a_request_in_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The two functions of `vllm.v1.kv_offload.tiering.fs.io` as vLLM 0.32.0 has them, by their arguments.
    calls: list[int] = []

    def store_all(paths: list[str], view: memoryview, offsets: list[int], size: int, use_o_direct: bool = True) -> None:
        for path, offset in zip(paths, offsets, strict=True):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_bytes(view[offset : offset + size])

    def load_all(paths: list[str], view: memoryview, offsets: list[int], size: int, use_o_direct: bool = True) -> None:
        calls.append(len(paths))
        for path, offset in zip(paths, offsets, strict=True):
            view[offset : offset + size] = Path(path).read_bytes()

    made = SimpleNamespace(batch_store_block=store_all, batch_load_block=load_all)
    monkeypatch.setitem(sys.modules, "vllm.v1.kv_offload.tiering.fs.io", made)
    for name in (
        "vllm",
        "vllm.v1",
        "vllm.v1.kv_offload",
        "vllm.v1.kv_offload.tiering",
        "vllm.v1.kv_offload.tiering.fs",
    ):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    replay = filled(tmp_path, "vllm")
    done = replay.steps([{"reads": [(0, 10), (3, 13)], "writes": [(1, 20, 11)]}])
    assert (done["wrong"], calls) == (0, [2])
    assert replay.read([(1, 20)])[1] == 0
    assert len(list(tmp_path.rglob("*.bin"))) == 4


@pytest.mark.parametrize(
    ("engine", "why"), [("gds", "it needs a GPU"), ("lmcache", "pip install lmcache"), ("vllm", "vllm>=0.25")]
)
def test_an_engine_that_cannot_run_says_why(
    tmp_path: Path, engine: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lmcache", None)
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert why in store.answer(order(tmp_path, engine))["left_out"]
    assert list(tmp_path.iterdir()) == []


GB = 10**9
DISK = Leaf("vda", "disk", None, True, ("vda",))
CONDITIONS: dict[str, Any] = {
    "model": "7b", "token_bytes": 57_344, "block_tokens": 256, "block_bytes": 14_680_064, "store_bytes": 4 * GB,
    "is_past_memory": False, "is_in_memory": False, "threads": 8, "cores": 2, "requests": 16,
}  # fmt: skip


def setting(directory: Path, **more: Any) -> Setting:
    stack = replace(read_stack(str(directory)), medium="disk", in_memory=False, redundant=False, leaves=(DISK,))
    drives = Drives(1, 1000 * GB, 1825e12)
    plain: dict[str, Any] = {"prefill_rate": 10_000.0, "written_a_day": 1e12, "drives": drives}
    plain |= {"hit_rates": [0.5] * 6, "evictions": [3.0] * 6}
    return Setting(stack, CONDITIONS, 256, 14_680_064, **{**plain, **more})


def row(engine: str, seconds: float, **more: Any) -> Row:
    """Six rounds, in which a token takes 0.02 ms after 10 ms."""
    plain: dict[str, Any] = {
        "restored_bytes": GB, "claimed_bytes": 2 * GB, "counted": Counted(2 * GB, 2 * GB, {}),
        "restores": [(256, 0.010 + 256 * 2e-5), (2560, 0.010 + 2560 * 2e-5)],
        "prefixes": {1024: [0.010 + 1024 * 2e-5] * 3}, "written_bytes": GB, "writing": 2.0,
        "drive_read": 2 * GB, "drive_written": GB,
    }  # fmt: skip
    if engine == "fio":
        plain = {name: plain[name] for name in ("restored_bytes", "claimed_bytes", "counted")}
    return Row(engine, {number: Reading(seconds, moment=number, **{**plain, **more}) for number in range(1, 7)})


def rows() -> list[Row]:
    cached = {"counted": None, "drive_read": GB, "drive_written": 3 * GB // 2}
    return [
        row("direct", 0.5),
        row("page-cache", 1.0, **cached),
        row("fio", 0.475),
        Row("gds", left_out="it needs a GPU"),
    ]


def record_of(made: list[Row], about: Setting) -> Record:
    case = figures.case(made, about)
    return builders.record(
        *case.measurements, kind="bench.kv-cache", target="/mnt", checks=list(case.checks), verdict=judge(case)
    )


def values(record: Record) -> Mapping[str, float]:
    return {each.name.removeprefix("kv_cache."): each.value for each in record.measurements}


def test_figures_say_speed_share_time_and_life(tmp_path: Path) -> None:
    record = record_of(rows(), setting(tmp_path))
    known = values(record)
    assert known["direct.restore"] == 2 * GB
    assert known["direct.of_fio"] == pytest.approx(0.95)
    assert known["direct.versus_page_cache"] == 2.0
    assert known["direct.p50"] == pytest.approx(0.01512)
    assert known["direct.prefix-1024.p99"] == pytest.approx(0.03048)
    assert known["direct.prefix-1024.versus_prefill"] == pytest.approx(0.1024 / 0.03048)
    # 10 ms and 0.02 ms a token, against 0.1 ms a token: equal at 125 tokens, within the first block.
    assert known["direct.pays_from"] == 256
    assert (known["direct.from_drives"], known["page-cache.from_drives"]) == (1.0, 0.5)
    assert (known["direct.write_amplification"], known["page-cache.write_amplification"]) == (1.0, 1.5)
    assert known["page-cache.writes_a_day"] == 1.5e12
    # 1,825 TB at 1.5 TB a day.
    assert known["page-cache.drive_life"] / 86_400 == pytest.approx(1825 / 1.5)
    assert (known["hit_rate"], known["evictions"], known["prefill"]) == (0.5, 3.0, 10_000)
    assert "page-cache.prefix-1024.p50" in known
    assert "page-cache.of_fio" not in known, "memory is no share of drives"
    assert record.verdict is not None
    assert record.verdict.status == "pass"


def test_restoring_pays_where_the_lines_cross() -> None:
    points = [(256, 0.1 + 256 * 1e-5), (4096, 0.1 + 4096 * 1e-5)]
    reading = Reading(1.0, 1, 1, None, 0.0, points)
    # 100 ms / (0.1 - 0.01) ms = 1,111 tokens.
    assert figures.pays_from(reading, 10_000, 256) == 1280
    assert math.isinf(figures.pays_from(reading, 150_000, 256))
    assert figures.pays_from(Reading(1.0, 1, 1, None, 0.0, points[:1]), 1000, 256) == 256


def shown(made: list[Row], about: Setting) -> str:
    return " ".join(on_screen(record_of(made, about), None, 100).split())


def test_one_line_says_what_is_slow_why_and_what_to_do(tmp_path: Path) -> None:
    about = setting(tmp_path)
    text = shown(rows(), about)
    assert "`direct` restores 2.00 GB/s, 0.95 of fio's read" in text
    assert "the storage is the limit; faster or more drives restore faster" in text
    assert "restoring pays from 256 tokens on against 10000.0 tokens/s of prefill" in text
    assert "gds: left out, it needs a GPU" in text
    assert "50.0% of the prompts' blocks were there" in text
    even = [row("direct", 0.5), row("fio", 0.45)]
    even[0].readings[2] = replace(even[0].readings[2], seconds=0.6)
    even[0].readings[1] = replace(even[0].readings[1], seconds=0.4)
    assert "these rounds do not decide whether that is 90%" in shown(even, about)
    slow = [row("direct", 1.0), row("fio", 0.5)]
    assert "the program is the limit; try more `--threads`" in shown(slow, about)
    assert "restoring does not pay against" in shown(rows(), replace(about, prefill_rate=1e6))
    assert "give `--prefill-rate`" in shown(rows(), replace(about, prefill_rate=None))
    few = rows()
    few[0].readings = {1: few[0].readings[1]}
    assert "do not decide whether restoring pays" in shown(few, about)
    page = write_any_page(record_of(rows(), about), tmp_path / "record.json")
    assert "restoring pays from 256 tokens on" in page.read_text()


def test_rounds_that_find_nothing_have_no_speed(tmp_path: Path) -> None:
    about, nothing = setting(tmp_path, hit_rates=[0.0], evictions=[9.0]), {"restored_bytes": 0, "restores": ()}
    made = [row("direct", 0.0, **nothing), row("fio", 0.5)]
    known = values(record_of(made, about))
    assert "direct.restore" not in known
    assert "direct.of_fio" not in known
    assert known["direct.prefix-1024.p50"] > 0
    assert "0.0% of the prompts' blocks were there" in shown(made, about)
    made[0].readings[1] = row("direct", 0.5).readings[1]
    assert values(record_of(made, about))["direct.restore"] == 2 * GB


def test_only_bytes_are_judged(tmp_path: Path) -> None:
    about, made = setting(tmp_path), rows()
    made[1].readings[3] = replace(made[1].readings[3], wrong=2)
    verdict = judge(figures.case(made, about))
    assert verdict.status == "fail"
    assert "`page-cache` gives other bytes than were written: 2 blocks with other bytes" in verdict.reasons[0]
    made = rows()
    made[0].failed = "no space"
    assert judge(figures.case(made, about)).status == "error"
    made = rows()
    made[0] = row("direct", 0.5, counted=Counted(2 * GB, GB, {}))
    assert judge(figures.case(made, about)).status == "unproven"
    in_memory = replace(about, stack=replace(about.stack, in_memory=True, leaves=()))
    assert judge(figures.case(rows(), in_memory)).status == "pass"
