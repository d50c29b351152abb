"""The configurations of Qwen2.5-VL, and the tensors that a configuration defines. Pure.

The sizes are those of the published checkpoints (config.json of Qwen/Qwen2.5-VL-7B-Instruct and -3B-Instruct), and so
are the names of the tensors, which every version of transformers reads; version 5 renames them in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunetool import regular_files
from tunetool.advise.shapes import Decoder, Tensor, check_sizes, size_of, unread
from tunetool.errors import UsageProblem

MODEL_TYPE = "qwen2_5_vl"
LORA_TARGETS = r".*\.layers\.\d+\.(self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj"
"""Every linear layer of the language model, not of the vision tower, as LLaMA-Factory's `lora_target: all` for this
family."""
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
"""Qwen2.5's special tokens in the order of their numbers; the first one's is ``bos_token_id``."""


def _configuration(
    text: Mapping[str, int], vision: Mapping[str, Any], tied: bool, first_special: int, mrope: tuple[int, int, int]
) -> dict[str, Any]:
    number = {name: first_special + index for index, name in enumerate(SPECIAL_TOKENS)}
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": MODEL_TYPE,
        "attention_dropout": 0.0,
        "bos_token_id": number["<|endoftext|>"],
        "eos_token_id": number["<|im_end|>"],
        "pad_token_id": number["<|endoftext|>"],
        "vision_start_token_id": number["<|vision_start|>"],
        "vision_end_token_id": number["<|vision_end|>"],
        "vision_token_id": number["<|vision_pad|>"],
        "image_token_id": number["<|image_pad|>"],
        "video_token_id": number["<|video_pad|>"],
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 128000,
        "max_window_layers": 28,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": list(mrope)},
        "sliding_window": 32768,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        **text,
        "vision_config": {
            "hidden_act": "silu",
            "in_chans": 3,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "temporal_patch_size": 2,
            "tokens_per_second": 2,
            "window_size": 112,
            **vision,
        },
    }


def _vision(depth: int, hidden: int, intermediate: int, heads: int, out: int, full: list[int]) -> dict[str, Any]:
    return {
        "depth": depth,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_heads": heads,
        "out_hidden_size": out,
        "fullatt_block_indexes": full,
    }


def _text(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocabulary: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
    }


_TRUE_TOWER = (32, 1280, 3420, 16)
_TRUE_FULL = [7, 15, 23, 31]

CONFIGURATIONS: Mapping[str, dict[str, Any]] = {
    "7b": _configuration(
        _text(3584, 28, 28, 4, 18944, 152064), _vision(*_TRUE_TOWER, 3584, _TRUE_FULL), False, 151643, (16, 24, 24)
    ),
    "3b": _configuration(
        _text(2048, 36, 16, 2, 11008, 151936), _vision(*_TRUE_TOWER, 2048, _TRUE_FULL), True, 151643, (16, 24, 24)
    ),
    "tiny": _configuration(_text(256, 4, 8, 2, 768, 320), _vision(2, 64, 128, 4, 256, [1]), False, 256, (4, 6, 6)),
}
"""config.json by size, as published: the language model's sizes are at the top level, beside ``vision_config``."""


def read_configuration(directory: Path) -> dict[str, Any]:
    """Read config.json. Raises ``UsageProblem`` where it is missing, unreadable, or of another type of model."""
    path = directory / "config.json"
    hint = "name a directory with config.json and the weights of a Qwen2.5-VL, or one of `7b`, `3b`, `tiny`"
    try:
        document = regular_files.read_json(path)
    except FileNotFoundError:
        what = "has no `config.json`" if directory.is_dir() else "is not a directory"
        raise UsageProblem(f"`{directory}` {what}", hint) from None
    except (OSError, ValueError) as error:
        raise UsageProblem(f"`{path}` cannot be read: {error}", hint) from None
    model_type = document.get("model_type") if isinstance(document, dict) else None
    if model_type != MODEL_TYPE:
        raise UsageProblem(f"`{path}` describes a model of type `{model_type}`, not `{MODEL_TYPE}`", hint)
    return dict(document)


def is_tied(configuration: Mapping[str, Any]) -> bool:
    """Whether the output layer and the embedding share one tensor."""
    text = configuration.get("text_config") or {}
    return bool(configuration.get("tie_word_embeddings") or text.get("tie_word_embeddings"))


def tensors(configuration: Mapping[str, Any], path: str) -> tuple[Tensor, ...]:
    """The stored parameters under their published names, those of the vision tower first.

    Raises ``UsageProblem`` where a size is missing from the configuration; ``path`` names it in the message.
    """
    try:
        # transformers 5 writes the language model's sizes into a block of their own.
        text, vision = decoder(configuration), configuration["vision_config"]
        check_sizes(path, text.layers, text.hidden, text.intermediate, text.vocabulary, text.heads)
        check_sizes(
            path, size_of(vision, "depth"), size_of(vision, "hidden_size"), size_of(vision, "intermediate_size")
        )
        return (*_tower(vision), *text.tensors())
    except (KeyError, TypeError, ValueError, ZeroDivisionError, AttributeError, OverflowError) as error:
        raise UsageProblem(f"`{path}`: {unread(error)}", "is it a Qwen2.5-VL's config.json?") from None


def decoder(configuration: Mapping[str, Any]) -> Decoder:
    """The sizes of the language model. Raises as ``size_of`` does where one is missing."""
    text = configuration.get("text_config") or configuration
    hidden, heads = size_of(text, "hidden_size"), size_of(text, "num_attention_heads")
    return Decoder(
        hidden=hidden,
        layers=size_of(text, "num_hidden_layers"),
        heads=heads,
        kv_heads=size_of(text, "num_key_value_heads", default=0) or heads,
        intermediate=size_of(text, "intermediate_size"),
        vocabulary=size_of(text, "vocab_size"),
        head_dim=hidden // heads,
        tied=is_tied(configuration),
        qkv_bias=True,
    )


def _tower(vision: Mapping[str, Any]) -> list[Tensor]:
    hidden, wide = size_of(vision, "hidden_size"), size_of(vision, "intermediate_size")
    channels = size_of(vision, "in_channels", "in_chans", default=3)
    patch, frames = size_of(vision, "patch_size", default=14), size_of(vision, "temporal_patch_size", default=2)
    merged = hidden * size_of(vision, "spatial_merge_size", default=2) ** 2
    tensors = [Tensor("visual.patch_embed.proj.weight", (hidden, channels, frames, patch, patch))]

    def linear(name: str, rows: int, columns: int) -> None:
        tensors.append(Tensor(f"{name}.weight", (rows, columns)))
        tensors.append(Tensor(f"{name}.bias", (rows,)))

    for number in range(size_of(vision, "depth")):
        block = f"visual.blocks.{number}."
        tensors += [Tensor(f"{block}{name}.weight", (hidden,)) for name in ("norm1", "norm2")]
        linear(f"{block}attn.qkv", 3 * hidden, hidden)
        linear(f"{block}attn.proj", hidden, hidden)
        linear(f"{block}mlp.gate_proj", wide, hidden)
        linear(f"{block}mlp.up_proj", wide, hidden)
        linear(f"{block}mlp.down_proj", hidden, wide)
    tensors.append(Tensor("visual.merger.ln_q.weight", (hidden,)))
    linear("visual.merger.mlp.0", merged, merged)
    linear("visual.merger.mlp.2", size_of(vision, "out_hidden_size"), merged)
    return tensors


def published_name(name: str) -> str:
    """The published name of a tensor; ``name`` is that or the name that transformers 5 uses in memory."""
    for now, before in (("model.visual.", "visual."), ("model.language_model.", "model.")):
        if name.startswith(now):
            return before + name.removeprefix(now)
    return name
