"""The KV cache of a model by its config.json: bytes of a token and of a block, and the matrices of its prefill. Pure.

A layer with attention keeps keys and values of its KV heads for each token, or one latent vector in place of both
(DeepSeek, arXiv 2405.04434, section 2.1):

    bytes of a token = layers with attention x (2 x KV heads x head size, or latent + rope) x bytes of an element

Layers of linear attention keep a state whose size does not grow with tokens: no term has them. A layer with a sliding
window needs only the last tokens of a prefix; block stores keep its blocks like all others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunetool.advise import expert_decoder, gpt2, qwen2_5_vl, shapes
from tunetool.advise.read_model import NAMES, load_config
from tunetool.advise.shapes import Decoder, Model, check_least, check_sizes, reading, size_of
from tunetool.errors import UsageProblem

BLOCK_TOKENS: Mapping[str, int] = {"vLLM": 16, "SGLang": 64, "LMCache": 256, "Mooncake's trace": 512}
"""Tokens of a block: vLLM's `--block-size`, the `--page-size` with which SGLang's documents run its storage (1 without
it), LMCache's `chunk_size`, and what one of `hash_ids` stands for."""
DTYPES: Mapping[str, int] = {"fp8": 1, "bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes of an element by what `--kv-dtype` says."""
_STORED = {"float8_e4m3fn": 1, "bfloat16": 2, "float16": 2, "float32": 4}
_FULL, _WINDOWS, _NONE = (
    ("full_attention", "attention", "global"),
    ("sliding_attention", "chunked_attention", "local"),
    ("linear_attention", "mamba", "recurrent"),
)
PAGE = 4096


@dataclass(frozen=True)
class KvCache:
    """What one token takes."""

    name: str
    layers: int
    """That attend to all tokens."""
    windowed: int
    """That attend to the last ``window`` tokens alone."""
    window: int
    elements: int
    """Of one token in one layer."""
    element_bytes: int

    @property
    def token_bytes(self) -> int:
        """Of a token in all layers."""
        return (self.layers + self.windowed) * self.elements * self.element_bytes

    def block_bytes(self, tokens: int) -> int:
        """Of a block in a store: whole pages, as direct I/O asks."""
        return -(-tokens * self.token_bytes // PAGE) * PAGE

    def needed_bytes(self, tokens: int) -> int:
        """What attention still reads of a prefix of so many tokens."""
        counted = self.layers * tokens + self.windowed * min(tokens, self.window)
        return counted * self.elements * self.element_bytes


def kv_of(text: str, dtype: str = "auto") -> KvCache:
    """Of a known model, or of a config.json or its directory. Raises ``UsageProblem``."""
    presets: dict[str, tuple[str, Any]] = {**shapes.PRESETS, **expert_decoder.PRESETS, **gpt2.PRESETS}
    if text in qwen2_5_vl.CONFIGURATIONS:
        return kv_of_config(qwen2_5_vl.CONFIGURATIONS[text], text, dtype)
    if text in presets:
        return kv_of_config(_document(presets[text][1]), text, dtype)
    if not Path(text).exists():
        raise UsageProblem(
            f"`{text}` is neither a known model nor a path", f"known: {', '.join(NAMES)}; or a config.json"
        )
    return kv_of_config(*load_config(Path(text)), dtype)


def kv_of_config(document: Mapping[str, Any], path: str, dtype: str = "auto") -> KvCache:
    """Of a transformers config.json. Raises ``UsageProblem`` where a size is missing or wrong."""
    text = document.get("text_config")
    document = {**document, **text} if isinstance(text, Mapping) else document
    with reading(path):
        layers = size_of(document, "num_hidden_layers", "n_layer")
        if document.get("kv_lora_rank") is not None:
            factors = [size_of(document, "kv_lora_rank"), size_of(document, "qk_rope_head_dim")]
            elements = sum(factors)
        else:
            hidden = size_of(document, "hidden_size", "n_embd")
            heads = size_of(document, "num_attention_heads", "n_head")
            # ChatGLM, Falcon and StarCoder have other names for it.
            kv_heads = size_of(document, "num_key_value_heads", "num_kv_heads", "multi_query_group_num", default=0)
            kv_heads = kv_heads or (1 if document.get("multi_query") is True else heads)
            factors = [kv_heads, size_of(document, "head_dim", default=0) or hidden // heads]
            elements = 2 * factors[0] * factors[1]
        window = size_of(document, "sliding_window", "attention_chunk_size", default=0)
        shared = size_of(document, "num_kv_shared_layers", default=0)
    check_least(path, 1, layers, *factors)
    check_least(path, 0, window, shared)
    check_sizes(path, layers, elements, window)
    windowed, without = _kinds(document, path, layers, window, min(shared, layers))
    if layers == without:
        raise UsageProblem(f"`{path}`: no layer keeps keys and values", "is it a model with attention?")
    known = KvCache(
        path, layers - windowed - without, windowed, window, elements, _element_bytes(document, path, dtype)
    )
    check_sizes(path, layers, known.token_bytes)
    return known


def _kinds(document: Mapping[str, Any], path: str, layers: int, window: int, shared: int) -> tuple[int, int]:
    """How many layers have a window, and how many no keys and values of their own: the last ``shared`` use those of
    layers before them (Gemma 3n)."""
    hybrid = next((each for each in ("attn_layer_period", "hybrid_override_pattern") if document.get(each)), None)
    kinds = document.get("layer_types") or document.get("layers_block_type")
    if isinstance(kinds, list):
        unknown = [kind for kind in kinds if kind not in (*_FULL, *_WINDOWS, *_NONE)]
        if unknown or len(kinds) != layers:
            what = f"`{unknown[0]}` in `layer_types`" if unknown else f"{len(kinds)} `layer_types` of {layers} layers"
            raise UsageProblem(f"`{path}`: {what} is not known", "name a model of the same KV sizes without it")
        own = kinds[: layers - shared]
        windowed = sum(kind in _WINDOWS for kind in own)
        if windowed and not window:
            raise UsageProblem(f"`{path}`: `layer_types` has windows, and no `sliding_window` says how long", "add it")
        return windowed, sum(kind in _NONE for kind in own) + shared
    if hybrid is not None:
        raise UsageProblem(f"`{path}`: `{hybrid}` in place of `layer_types` is not known", "add `layer_types`")
    layers -= shared
    every = document.get("sliding_window_pattern")
    if window and isinstance(every, int) and every > 0:
        return layers - layers // every, shared
    # Qwen2 names a window that it does not use, or that its first layers do not.
    first = document.get("max_window_layers") if "use_sliding_window" in document else 0
    full = min(max(first, 0), layers) if isinstance(first, int) else 0
    return (layers - full if window and document.get("use_sliding_window", True) else 0), shared


def _element_bytes(document: Mapping[str, Any], path: str, dtype: str) -> int:
    if dtype in DTYPES:
        return DTYPES[dtype]
    # Engines keep KV in the number format of activations, also where weights are quantized.
    stored = str(document.get("dtype") or document.get("torch_dtype") or "bfloat16")
    if stored not in _STORED:
        raise UsageProblem(f"`{path}`: the number format `{stored}` is not known", "give `--kv-dtype`")
    return _STORED[stored]


def _document(sizes: Decoder | gpt2.Gpt2) -> dict[str, Any]:
    """What a config.json would say of a known model."""
    if isinstance(sizes, gpt2.Gpt2):
        return {"n_layer": sizes.layers, "n_embd": sizes.hidden, "n_head": 1}
    known = {
        "num_hidden_layers": sizes.layers,
        "hidden_size": sizes.hidden,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
    }
    latent = getattr(sizes, "latent", None)
    return {**known, "kv_lora_rank": latent.rank, "qk_rope_head_dim": latent.rope} if latent else known


def matrices(model: Model) -> list[tuple[int, int, float]]:
    """Rows, columns, and how many such matrices a token is multiplied with in all layers of the language model."""
    experts = expert_decoder.routed(model)
    share = 1.0
    if experts is not None and model.experts_per_token is not None:
        share = min(1.0, model.experts_per_token / experts.per_layer)
    counts: Counter[tuple[int, int]] = Counter()
    routed: Counter[tuple[int, int]] = Counter()
    for tensor in model.tensors:
        if tensor.layer is not None and len(tensor.shape) == 2 and "visual" not in tensor.name:
            (routed if expert_decoder.is_expert(tensor) else counts)[tensor.shape[0], tensor.shape[1]] += 1
    return [(*shape, counts[shape] + share * routed[shape]) for shape in sorted(counts | routed)]
