"""Decoders with experts (mixture of experts): their tensors by config.json, and what a token uses of them. Pure.

The tensors have the names of the published files, where every expert has its own tensors; transformers 5 joins those of
a layer in memory, with the same number of elements. Sources are the modeling files of transformers 5.23 and the
config.json of the published models. Buffers such as DeepSeek's `e_score_correction_bias`, and layers for the
prediction of several tokens, are left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tunetool.advise.shapes import Decoder, Model, Tensor, check_least, check_sizes, decoder_sizes, reading, size_of
from tunetool.errors import UsageProblem

MOST_EXPERTS = 100_000
"""Of all layers together; Kimi K2 has 23,040."""
_EXPERT = re.compile(r"\.experts\.(?:(\d+)\.)?")
_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk")
_COUNT = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class Experts:
    """What a layer has in place of one MLP, and which layers have it."""

    count: int
    per_token: int
    intermediate: int
    shared: int = 0
    """Intermediate size of the experts that every token uses, together; 0: there are none."""
    shared_name: str = "shared_experts"
    shared_gate: bool = False
    block: str = "mlp"
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    first: int = 0
    """Number of layers at the beginning that have an MLP."""
    every: int = 1
    """Only each so-manieth of the other layers has experts, counted from the model's first layer."""
    begins_at: int = 1
    """The number of the first layer in this count."""
    dense: frozenset[int] = frozenset()
    """Other layers that have an MLP."""

    def at(self, layer: int) -> bool:
        """Whether this layer has experts."""
        return layer >= self.first and layer not in self.dense and (layer + self.begins_at) % self.every == 0


@dataclass(frozen=True)
class Latent:
    """DeepSeek's attention, whose keys and values are compressed (arXiv 2405.04434, section 2.1)."""

    query_rank: int
    """0: queries are not compressed."""
    rank: int
    rope: int
    nope: int
    value: int


@dataclass(frozen=True)
class ExpertsDecoder(Decoder):
    """A decoder some of whose layers have experts."""

    experts: Experts = field(kw_only=True)
    latent: Latent | None = field(default=None, kw_only=True)
    whole_norm: bool = field(default=False, kw_only=True)
    """The norms of queries and keys are over all heads together (OLMoE)."""

    def _attention(self, layer: int) -> list[Tensor]:
        prefix = f"model.layers.{layer}.self_attn."
        if self.latent is not None:
            return _latent(self.latent, prefix, self.hidden, self.heads, bias=self.out_bias)
        tensors = super()._attention(layer)
        if self.whole_norm:
            widths = (("q", self.heads), ("k", self.kv_heads))
            tensors += [Tensor(f"{prefix}{name}_norm.weight", (count * self.head_dim,)) for name, count in widths]
        return tensors

    def _feed_forward(self, layer: int) -> list[Tensor]:
        experts = self.experts
        if not experts.at(layer):
            return super()._feed_forward(layer)
        prefix = f"model.layers.{layer}.{experts.block}."
        tensors = [Tensor(f"{prefix}gate.weight", (experts.count, self.hidden))]
        for number in range(experts.count):
            tensors += self.expert(f"{prefix}experts.{number}.")
        if experts.shared:
            tensors += self._mlp(f"{prefix}{experts.shared_name}.", experts.shared)
        if experts.shared_gate:
            tensors.append(Tensor(f"{prefix}shared_expert_gate.weight", (1, self.hidden)))
        return tensors

    def expert(self, prefix: str) -> list[Tensor]:
        """The tensors of one expert."""
        gate, up, down = self.experts.names
        hidden, wide = self.hidden, self.experts.intermediate
        shapes = ((gate, (wide, hidden)), (up, (wide, hidden)), (down, (hidden, wide)))
        return [Tensor(f"{prefix}{name}.weight", shape) for name, shape in shapes]


def _latent(latent: Latent, prefix: str, hidden: int, heads: int, *, bias: bool) -> list[Tensor]:
    query = heads * (latent.nope + latent.rope)
    shapes: list[tuple[str, tuple[int, ...]]]
    if latent.query_rank:
        shapes = [
            ("q_a_proj", (latent.query_rank, hidden)),
            ("q_a_layernorm", (latent.query_rank,)),
            ("q_b_proj", (query, latent.query_rank)),
        ]
    else:
        shapes = [("q_proj", (query, hidden))]
    shapes += [
        ("kv_a_proj_with_mqa", (latent.rank + latent.rope, hidden)),
        ("kv_a_layernorm", (latent.rank,)),
        ("kv_b_proj", (heads * (latent.nope + latent.value), latent.rank)),
        ("o_proj", (hidden, heads * latent.value)),
    ]
    tensors = []
    for name, shape in shapes:
        tensors.append(Tensor(f"{prefix}{name}.weight", shape))
        if bias and name in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj"):
            tensors.append(Tensor(f"{prefix}{name}.bias", shape[:1]))
    return tensors


def _like_mixtral(document: Mapping[str, Any]) -> dict[str, Any]:
    return {"intermediate": size_of(document, "intermediate_size")}


def _like_qwen(document: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "intermediate": size_of(document, "moe_intermediate_size"),
        "every": size_of(document, "decoder_sparse_step", default=1),
        "dense": _dense(document.get("mlp_only_layers")),
    }


def _dense(layers: object) -> frozenset[int]:
    listed = [] if layers is None else layers
    if not isinstance(listed, list) or not all(isinstance(layer, int) for layer in listed):
        raise TypeError("a layer of 'mlp_only_layers'")
    return frozenset(listed)


def _like_deepseek(document: Mapping[str, Any]) -> dict[str, Any]:
    intermediate = size_of(document, "moe_intermediate_size")
    return {
        "intermediate": intermediate,
        "shared": intermediate * size_of(document, "n_shared_experts", default=0),
        "first": size_of(document, "first_k_dense_replace", default=0),
        "every": size_of(document, "moe_layer_freq", default=1),
        "begins_at": 0,
    }


@dataclass(frozen=True)
class _Family:
    """How the config.json of a family says what its experts are, and what it does not say."""

    sizes: Callable[[Mapping[str, Any]], dict[str, Any]]
    experts: Mapping[str, Any] = field(default_factory=dict)
    decoder: Mapping[str, Any] = field(default_factory=dict)
    latent: tuple[str, ...] = ()


_RANKS = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
"""The fields of ``Latent``; a model whose queries are not compressed has null for the first."""
_DEEPSEEK = _Family(_like_deepseek, latent=_RANKS)
_NO_BIAS = {"qkv_bias": False, "out_bias": False}
_QKV_BIAS = {"qkv_bias": True, "out_bias": False}
FAMILIES: Mapping[str, _Family] = {
    "mixtral": _Family(_like_mixtral, {"block": "block_sparse_moe", "names": ("w1", "w3", "w2")}, _NO_BIAS),
    "olmoe": _Family(_like_mixtral, decoder={"whole_norm": True}),
    "qwen2_moe": _Family(_like_qwen, {"shared_name": "shared_expert", "shared_gate": True}, _QKV_BIAS),
    "qwen3_moe": _Family(_like_qwen, decoder={"qk_norm": True}),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "glm4_moe": _Family(_like_deepseek, decoder={"out_bias": False}),
}
"""By ``model_type`` of a config.json."""
_MIXTRAL = Experts(8, 2, 14336, **FAMILIES["mixtral"].experts)
PRESETS: Mapping[str, tuple[str, ExpertsDecoder]] = {
    "mixtral-8x7b": (
        "Mixtral 8x7B (arXiv 2401.04088, table 1; config.json of mistralai/Mixtral-8x7B-v0.1)",
        ExpertsDecoder(4096, 32, 32, 8, 14336, 32000, 128, experts=_MIXTRAL),
    )
}


def decoder_from_config(document: Mapping[str, Any], path: str) -> ExpertsDecoder:
    """The sizes in the config.json of one of ``FAMILIES``. Raises ``UsageProblem`` where one is missing or wrong."""
    kind = str(document["model_type"])
    family, sizes = FAMILIES[kind], decoder_sizes(document, path)
    with reading(path):
        count = size_of(document, *_COUNT)
        experts = {"count": count, "per_token": size_of(document, *_PER_TOKEN), **family.sizes(document)}
        if kind == "qwen2_moe":
            experts["shared"] = size_of(document, "shared_expert_intermediate_size")
        made = Experts(**experts, **family.experts)
        ranks = [size_of(document, name, default=0 if name == _RANKS[0] else None) for name in family.latent]
    check_least(path, 1, made.count, made.per_token, made.intermediate, made.every)
    check_least(path, 0, made.shared, made.first, *ranks)
    check_sizes(path, sizes["layers"], made.intermediate, made.shared, *ranks)
    if made.count * sizes["layers"] > MOST_EXPERTS or made.per_token > made.count:
        raise UsageProblem(
            f"`{path}`: {made.per_token} of {made.count} experts in {sizes['layers']} layers",
            f"a token uses no more experts than there are, and a model has at most {MOST_EXPERTS}",
        )
    settings: dict[str, Any] = {
        **sizes,
        "qkv_bias": bool(document.get("attention_bias")),
        "out_bias": bool(document.get("attention_bias")),
        "mlp_bias": kind == "deepseek_v2" and bool(document.get("mlp_bias")),
        "qk_norm": bool(document.get("use_qk_norm")),
        "tied": bool(document.get("tie_word_embeddings", False)),
        **family.decoder,
    }
    return ExpertsDecoder(experts=made, latent=Latent(*ranks) if family.latent else None, **settings)


def per_token(document: Mapping[str, Any]) -> int | None:
    """The number of experts that a token uses by a config.json of any family; None where it does not say."""
    value = next((document[name] for name in _PER_TOKEN if name in document), None)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def is_expert(tensor: Tensor) -> bool:
    """Whether a tensor belongs to experts among which a router chooses."""
    return _EXPERT.search(tensor.name) is not None


@dataclass(frozen=True)
class Routed:
    """The experts of a model among which routers choose."""

    layers: int
    """Number of layers that have experts."""
    count: int
    """Number of experts of all layers together."""
    numel: int
    """Elements of all of them."""
    used: float | None
    """Elements of those that a token uses; None where the number of experts of a token is not known."""
    per_layer: int
    """Number of experts of the layer that has the most."""


def routed(model: Model) -> Routed | None:
    """The model's experts, counted by the names of its tensors; None for a model without any."""
    numbers: dict[str, set[int]] = {}
    joined: dict[str, int] = {}
    elements: dict[str, int] = {}
    for tensor in model.tensors:
        match = _EXPERT.search(tensor.name)
        if match is None or not tensor.shape:
            continue
        layer = tensor.name[: match.start()]
        elements[layer] = elements.get(layer, 0) + tensor.numel
        if match[1] is not None:
            numbers.setdefault(layer, set()).add(int(match[1]))
        else:
            joined[layer] = max(joined.get(layer, 0), tensor.shape[0])
    if not elements:
        return None
    counts = {layer: max(len(numbers.get(layer, ())), joined.get(layer, 0), 1) for layer in elements}
    chosen = model.experts_per_token
    used = None
    if chosen is not None:
        used = sum(numel * min(1.0, chosen / counts[layer]) for layer, numel in elements.items())
    return Routed(len(counts), sum(counts.values()), sum(elements.values()), used, max(counts.values()))


def active(model: Model) -> float | None:
    """Parameters that a token uses: all but the experts that its routers do not choose; None where that is unknown."""
    experts = routed(model)
    if experts is None:
        return model.numel
    return None if experts.used is None else model.numel - experts.numel + experts.used
