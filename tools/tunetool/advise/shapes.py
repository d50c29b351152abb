"""The shapes of a model's tensors, in the order of its modules. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tunetool.errors import UsageProblem

_LAYER = re.compile(r"(^|\.)(layers|h|blocks|block)\.(\d+)\.")


@dataclass(frozen=True)
class Tensor:
    """The name and shape of one parameter."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def layer(self) -> str | None:
        """Number of the repeated layer that it belongs to; None outside the layers."""
        match = _LAYER.search(self.name)
        return match[3] if match else None

    @property
    def block(self) -> str | None:
        """Name of that layer, which is its own where a model has several towers; None outside of them."""
        match = _LAYER.search(self.name)
        return self.name[: match.end()] if match else None


@dataclass(frozen=True)
class Model:
    """A model as the list of its parameters."""

    name: str
    source: str
    """Where the sizes come from."""
    tensors: tuple[Tensor, ...]
    experts_per_token: int | None = None
    """Number of experts of a layer that the router chooses for a token; None: no experts, or not known."""

    @property
    def numel(self) -> int:
        """Number of elements of all tensors together."""
        return sum(tensor.numel for tensor in self.tensors)

    @property
    def largest(self) -> Tensor:
        """The tensor with the most elements."""
        return max(self.tensors, key=lambda tensor: tensor.numel)


@dataclass(frozen=True)
class Decoder:
    """A decoder of the Llama family, described by the sizes in its config.json."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    head_dim: int
    tied: bool = False
    """The output layer is the embedding: one tensor."""
    qkv_bias: bool = False
    out_bias: bool = False
    """Of the attention's output."""
    mlp_bias: bool = False
    qk_norm: bool = False
    fused: bool = False
    """Query, key and value are one tensor, gate and up are another (Phi-3)."""

    def tensors(self) -> tuple[Tensor, ...]:
        """Its parameters, as transformers names and orders them."""
        tensors = [Tensor("model.embed_tokens.weight", (self.vocabulary, self.hidden))]
        for number in range(self.layers):
            tensors += [*self._attention(number), *self._feed_forward(number)]
            norms = ("input_layernorm", "post_attention_layernorm")
            tensors += [Tensor(f"model.layers.{number}.{name}.weight", (self.hidden,)) for name in norms]
        tensors.append(Tensor("model.norm.weight", (self.hidden,)))
        if not self.tied:
            tensors.append(Tensor("lm_head.weight", (self.vocabulary, self.hidden)))
        return tuple(tensors)

    def _attention(self, layer: int) -> list[Tensor]:
        prefix = f"model.layers.{layer}.self_attn."
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        tensors = []
        projections = (("qkv", query + 2 * key),) if self.fused else (("q", query), ("k", key), ("v", key))
        for name, rows in projections:
            tensors.append(Tensor(f"{prefix}{name}_proj.weight", (rows, self.hidden)))
            if self.qkv_bias:
                tensors.append(Tensor(f"{prefix}{name}_proj.bias", (rows,)))
        tensors.append(Tensor(f"{prefix}o_proj.weight", (self.hidden, query)))
        if self.out_bias:
            tensors.append(Tensor(f"{prefix}o_proj.bias", (self.hidden,)))
        if self.qk_norm:
            tensors += [Tensor(f"{prefix}{name}_norm.weight", (self.head_dim,)) for name in ("q", "k")]
        return tensors

    def _feed_forward(self, layer: int) -> list[Tensor]:
        return self._mlp(f"model.layers.{layer}.mlp.", self.intermediate)

    def _mlp(self, prefix: str, intermediate: int) -> list[Tensor]:
        wide = (("gate_up", 2 * intermediate),) if self.fused else (("gate", intermediate), ("up", intermediate))
        shapes = [*((name, (rows, self.hidden)) for name, rows in wide), ("down", (self.hidden, intermediate))]
        tensors = []
        for name, shape in shapes:
            tensors.append(Tensor(f"{prefix}{name}_proj.weight", shape))
            if self.mlp_bias:
                tensors.append(Tensor(f"{prefix}{name}_proj.bias", shape[:1]))
        return tensors


PRESETS: Mapping[str, tuple[str, Decoder]] = {
    "llama2-7b": (
        "Llama 2 7B (arXiv 2307.09288; config.json of meta-llama/Llama-2-7b-hf)",
        Decoder(4096, 32, 32, 32, 11008, 32000, 128),
    ),
    "13b": (
        "Llama 2 13B (arXiv 2307.09288; config.json of meta-llama/Llama-2-13b-hf)",
        Decoder(5120, 40, 40, 40, 13824, 32000, 128),
    ),
    "33b": (
        "LLaMA 33B (arXiv 2302.13971, table 2; config.json of huggyllama/llama-30b)",
        Decoder(6656, 60, 52, 52, 17920, 32000, 128),
    ),
    "65b": (
        "LLaMA 65B (arXiv 2302.13971, table 2; config.json of huggyllama/llama-65b)",
        Decoder(8192, 80, 64, 64, 22016, 32000, 128),
    ),
    "phi3-mini": (
        "Phi-3 Mini (arXiv 2404.14219; config.json of microsoft/Phi-3-mini-4k-instruct)",
        Decoder(3072, 32, 32, 32, 8192, 32064, 96, fused=True),
    ),
    "70b": (
        "Llama 3.1 70B (arXiv 2407.21783, table 3; config.json of meta-llama/Llama-3.1-70B)",
        Decoder(8192, 80, 64, 8, 28672, 128256, 128),
    ),
    "llama-tiny": ("tunetool's own, to try a configuration within seconds", Decoder(1024, 2, 8, 8, 2816, 4096, 128)),
}

_NO_BIAS = {"qkv_bias": False, "out_bias": False, "mlp_bias": False}
# model_type -> differences from Llama that config.json does not state, or that the model makes whatever it states.
_FAMILIES: Mapping[str, Mapping[str, bool]] = {
    "llama": {},
    "mistral": _NO_BIAS,
    "phi3": {**_NO_BIAS, "fused": True},
    "qwen2": {**_NO_BIAS, "qkv_bias": True},
    "qwen3": {"mlp_bias": False, "qk_norm": True},
}

_ABSENT: Mapping[str, Mapping[str, int]] = {"mistral": {"num_key_value_heads": 8}, "qwen3": {"head_dim": 128}}
"""transformers' values where a config.json lacks the key, by ``model_type``; elsewhere the other sizes give them."""


def preset(name: str) -> Model:
    """The model of that name in ``PRESETS``; raises KeyError for another name."""
    source, decoder = PRESETS[name]
    return Model(name, source, decoder.tensors())


MOST_LAYERS = 10_000
LARGEST_SIZE = 2**32
_HINT = "is it a transformers config.json?"


def decoder_from_config(document: Mapping[str, Any], path: str, others: Iterable[str] = ()) -> Decoder:
    """The sizes in a transformers config.json of a family like Llama. ``others``: types that the caller knows besides.

    Raises ``UsageProblem`` for an unknown family or a missing size.
    """
    family = document.get("model_type")
    if not isinstance(family, str) or family not in _FAMILIES:
        raise UsageProblem(
            f"`{path}`: the config.json of a model of type `{family}` does not give its tensors",
            f"known types: {', '.join(sorted([*_FAMILIES, *others]))}; for others name the folder with the "
            ".safetensors files",
        )
    settings: dict[str, Any] = {
        **decoder_sizes({**_ABSENT.get(family, {}), **document}, path),
        "tied": bool(document.get("tie_word_embeddings", False)),
        "qkv_bias": bool(document.get("attention_bias")),
        "out_bias": bool(document.get("attention_bias")),
        "mlp_bias": bool(document.get("mlp_bias")),
        **_FAMILIES[family],
    }
    return Decoder(**settings)


def decoder_sizes(document: Mapping[str, Any], path: str) -> dict[str, int]:
    """The sizes that every ``Decoder`` has. Raises ``UsageProblem`` where one is missing or too large."""
    with reading(path):
        hidden, heads = size_of(document, "hidden_size"), size_of(document, "num_attention_heads")
        sizes = {
            "hidden": hidden,
            "layers": size_of(document, "num_hidden_layers"),
            "heads": heads,
            "kv_heads": size_of(document, "num_key_value_heads", default=0) or heads,
            "intermediate": size_of(document, "intermediate_size"),
            "vocabulary": size_of(document, "vocab_size"),
            "head_dim": size_of(document, "head_dim", default=0) or hidden // heads,
        }
    check_least(path, 1, *sizes.values())
    check_sizes(path, sizes["layers"], *sizes.values())
    return sizes


def size_of(document: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """The first of these sizes that the document has. Raises ``KeyError`` where there is none, or no whole number."""
    name = next((name for name in names if document.get(name) is not None), names[0])
    value = document.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise KeyError(name)
    return value


@contextmanager
def reading(path: str) -> Iterator[None]:
    """While sizes of the config.json at ``path`` are read: one that is missing, zero or no number is a
    ``UsageProblem``."""
    try:
        yield
    except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        raise UsageProblem(f"`{path}`: {unread(error)}", _HINT) from None


def unread(error: Exception) -> str:
    """Which size of a config.json was no use, by what reading it raised."""
    if isinstance(error, ZeroDivisionError):
        return "a size is 0 that others are divided by, such as `num_attention_heads`"
    return f"{error} is missing or not a number"


def check_least(path: str, least: int, *sizes: int) -> None:
    """Raises ``UsageProblem`` for a size below ``least``."""
    if min(sizes) < least:
        raise UsageProblem(f"`{path}`: a size is less than {least}", _HINT)


def check_sizes(path: str, layers: int, *sizes: int) -> None:
    """Raises ``UsageProblem`` for a model that no machine could hold, whose tensors would be listed for hours."""
    if layers > MOST_LAYERS or max(sizes) > LARGEST_SIZE:
        raise UsageProblem(
            f"`{path}`: a size is too large, more than {MOST_LAYERS} layers or {LARGEST_SIZE} elements", _HINT
        )


def in_module_order(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Sort by layer number: files sort layers as text, where 10 comes before 2."""
    numbers = {tensor.name: int(tensor.layer) if tensor.layer is not None else None for tensor in tensors}

    def key(tensor: Tensor) -> tuple[int, int]:
        number = numbers[tensor.name]
        if number is not None:
            return (1, number)
        return (0 if "embed" in tensor.name or "wte" in tensor.name else 2, 0)

    return tuple(sorted(tensors, key=key))
