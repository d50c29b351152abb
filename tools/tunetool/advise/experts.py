"""Experts of a mixture-of-experts model: bytes of one, and how many a token wants. Pure.

Sources: the decoder layers of transformers, in ``modeling_mixtral.py``, ``modeling_qwen2_moe.py``,
``modeling_qwen3_moe.py``, ``modeling_deepseek_v2.py`` and ``modeling_deepseek_v3.py``. An expert is a gated MLP of
three matrices without bias, each of hidden size times intermediate size. In a layer with experts the router chooses
``num_experts_per_tok`` of them for each token:

    bytes per token = layers with experts x num_experts_per_tok x 3 x hidden size x intermediate size x bytes per weight
    tokens per second <= bytes per second / (bytes per token x (1 - hit rate of a cache))

Shared experts (``n_shared_experts``, ``shared_expert_intermediate_size``), attention and dense layers belong to every
token: they stay in memory, and no term above has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tunetool.advise.shapes import check_sizes
from tunetool.errors import UsageProblem

_HINT = "is it the config.json of a mixture-of-experts model?"
_MATRICES = 3
"""Gate, up and down."""
_WEIGHT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1}


@dataclass(frozen=True)
class Experts:
    """The routed experts of a model."""

    family: str
    layers: int
    """Layers with experts."""
    each_layer: int
    """Experts of one layer, of which the router chooses."""
    per_token: int
    """Experts of one layer that a token wants."""
    parameters: int
    """Of one expert."""
    bytes: int
    """Of one expert, as stored; without the scales of quantized blocks (1 in 4,096 for DeepSeek-V3)."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of all experts that one token wants."""
        return self.layers * self.per_token * self.bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of all routed experts."""
        return self.layers * self.each_layer * self.bytes


@dataclass(frozen=True)
class _Family:
    counts: tuple[str, ...]
    """Keys of the number of experts of a layer; transformers 5 writes another than the published files have."""
    intermediate: str
    """Key of the size of one expert."""
    first: str = ""
    """Key of the number of dense layers at the beginning."""
    every: str = ""
    """Key of the distance between two layers with experts."""
    begins_at: int = 0
    """Layers are counted from here where ``every`` selects them."""


_QWEN = _Family(("num_experts", "num_local_experts"), "moe_intermediate_size", every="decoder_sparse_step", begins_at=1)
_DEEPSEEK = _Family(
    ("n_routed_experts", "num_local_experts"),
    "moe_intermediate_size",
    first="first_k_dense_replace",
    every="moe_layer_freq",
)
FAMILIES: Mapping[str, _Family] = {
    "mixtral": _Family(("num_local_experts", "num_experts"), "intermediate_size"),
    "qwen2_moe": _QWEN,
    "qwen3_moe": _QWEN,
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
}
"""By ``model_type``."""


def experts_from_config(document: Mapping[str, Any], path: str, expert_bytes: int | None = None) -> Experts:
    """The experts in a transformers config.json; ``expert_bytes`` counts instead of what its number format gives.

    Raises ``UsageProblem`` for a model without known experts, or where a size is missing.
    """
    name = document.get("model_type")
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise UsageProblem(
            f"`{path}`: a model of type `{name}` has no experts that are known",
            f"known types: {', '.join(sorted(FAMILIES))}; for others give `--expert-bytes` and `--top-k`",
        )
    count = next((key for key in family.counts if key in document), family.counts[0])
    each_layer, per_token = _size(document, path, count), _size(document, path, "num_experts_per_tok")
    hidden, intermediate = _size(document, path, "hidden_size"), _size(document, path, family.intermediate)
    layers = _size(document, path, "num_hidden_layers")
    check_sizes(path, layers, hidden, intermediate, each_layer)
    if per_token > each_layer:
        raise UsageProblem(f"`{path}`: a token wants {per_token} of {each_layer} experts", _HINT)
    parameters = _MATRICES * hidden * intermediate
    with_experts = _layers_with_experts(document, path, family, layers)
    if not with_experts:
        raise UsageProblem(f"`{path}`: no layer has experts", _HINT)
    stored = expert_bytes or parameters * _weight_bytes(document, path)
    return Experts(str(name), with_experts, each_layer, per_token, parameters, stored)


def _layers_with_experts(document: Mapping[str, Any], path: str, family: _Family, layers: int) -> int:
    first = _size(document, path, family.first, least=0) if family.first else 0
    every = _size(document, path, family.every) if family.every in document else 1
    dense = document.get("mlp_only_layers") or []
    if not isinstance(dense, Sequence) or not all(isinstance(each, int) for each in dense):
        raise UsageProblem(f"`{path}`: `mlp_only_layers` is not a list of layers", _HINT)
    return sum(
        number >= first and (number + family.begins_at) % every == 0 and number not in dense for number in range(layers)
    )


def _size(document: Mapping[str, Any], path: str, key: str, least: int = 1) -> int:
    value = document.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageProblem(f"`{path}`: `{key}` is missing or not a size", _HINT)
    return value


def _weight_bytes(document: Mapping[str, Any], path: str) -> int:
    quantized = document.get("quantization_config")
    if isinstance(quantized, Mapping):
        if quantized.get("quant_method") == "fp8":
            return 1
        name = f"quantized by {quantized.get('quant_method')}"
    else:
        name = str(document.get("dtype") or document.get("torch_dtype"))
        if name in _WEIGHT_BYTES:
            return _WEIGHT_BYTES[name]
    raise UsageProblem(
        f"`{path}`: the bytes of a weight are not known, its format is `{name}`",
        "give the bytes of one expert by `--expert-bytes`",
    )
