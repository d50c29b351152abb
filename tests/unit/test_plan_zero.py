"""The arithmetic of a ds_config: DeepSpeed's partitioning of a model, and the values that are written."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from made_weights import safetensors
from tunetool.advise import zero
from tunetool.advise.ds_config import KINDS, Unreachable, plan
from tunetool.advise.ds_config_plan import Job, Node
from tunetool.advise.precision import FP16, choose
from tunetool.advise.read_model import load_model
from tunetool.advise.shapes import PRESETS, Decoder, Model, preset
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.tune.configs import leaves, read_settings, render
from tunetool.tune.settings import DEFAULTS

GIB = 2**30
BLOCK = dataclasses.replace(DEFAULTS, intra_op_parallelism=8, queue_depth=32).block()
V100 = (7, 0)
H100 = Node(memory_bytes=2048 * GIB, free_bytes=28 * 10**12)


def job(kind: str = "zero3-nvme", model: str = "70b", **changes: Any) -> Job:
    made = Job(kind=kind, model=preset(model), aio=BLOCK, nvme_path="/mnt/nvme_raid0")
    return dataclasses.replace(made, **changes)


# Published totals: Llama 2 7B 6.74 billion (arXiv 2307.09288), Llama 3.1 70B 70.6 billion (arXiv 2407.21783).
@pytest.mark.parametrize(("name", "total"), [("llama2-7b", 6_738_415_616), ("70b", 70_553_706_496)])
def test_known_models_have_as_many_parameters_as_published(name: str, total: int) -> None:
    assert preset(name).numel == total


def test_buffers_are_elements_of_the_largest_tensors_part() -> None:
    planned = plan(job(), H100)
    # Embedding and output layer: 128256 x 8192, over 8 ranks. In bytes it would be twice that.
    assert planned.values["buffer_size"] == 128256 * 8192 // 8
    assert planned.values["buffer_count"] == 14, "seven swapped tensors in a layer, twice"
    locked = next(item for item in planned.items if item.name == "parameter buffers")
    assert locked.rank_bytes == 14 * (128256 * 8192 // 8) * 2


def test_a_part_is_padded_to_the_next_element() -> None:
    assert [zero.partition(numel, 8) for numel in (1, 8, 9)] == [1, 1, 2]
    assert plan(job("zero-inference", world=7), H100).values["buffer_size"] == 150096165, (
        "1,050,673,152 / 7 = 150,096,164.6"
    )


def test_sub_groups_are_those_of_deepspeed() -> None:
    # In _create_fp16_sub_groups, the partition that fills a sub-group is its last.
    assert zero.sub_groups([3, 3, 3, 1, 9, 2], 5) == [[3, 3], [3, 1, 9], [2]]
    assert zero.sub_groups([3, 3], 6) == [[3, 3]]
    assert zero.largest_group([3, 3, 3, 1, 9, 2], 5) == 13


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=40), st.integers(1, 10**7))
def test_sub_groups_hold_every_partition_and_are_full(parts: list[int], size: int) -> None:
    groups = zero.sub_groups(parts, size)
    assert [part for group in groups for part in group] == parts
    assert all(sum(group) >= size for group in groups[:-1])
    assert all(sum(group[:-1]) < size for group in groups) or len(groups) == 1


def test_three_sets_of_buffers_when_reads_and_writes_overlap() -> None:
    planned = plan(job(), H100)
    assert planned.values["pipeline"] is True
    assert planned.values["optimizer_buffer_count"] == 12
    parts = zero.partitions(planned.job.model, 8)
    largest = zero.largest_group(parts, planned.values["sub_group"])
    buffers = next(item for item in planned.items if item.name == "optimizer buffers")
    assert buffers.rank_bytes == 12 * zero.aligned(largest, 8, 4) * 4
    assert largest % (1024 * 8 // 4) or zero.aligned(largest, 8, 4) == largest


def test_less_memory_means_smaller_groups_and_then_a_refusal() -> None:
    def at(memory: int) -> tuple[int, bool]:
        values = plan(job(), Node(memory_bytes=memory * GIB, free_bytes=28 * 10**12)).values
        return values["sub_group"], values["pipeline"]

    plenty, less, little = at(2048), at(380), at(275)
    assert plenty[0] > less[0]
    assert less[1] is True
    assert little[1] is False
    with pytest.raises(CannotJudge) as refused:
        at(200)
    assert "in each node's memory" in refused.value.message


def test_what_is_planned_stays_within_memory_and_memlock() -> None:
    for memory in (300, 500, 1000, 2000):
        node = Node(memory_bytes=memory * GIB, memlock=14 * GIB, free_bytes=28 * 10**12)
        planned = plan(job(), node)
        assert planned.rank_bytes("locked") <= 14 * GIB
        assert planned.rank_bytes("host", "locked") * 8 <= memory * GIB * 0.75


def test_memlock_that_is_too_small_is_refused_with_what_to_do() -> None:
    with pytest.raises(CannotJudge) as refused:
        plan(job(), dataclasses.replace(H100, memlock=8 * 2**20))
    assert "RLIMIT_MEMLOCK is 8 MiB" in refused.value.message
    assert "ulimit -l unlimited" in str(refused.value.hint)


def test_swap_files_that_do_not_fit_are_refused() -> None:
    # 16 bytes of states and gradients and 2 of parameters for each of 70.6 billion: 1.27 TB.
    with pytest.raises(CannotJudge) as refused:
        plan(job(), dataclasses.replace(H100, free_bytes=10**12))
    assert "the swap files of `70b` take 1.27 TB" in refused.value.message
    assert plan(job(nodes=2, world=16), dataclasses.replace(H100, free_bytes=10**12)).values["buffer_count"] == 14


def test_a_shape_whose_gradients_would_be_misread_is_refused() -> None:
    # Seen to train on wrong gradients without a word: 1032 / 2 elements of a norm put what follows off a sector.
    odd = Model("odd", "made up", Decoder(1032, 2, 8, 8, 2817, 4097, 129).tensors())
    with pytest.raises(CannotJudge) as refused:
        plan(Job("zero3-nvme", odd, BLOCK, "/x", world=2), H100)
    assert "direct I/O cannot reach" in refused.value.message
    assert plan(Job("zero3-cpu", odd, BLOCK, "/x", world=2), H100).values
    assert zero.misread_gradients([2**20, 2**20], 2**30, 2**20, 512) == 0
    assert zero.misread_gradients([2**20 + 1, 2**20], 2**30, 2**20, 512) == 1
    assert zero.misread_gradients([2**20 + 128, 2**20], 2**30, 2**20, 512) == 0, "128 elements in fp32 are a sector"
    assert zero.misread_gradients([100, 100], 2**30, 2**20, 512) == 0, "small ones stay in memory"


def test_drives_that_take_any_address_have_no_odd_shapes() -> None:
    assert plan(job(world=7), dataclasses.replace(H100, address_bytes=4)).values["buffer_size"] == 150096165


@pytest.mark.parametrize("name", ["7b", "3b"])
def test_each_way_out_of_a_refusal_is_one_that_works(name: str) -> None:
    # A bias of 3,420 elements in the vision tower puts what follows it off a sector, on any number of ranks.
    node = dataclasses.replace(H100, address_why="direct I/O in `/x` reads to multiples of 512 bytes")
    with pytest.raises(Unreachable) as refused:
        plan(Job("zero3-nvme", load_model(name), BLOCK, "/x", world=1), node)
    assert "on 1 rank would" in refused.value.message
    assert "(direct I/O in `/x` reads to multiples of 512 bytes)" in refused.value.message
    hint = str(refused.value.hint)
    assert "--world-size" not in hint, "none works"
    assert "use `zero3-cpu`, or `--dma-alignment BYTES`" in hint
    assert plan(Job("zero3-cpu", load_model(name), BLOCK, "/x", world=1), node).values
    finest = dataclasses.replace(node, address_bytes=4)
    assert plan(Job("zero3-nvme", load_model(name), BLOCK, "/x", world=1), finest).values


def test_the_world_sizes_of_a_hint_pass() -> None:
    with pytest.raises(Unreachable) as refused:
        plan(job(world=14, nodes=2), dataclasses.replace(H100, memory_bytes=700 * GIB))
    worlds = [int(world) for world in re.findall(r"`--world-size (\d+)`", str(refused.value.hint))]
    assert worlds == [16, 8]
    assert all(plan(job(world=world, nodes=2), H100).values for world in worlds)
    assert "`zero3-cpu`" not in str(refused.value.hint)


def test_a_released_tensor_gives_its_buffer_back_at_once() -> None:
    assert plan(job(), H100).values["reuse"] == 0
    assert plan(job("zero3-cpu"), H100).values["reuse"] == 10**9


def test_a_larger_block_keeps_more_in_memory() -> None:
    model = preset("llama2-7b")
    small = zero.swapped_tensors(model, 8, 2**20)
    large = zero.swapped_tensors(model, 8, 16 * 2**20)
    assert {tensor.layer for tensor in large} == {None}
    assert len(small) == 32 * 7 + 2


@pytest.mark.parametrize(
    ("changes", "near"),
    [({"batch": 2047, "micro_batch": 2}, "2032 or 2048"), ({"batch": 3, "micro_batch": 2}, "use 16")],
)
def test_a_batch_that_the_ranks_cannot_share_is_refused(changes: dict[str, int], near: str) -> None:
    with pytest.raises(UsageProblem) as refused:
        plan(job(**changes), H100)
    assert near in str(refused.value.hint)


def test_ranks_spread_evenly_over_nodes() -> None:
    with pytest.raises(UsageProblem):
        plan(job(world=9, nodes=2), H100)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "node", [H100, Node(2048 * GIB, gpu=False), Node(2048 * GIB, precision=choose("auto", [V100]))]
)
def test_every_value_of_every_kind_has_a_reason(kind: str, node: Node) -> None:
    planned = plan(job(kind, "llama2-7b"), node)
    document = render(planned)
    unexplained = [path for path, _ in leaves(document) if path not in planned.reasons]
    assert unexplained == []
    batch = document["train_micro_batch_size_per_gpu"] * document.get("gradient_accumulation_steps", 1) * 8
    assert document["train_batch_size"] == batch
    assert ("bf16" in document) is (node.precision.format == "bf16")
    assert document.get("fp16") == (None if "bf16" in document else dict(FP16))
    assert "aio" not in document["zero_optimization"]
    if kind in ("zero3-nvme", "zero3-nvme-70b", "zero-inference"):
        assert document["aio"] == BLOCK
        assert document["zero_optimization"]["offload_param"]["pin_memory"] is node.gpu
        assert "buffer_size" not in document["zero_optimization"].get("offload_optimizer", {})
    else:
        assert "aio" not in document


def test_a_config_json_gives_the_same_tensors_as_the_known_model(tmp_path: Path) -> None:
    sizes = PRESETS["70b"][1]
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama",
                "hidden_size": sizes.hidden,
                "num_hidden_layers": sizes.layers,
                "num_attention_heads": sizes.heads,
                "num_key_value_heads": sizes.kv_heads,
                "intermediate_size": sizes.intermediate,
                "vocab_size": sizes.vocabulary,
            }
        )
    )
    assert load_model(str(tmp_path)).tensors == preset("70b").tensors


def test_biases_that_a_config_json_has_are_counted(tmp_path: Path) -> None:
    """The sizes of Granite 3B Code (config.json of ibm-granite/granite-3b-code-base-2k), with the number of
    parameters that transformers builds of them."""
    sizes = {"hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 32, "num_hidden_layers": 32}
    config = {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(
        json.dumps({**config, **sizes, "num_key_value_heads": 32, "vocab_size": 49152})
    )
    model = load_model(str(tmp_path))
    assert model.numel == 3_482_503_680
    biases = [tensor for tensor in model.tensors if tensor.name.startswith("model.layers.0.") and "bias" in tensor.name]
    assert sum(tensor.numel for tensor in biases) == 4 * 2560 + 2 * 10240 + 2560


def test_weights_name_their_tensors_in_the_order_of_the_modules(tmp_path: Path) -> None:
    safetensors(tmp_path / "model-00001-of-00002.safetensors", {"lm_head.weight": [9, 4], "model.layers.10.w": [4, 4]})
    safetensors(tmp_path / "model-00002-of-00002.safetensors", {"model.embed.weight": [9, 4], "model.layers.2.w": [2]})
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = {"weight_map": dict.fromkeys(["a"], names[0]) | {"b": names[1]}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    expected = ["model.embed.weight", "model.layers.2.w", "model.layers.10.w", "lm_head.weight"]
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        model = load_model(str(path))
        assert [tensor.name for tensor in model.tensors] == expected
        assert model.numel == 36 + 2 + 16 + 36


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ('{"model_type": "mamba"}', "type `mamba`"),
        ('{"model_type": "llama", "hidden_size": 8}', "missing or not a number"),
        ('{"model_type": ["llama"]}', "does not give its tensors"),
    ],
)
def test_a_config_json_that_says_too_little_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(UsageProblem) as refused:
        load_model(str(path))
    assert message in refused.value.message


def test_files_that_are_no_weights_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for content in (b"", b"short", b"\xff" * 64, struct.pack("<Q", 4) + b"[1]]"):
        path.write_bytes(content)
        with pytest.raises(UsageProblem):
            load_model(str(path))
    with pytest.raises(UsageProblem):
        load_model(str(tmp_path / "nothing"))


def test_a_header_or_config_nested_without_end_is_refused(tmp_path: Path) -> None:
    for name, content in (
        ("model.safetensors", struct.pack("<Q", 100_000) + b"[" * 100_000),
        ("config.json", b"[" * 100_000),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageProblem, match=f"{name}` "):
            load_model(str(tmp_path / name))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "model.safetensors.index.json"])
def test_a_fifo_in_place_of_a_file_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(UsageProblem, match=f"{name}` cannot be read: it is not a regular file"):
        load_model(str(tmp_path / name))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"thread_count": 8}, "unknown: thread_count"),
        ({"single_submit": "false"}, "`single_submit` is `'false'`"),
        ({"queue_depth": "32"}, "`queue_depth` is `'32'`"),
        ({"queue_depth": True}, "`queue_depth` is `True`"),
        ({"block_size": 0}, "`block_size` is `0`"),
        ({"block_size": None}, "`block_size` is `None`"),
    ],
)
def test_an_aio_block_that_deepspeed_would_ignore_is_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    path = tmp_path / "aio.json"
    path.write_text(json.dumps({"aio": {**BLOCK, **change}}))
    with pytest.raises(UsageProblem) as refused:
        read_settings(path)
    assert message in refused.value.message


def test_an_aio_block_is_read_with_and_without_its_name(tmp_path: Path) -> None:
    path = tmp_path / "aio.json"
    for document in ({"aio": BLOCK}, BLOCK, {name: BLOCK[name] for name in BLOCK if name != "use_gds"}):
        path.write_text(json.dumps(document))
        assert read_settings(path).block() == BLOCK
