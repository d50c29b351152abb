"""How many parameters the files of a folder hold: packed weights, several copies, parts of a model."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import advised
from advised import refused
from made_weights import described
from tunetool.advise.read_model import load_model
from tunetool.errors import UsageProblem

HIDDEN, WIDE, LAYERS, VOCABULARY, KEYS = 4096, 14336, 32, 128256, 1024
LLAMA_8B = 8_030_261_248
"""Parameters of Llama 3.1 8B, as its publisher counts them."""
Tensors = dict[str, tuple[str, tuple[int, ...]]]
Packed = Callable[[str, int, int], Tensors]
counted = partial(advised.answered, "model")


def llama(linear: Packed) -> Tensors:
    """Llama 3.1 8B, each of its linear layers as ``linear`` stores it."""
    tensors: Tensors = {
        "model.embed_tokens.weight": ("F16", (VOCABULARY, HIDDEN)),
        "lm_head.weight": ("F16", (VOCABULARY, HIDDEN)),
        "model.norm.weight": ("F16", (HIDDEN,)),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name, rows, columns in (
            ("self_attn.q_proj", HIDDEN, HIDDEN),
            ("self_attn.k_proj", KEYS, HIDDEN),
            ("self_attn.v_proj", KEYS, HIDDEN),
            ("self_attn.o_proj", HIDDEN, HIDDEN),
            ("mlp.gate_proj", WIDE, HIDDEN),
            ("mlp.up_proj", WIDE, HIDDEN),
            ("mlp.down_proj", HIDDEN, WIDE),
        ):
            tensors.update(linear(prefix + name, rows, columns))
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = ("F16", (HIDDEN,))
    return tensors


def plain(name: str, rows: int, columns: int) -> Tensors:
    return {f"{name}.weight": ("F16", (rows, columns))}


def awq(name: str, rows: int, columns: int) -> Tensors:
    return {
        f"{name}.qweight": ("I32", (columns, rows // 8)),
        f"{name}.qzeros": ("I32", (columns // 128, rows // 8)),
        f"{name}.scales": ("F16", (columns // 128, rows)),
    }


def gptq(name: str, rows: int, columns: int, bits: int = 4) -> Tensors:
    return {
        f"{name}.qweight": ("I32", (columns * bits // 32, rows)),
        f"{name}.qzeros": ("I32", (columns // 128, rows * bits // 32)),
        f"{name}.scales": ("F16", (columns // 128, rows)),
        f"{name}.g_idx": ("I32", (columns,)),
    }


def marlin(name: str, rows: int, columns: int) -> Tensors:
    return {
        f"{name}.qweight": ("I32", (columns // 16, rows * 2)),
        f"{name}.scales": ("F16", (columns // 128, rows)),
    }


def bitsandbytes(name: str, rows: int, columns: int) -> Tensors:
    weight, count = f"{name}.weight", rows * columns
    return {
        weight: ("U8", (count // 2, 1)),
        f"{weight}.absmax": ("U8", (count // 64,)),
        f"{weight}.nested_absmax": ("F32", (count // 64 // 256,)),
        f"{weight}.nested_quant_map": ("F32", (256,)),
        f"{weight}.quant_map": ("F32", (16,)),
        f"{weight}.quant_state.bitsandbytes__nf4": ("U8", (97,)),
    }


def llm_int8(name: str, rows: int, columns: int) -> Tensors:
    return {
        f"{name}.weight": ("I8", (rows, columns)),
        f"{name}.SCB": ("F32", (rows,)),
        f"{name}.weight_format": ("U8", ()),
    }


def fp8(name: str, rows: int, columns: int) -> Tensors:
    return {
        f"{name}.weight": ("F8_E4M3", (rows, columns)),
        f"{name}.weight_scale_inv": ("F32", (rows // 128, columns // 128)),
        f"{name}.input_scale": ("F32", (1,)),
    }


def eetq(name: str, rows: int, columns: int) -> Tensors:
    return {f"{name}.qweight": ("I8", (columns, rows)), f"{name}.weight_scales": ("F16", (rows,))}


def compressed_int4(name: str, rows: int, columns: int) -> Tensors:
    return {
        f"{name}.weight_packed": ("I32", (rows, columns // 8)),
        f"{name}.weight_scale": ("BF16", (rows, columns // 128)),
        f"{name}.weight_shape": ("I64", (2,)),
    }


def compressed_nvfp4(name: str, rows: int, columns: int) -> Tensors:
    return {
        f"{name}.weight_packed": ("U8", (rows, columns // 2)),
        f"{name}.weight_scale": ("F8_E4M3", (rows, columns // 16)),
        f"{name}.weight_global_scale": ("F32", (1,)),
        f"{name}.input_global_scale": ("F32", (1,)),
    }


def modelopt_nvfp4(name: str, rows: int, columns: int) -> Tensors:
    return {
        f"{name}.weight": ("U8", (rows, columns // 2)),
        f"{name}.weight_scale": ("F8_E4M3", (rows, columns // 16)),
        f"{name}.weight_scale_2": ("F32", ()),
        f"{name}.input_scale": ("F32", ()),
        f"{name}.k_scale": ("F32", ()),
    }


def mlx(name: str, rows: int, columns: int) -> Tensors:
    return {
        f"{name}.weight": ("U32", (rows, columns // 8)),
        f"{name}.scales": ("F16", (rows, columns // 64)),
        f"{name}.biases": ("F16", (rows, columns // 64)),
    }


def hqq(name: str, rows: int, columns: int) -> Tensors:
    return {
        f"{name}.W_q": ("U8", (rows * columns // 128, 64)),
        f"{name}.scale": ("F16", (rows * columns // 64, 1)),
        f"{name}.zero": ("F16", (rows * columns // 64, 1)),
    }


def torchao(name: str, rows: int, columns: int) -> Tensors:
    return {
        f"{name}._weight_qdata": ("U8", (rows, columns // 2)),
        f"{name}._weight_scale": ("F16", (columns // 128, rows)),
        f"{name}._weight_zero_point": ("F16", (columns // 128, rows)),
    }


def quip(name: str, rows: int, columns: int) -> Tensors:
    return {f"{name}.Qidxs": ("I64", (rows, columns // 8)), f"{name}.SU": ("F16", (columns,))}


SIZES = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
}
COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}
PROVEN: Mapping[str, tuple[Packed, Mapping[str, Any]]] = {
    "plain": (plain, {}),
    "AWQ": (awq, {}),
    "GPTQ of 4 bits": (gptq, {}),
    "GPTQ of 8 bits": (partial(gptq, bits=8), {}),
    "GPTQ of 2 bits": (partial(gptq, bits=2), {}),
    "GPTQ of 3 bits": (partial(gptq, bits=3), {}),
    "Marlin": (marlin, {"quantization_config": {"quant_method": "gptq", "bits": 4}}),
    "bitsandbytes of 4 bits": (bitsandbytes, {}),
    "bitsandbytes of 8 bits": (llm_int8, {}),
    "fp8 with scales": (fp8, {}),
    "EETQ": (eetq, {}),
    "compressed-tensors of 4 bits": (compressed_int4, {"quantization_config": COMPRESSED}),
    "compressed-tensors, NVFP4": (compressed_nvfp4, {}),
    "ModelOpt, NVFP4": (modelopt_nvfp4, {}),
    "MLX": (mlx, {"quantization": {"group_size": 64, "bits": 4}}),
}
UNPROVEN: Mapping[str, Packed] = {
    "HQQ": hqq,
    "torchao": torchao,
    "QuIP#": quip,
    "Marlin without its bits": marlin,
    "compressed-tensors without its bits": compressed_int4,
    "MLX without its bits": mlx,
    "integers": lambda name, rows, columns: {f"{name}.weight": ("I8", (rows, columns))},
}


@pytest.mark.parametrize("form", PROVEN)
def test_packed_weights_count_as_what_they_unpack_to(form: str, tmp_path: Path) -> None:
    packed, config = PROVEN[form]
    described(tmp_path / "model.safetensors", llama(packed))
    if config:
        (tmp_path / "config.json").write_text(json.dumps(config))
    document = counted(str(tmp_path), "--gpu-memory", "80GB", "--gpus", "1", "--memory", "4TB")
    assert document["parameters"] == LLAMA_8B
    fits = {(each["stage"], each["offload"]) for each in document["strategies"] if not each["lacks"]}
    assert (0, "none") not in fits


@pytest.mark.parametrize("form", UNPROVEN)
def test_where_the_files_do_not_prove_it_the_config_counts(form: str, tmp_path: Path) -> None:
    described(tmp_path / "model.safetensors", llama(UNPROVEN[form]))
    with refused(f"`{tmp_path / 'model.safetensors'}`: `model.layers.0.self_attn.q_proj."):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, "model_type": "unheard_of"}))
    with refused("`model.layers.0.self_attn.q_proj."):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    model = load_model(str(tmp_path))
    assert (model.numel, model.source) == (
        LLAMA_8B,
        f"the sizes in `{tmp_path / 'config.json'}`: its weights are packed",
    )


def test_each_packed_tensor_gets_the_shape_of_its_weight(tmp_path: Path) -> None:
    for form in ("AWQ", "GPTQ of 3 bits", "fp8 with scales", "ModelOpt, NVFP4", "compressed-tensors, NVFP4"):
        described(tmp_path / form / "model.safetensors", PROVEN[form][0]("model.layers.0.mlp.up_proj", 256, 384))
        (tensor,) = load_model(str(tmp_path / form)).tensors
        assert (tensor.name, tensor.shape) == ("model.layers.0.mlp.up_proj.weight", (256, 384))


def test_bitsandbytes_and_compressed_tensors_tell_their_shape(tmp_path: Path) -> None:
    state = b'{"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [3, 5]}'
    odd = {"w.weight": ("U8", (8, 1)), "w.weight.quant_map": ("F32", (16,))}
    odd["w.weight.quant_state.bitsandbytes__nf4"] = ("U8", (len(state),))
    described(tmp_path / "a/model.safetensors", odd, {"w.weight.quant_state.bitsandbytes__nf4": state})
    (tensor,) = load_model(str(tmp_path / "a")).tensors
    assert tensor.shape == (3, 5)
    narrow: Tensors = {"w.weight_packed": ("I32", (6, 2)), "w.weight_scale": ("BF16", (6, 1))}
    narrow["w.weight_shape"] = ("I64", (2,))
    shape = b"".join(size.to_bytes(8, "little") for size in (6, 13))
    described(tmp_path / "b/model.safetensors", narrow, {"w.weight_shape": shape})
    (tmp_path / "b/config.json").write_text(json.dumps({"quantization_config": COMPRESSED}))
    (tensor,) = load_model(str(tmp_path / "b")).tensors
    assert tensor.shape == (6, 13)


def test_gpt_oss_counts_as_published(tmp_path: Path) -> None:
    hidden, experts = 2880, 32
    tensors: Tensors = {
        "model.embed_tokens.weight": ("BF16", (201088, hidden)),
        "lm_head.weight": ("BF16", (201088, hidden)),
        "model.norm.weight": ("BF16", (hidden,)),
    }
    for layer in range(24):
        prefix = f"model.layers.{layer}."
        for name, rows, columns in (("q", 4096, hidden), ("k", 512, hidden), ("v", 512, hidden), ("o", hidden, 4096)):
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = ("BF16", (rows, columns))
            tensors[f"{prefix}self_attn.{name}_proj.bias"] = ("BF16", (rows,))
        tensors[f"{prefix}self_attn.sinks"] = ("BF16", (64,))
        tensors[f"{prefix}mlp.router.weight"] = ("BF16", (experts, hidden))
        tensors[f"{prefix}mlp.router.bias"] = ("BF16", (experts,))
        for name, rows in (("gate_up", 5760), ("down", hidden)):
            tensors[f"{prefix}mlp.experts.{name}_proj_blocks"] = ("U8", (experts, rows, 90, 16))
            tensors[f"{prefix}mlp.experts.{name}_proj_scales"] = ("U8", (experts, rows, 90))
            tensors[f"{prefix}mlp.experts.{name}_proj_bias"] = ("BF16", (experts, rows))
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = ("BF16", (hidden,))
    described(tmp_path / "model.safetensors", tensors)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_oss", "num_experts_per_tok": 4}))
    document = counted(str(tmp_path))
    assert document["parameters"] == 20_914_757_184
    # Published without the embedding of the input.
    assert document["active_parameters"] - 201088 * hidden == pytest.approx(3.61e9, rel=0.001)


def test_buffers_are_no_parameters(tmp_path: Path) -> None:
    described(
        tmp_path / "model.safetensors",
        {
            "h.0.attn.bias": ("BOOL", (1, 1, 1024, 1024)),
            "bn.num_batches_tracked": ("I64", ()),
            "embeddings.position_ids": ("I64", (1, 512)),
            "empty": ("F32", (0,)),
            "h.0.w": ("F32", (768, 768)),
            "double": ("F64", (3, 3)),
        },
    )
    assert load_model(str(tmp_path)).numel == 768 * 768 + 9


WEIGHTS: Tensors = {
    "model.embed_tokens.weight": ("BF16", (64, 8)),
    "model.layers.0.mlp.up_proj.weight": ("BF16", (16, 8)),
}
MAKERS: Tensors = {"tok_embeddings.weight": ("BF16", (64, 8)), "layers.0.feed_forward.w3.weight": ("BF16", (16, 8))}
ADAPTER: Tensors = {"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": ("BF16", (4, 8))}
COUNT = 64 * 8 + 16 * 8


@pytest.mark.parametrize(
    "files",
    [
        {"model": WEIGHTS, "consolidated": MAKERS},
        {"model": WEIGHTS, "model.fp16": {name: ("F16", shape) for name, (_, shape) in WEIGHTS.items()}},
        {"model": WEIGHTS, "adapter_model": ADAPTER},
        {"consolidated": MAKERS, "adapter_model": ADAPTER},
        {"model-00001-of-00001": WEIGHTS, "consolidated": MAKERS},
        {"model": WEIGHTS, "model-00001-of-00002": WEIGHTS},
    ],
    ids=", ".join,
)
def test_weights_that_lie_in_a_folder_twice_count_once(files: dict[str, Tensors], tmp_path: Path) -> None:
    for name, tensors in files.items():
        described(tmp_path / f"{name}.safetensors", tensors)
    assert load_model(str(tmp_path)).numel == COUNT


def test_files_without_an_index_count_if_all_are_there(tmp_path: Path) -> None:
    for number, (name, tensor) in enumerate(WEIGHTS.items(), 1):
        described(tmp_path / f"model-0000{number}-of-00002.safetensors", {name: tensor})
    assert load_model(str(tmp_path)).numel == COUNT
    part = tmp_path / "model-00002-of-00002.safetensors"
    with refused(f"`{part}` is one of the 2 files of a model"):
        load_model(str(part))
    part.unlink()
    with refused(f"`{part}` is missing"):
        load_model(str(tmp_path))
    for kind in ("model", "io"):
        with refused("00002-of-00002.safetensors` is missing"):
            advised.run(kind, *([] if kind == "model" else ["--model"]), str(tmp_path))


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("one", "other"), "`one.safetensors`, `other.safetensors`"),
        (("model.fp16", "model.fp32"), "`model.fp16.safetensors`, `model.fp32.safetensors`"),
    ],
)
def test_files_that_may_or_may_not_be_one_model_are_refused(names: tuple[str, ...], words: str, tmp_path: Path) -> None:
    for name in names:
        described(tmp_path / f"{name}.safetensors", WEIGHTS)
    with refused(words):
        load_model(str(tmp_path))
    assert load_model(str(tmp_path / f"{names[0]}.safetensors")).numel == COUNT


def test_an_adapter_alone_is_no_model(tmp_path: Path) -> None:
    described(tmp_path / "adapter_model.safetensors", ADAPTER)
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    for path in (tmp_path, tmp_path / "adapter_model.safetensors"):
        with refused("adapter_model.safetensors` holds an adapter"):
            load_model(str(path))


def test_a_tensor_in_two_files_of_an_index_is_refused(tmp_path: Path) -> None:
    for file in ("a", "b"):
        described(tmp_path / f"{file}.safetensors", WEIGHTS)
    index = {"weight_map": dict(zip(WEIGHTS, ("a.safetensors", "b.safetensors"), strict=True))}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with refused(f"`model.embed_tokens.weight` is in `a.safetensors` and in `b.safetensors` of `{tmp_path}`"):
        load_model(str(tmp_path))


POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 4976698672\n"


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "config.json"])
def test_a_git_lfs_pointer_is_named_with_what_brings_the_file(name: str, tmp_path: Path) -> None:
    if name.endswith("index.json"):
        described(tmp_path / "a.safetensors", WEIGHTS)
    (tmp_path / name).write_text(POINTER)
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(UsageProblem) as caught:
            load_model(str(path))
        assert caught.value.message == f"`{tmp_path / name}` is a Git LFS pointer, not the file itself"
        assert "`git lfs pull`" in str(caught.value.hint)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "config.json"])
@pytest.mark.parametrize("kind", ["FIFO", "directory", "device"])
def test_what_is_no_file_is_called_what_it_is(kind: str, name: str, tmp_path: Path) -> None:
    if name.endswith("index.json"):
        described(tmp_path / "a.safetensors", WEIGHTS)
    path = tmp_path / name
    makes: dict[str, Callable[[], None]] = {
        "FIFO": lambda: os.mkfifo(path),
        "directory": path.mkdir,
        "device": lambda: path.symlink_to("/dev/zero"),
    }
    makes[kind]()
    with refused(f"`{path}` cannot be read: it is not a regular file but a {kind}"):
        load_model(str(tmp_path))
