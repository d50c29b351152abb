"""The experts of a model as they are stored: bytes of one, and of those that a token wants. Pure.

``advise.expert_decoder`` reads which experts a config.json describes. In a layer with experts the router chooses some
of them for each token:

    bytes per token = layers with experts x experts of a token x elements of an expert x bytes of an element
    tokens per second <= bytes per second / (bytes per token x (1 - hit rate of a cache))

Shared experts, attention and dense layers belong to every token: they stay in memory, and no term above has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tunetool.advise.expert_decoder import FAMILIES, decoder_from_config
from tunetool.errors import UsageProblem

_ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1}


@dataclass(frozen=True)
class StoredExperts:
    """The experts of a model among which its routers choose."""

    model_type: str
    layers: int
    """Layers with experts."""
    each_layer: int
    """Experts of one layer, of which the router chooses."""
    per_token: int
    """Experts of one layer that a token wants."""
    bytes: int
    """Of one expert, as stored; without the scales of quantized blocks (1 in 4,096 for DeepSeek-V3)."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of all experts that one token wants."""
        return self.layers * self.per_token * self.bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of all experts."""
        return self.layers * self.each_layer * self.bytes


def stored_experts(document: Mapping[str, Any], path: str, expert_bytes: int | None = None) -> StoredExperts:
    """The experts in a transformers config.json; ``expert_bytes`` counts instead of what its number format gives.

    Raises ``UsageProblem`` for a model without known experts, or where a size is missing.
    """
    kind = document.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UsageProblem(
            f"`{path}`: a model of type `{kind}` has no experts that are known",
            f"known types: {', '.join(sorted(FAMILIES))}; for others give `--expert-bytes` and `--top-k`",
        )
    decoder = decoder_from_config(document, path)
    layers = sum(map(decoder.experts.at, range(decoder.layers)))
    if not layers:
        raise UsageProblem(f"`{path}`: no layer has experts", "is it the config.json of a mixture-of-experts model?")
    numel = sum(tensor.numel for tensor in decoder.expert(""))
    stored = numel * _element_bytes(document, path) if expert_bytes is None else expert_bytes
    return StoredExperts(kind, layers, decoder.experts.count, decoder.experts.per_token, stored)


def _element_bytes(document: Mapping[str, Any], path: str) -> int:
    quantized = document.get("quantization_config")
    if isinstance(quantized, Mapping):
        if quantized.get("quant_method") == "fp8":
            return 1
        name = f"quantized by {quantized.get('quant_method')}"
    else:
        name = str(document.get("dtype") or document.get("torch_dtype"))
        if name in _ELEMENT_BYTES:
            return _ELEMENT_BYTES[name]
    raise UsageProblem(
        f"`{path}`: the bytes of a weight are not known, its format is `{name}`",
        "give the bytes of one expert by `--expert-bytes`",
    )
