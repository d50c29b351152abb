"""A decoder in plain torch, with the tensors that tunetool.advise.shapes says such a model has."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention, silu

from tunetool.advise.shapes import Decoder


def linear(rows: int, columns: int) -> Any:
    return nn.Linear(rows, columns, bias=False)


class Norm(nn.Module):
    def __init__(self, sizes: Decoder) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(sizes.hidden))

    def forward(self, x: Any) -> Any:
        return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5).to(x.dtype) * self.weight


class Attention(nn.Module):
    """Without rotary tables, which hold no parameters."""

    def __init__(self, sizes: Decoder) -> None:
        super().__init__()
        self.sizes = sizes
        self.q_proj = linear(sizes.hidden, sizes.heads * sizes.head_dim)
        self.k_proj = linear(sizes.hidden, sizes.kv_heads * sizes.head_dim)
        self.v_proj = linear(sizes.hidden, sizes.kv_heads * sizes.head_dim)
        self.o_proj = linear(sizes.heads * sizes.head_dim, sizes.hidden)

    def forward(self, x: Any) -> Any:
        parts = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        query, key, value = (part.unflatten(-1, (-1, self.sizes.head_dim)).transpose(1, 2) for part in parts)
        groups = self.sizes.heads // self.sizes.kv_heads
        key, value = (part.repeat_interleave(groups, 1) for part in (key, value))
        return self.o_proj(scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(-2))


class Feed(nn.Module):
    def __init__(self, sizes: Decoder) -> None:
        super().__init__()
        self.gate_proj = linear(sizes.hidden, sizes.intermediate)
        self.up_proj = linear(sizes.hidden, sizes.intermediate)
        self.down_proj = linear(sizes.intermediate, sizes.hidden)

    def forward(self, x: Any) -> Any:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, sizes: Decoder) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(sizes), Feed(sizes)
        self.input_layernorm, self.post_attention_layernorm = Norm(sizes), Norm(sizes)

    def forward(self, x: Any) -> Any:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    def __init__(self, sizes: Decoder) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.layers = nn.ModuleList([Layer(sizes) for _ in range(sizes.layers)])
        self.norm = Norm(sizes)
        self.lm_head = linear(sizes.hidden, sizes.vocabulary)

    def forward(self, tokens: Any) -> Any:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def build(sizes: Decoder) -> Any:
    """The model, randomly initialised. Raises ``SystemExit`` if ``sizes`` needs parts that it lacks."""
    if sizes.tied or sizes.qkv_bias or sizes.qk_norm:
        raise SystemExit(
            "error: the model to train has no tied embedding, no biases and no norms of its own for q and k"
        )
    model = Model(sizes)
    expected = sorted(tensor.shape for tensor in sizes.tensors())
    shapes = sorted(tuple(getattr(each, "ds_shape", each.shape)) for each in model.parameters())
    if shapes != expected:
        raise SystemExit("error: the model's tensors are not those that the arithmetic counts with")
    return model
