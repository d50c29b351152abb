"""The model in plain torch, randomly initialised, with the tensors that the arithmetic counts with.

Positions are left out (rotary tables hold no parameters): what counts is that every tensor is gathered, multiplied and
updated as in the real model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import gelu, linear, scaled_dot_product_attention, silu

from tunetool.advise.shapes import Decoder, size_of
from tunetool.bench.offload.architecture import IMAGE_TOKENS, Architecture

_EPSILON = 1e-5


class Norm(nn.Module):
    """Of the root mean square."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Any) -> Any:
        """Of the last dimension."""
        return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + _EPSILON).to(x.dtype) * self.weight


class Attention(nn.Module):
    """Causal attention with groups of queries; query, key and value are one layer or three."""

    def __init__(self, sizes: Decoder) -> None:
        super().__init__()
        self.sizes = sizes
        query, key = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        if sizes.fused:
            self.qkv_proj = nn.Linear(sizes.hidden, query + 2 * key, bias=sizes.qkv_bias)
        else:
            self.q_proj = nn.Linear(sizes.hidden, query, bias=sizes.qkv_bias)
            self.k_proj = nn.Linear(sizes.hidden, key, bias=sizes.qkv_bias)
            self.v_proj = nn.Linear(sizes.hidden, key, bias=sizes.qkv_bias)
        self.split = (query, key, key)
        self.o_proj = nn.Linear(query, sizes.hidden, bias=sizes.out_bias)
        if sizes.qk_norm:
            self.q_norm, self.k_norm = Norm(sizes.head_dim), Norm(sizes.head_dim)

    def forward(self, x: Any) -> Any:
        """Batch x tokens x hidden."""
        sizes = self.sizes
        parts = (
            self.qkv_proj(x).split(self.split, -1) if sizes.fused else (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        query, key, value = (part.unflatten(-1, (-1, sizes.head_dim)) for part in parts)
        if sizes.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        groups = sizes.heads // sizes.kv_heads
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        key, value = (part.repeat_interleave(groups, 1) for part in (key, value))
        return self.o_proj(scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(-2))


class Feed(nn.Module):
    """A gated layer; gate and up are one layer or two."""

    def __init__(self, hidden: int, wide: int, bias: bool = False, fused: bool = False) -> None:
        super().__init__()
        self.fused = fused
        if fused:
            self.gate_up_proj = nn.Linear(hidden, 2 * wide, bias=bias)
        else:
            self.gate_proj, self.up_proj = nn.Linear(hidden, wide, bias=bias), nn.Linear(hidden, wide, bias=bias)
        self.down_proj = nn.Linear(wide, hidden, bias=bias)

    def forward(self, x: Any) -> Any:
        """Of the last dimension."""
        gate, up = self.gate_up_proj(x).chunk(2, -1) if self.fused else (self.gate_proj(x), self.up_proj(x))
        return self.down_proj(silu(gate) * up)


class Layer(nn.Module):
    """A layer of the decoder."""

    def __init__(self, sizes: Decoder) -> None:
        super().__init__()
        self.self_attn = Attention(sizes)
        self.mlp = Feed(sizes.hidden, sizes.intermediate, bias=sizes.mlp_bias, fused=sizes.fused)
        self.input_layernorm, self.post_attention_layernorm = Norm(sizes.hidden), Norm(sizes.hidden)

    def forward(self, x: Any) -> Any:
        """Batch x tokens x hidden."""
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Patches(nn.Module):
    """A convolution whose steps are as large as its window: one multiplication for each patch."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Any) -> Any:
        """Patches x pixels."""
        return linear(x, self.weight.flatten(1))


class VisionBlock(nn.Module):
    """A block of the tower; every patch sees all others."""

    def __init__(self, hidden: int, wide: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = Norm(hidden), Norm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.mlp = Feed(hidden, wide, bias=True)

    def forward(self, x: Any) -> Any:
        """Batch x patches x hidden."""
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        x = x + self.proj(scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm2(x))


class Tower(nn.Module):
    """Qwen2.5-VL's vision tower."""

    def __init__(self, vision: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, merge = size_of(vision, "hidden_size"), size_of(vision, "spatial_merge_size", default=2)
        patch, frames = size_of(vision, "patch_size", default=14), size_of(vision, "temporal_patch_size", default=2)
        window = (size_of(vision, "in_channels", "in_chans", default=3), frames, patch, patch)
        self.merged, self.merge = hidden * merge**2, merge**2
        self.pixels = window[0] * frames * patch * patch
        self.patch_embed = Patches((hidden, *window))
        wide, heads = size_of(vision, "intermediate_size"), size_of(vision, "num_heads", default=16)
        self.blocks = nn.ModuleList([VisionBlock(hidden, wide, heads) for _ in range(size_of(vision, "depth"))])
        self.ln_q = Norm(hidden)
        self.inner = nn.Linear(self.merged, self.merged)
        self.outer = nn.Linear(self.merged, size_of(vision, "out_hidden_size"))

    def forward(self, x: Any) -> Any:
        """Batch x patches x pixels, to batch x tokens x hidden of the decoder."""
        x = self.patch_embed(x)
        for block in self.blocks:
            x = block(x)
        return self.outer(gelu(self.inner(self.ln_q(x).unflatten(1, (-1, self.merge)).flatten(-2))))


class TiedHead(nn.Module):
    """An output layer that has the embedding's tensor."""

    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Any) -> Any:
        """Of the last dimension."""
        return linear(x, self.weight)


class Network(nn.Module):
    """The whole model."""

    def __init__(self, shape: Architecture) -> None:
        super().__init__()
        sizes = shape.decoder
        self.visual = Tower(shape.vision) if shape.vision is not None else None
        self.embed_tokens = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.layers = nn.ModuleList([Layer(sizes) for _ in range(sizes.layers)])
        self.norm = Norm(sizes.hidden)
        head: Any = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False) if not sizes.tied else None
        self.lm_head = head if head is not None else TiedHead(self.embed_tokens.weight)

    def forward(self, tokens: Any) -> Any:
        """Tokens of each sequence, to the next one's logits. With a tower an image is in place of the first few."""
        x = self.embed_tokens(tokens)
        if self.visual is not None:
            patches = torch.ones(
                len(tokens), IMAGE_TOKENS * self.visual.merge, self.visual.pixels, dtype=x.dtype, device=x.device
            )
            x = torch.cat([self.visual(patches), x[:, IMAGE_TOKENS:]], 1)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def build(shape: Architecture) -> Any:
    """The model. Raises ``RuntimeError`` where its tensors are not those that the arithmetic counts with."""
    network = Network(shape)
    expected = [tensor.shape for tensor in shape.model.tensors]
    made = [tuple(getattr(each, "ds_shape", each.shape)) for each in network.parameters()]
    if made != expected:
        differing = next(
            (pair for pair in zip(made, expected, strict=False) if pair[0] != pair[1]), (len(made), len(expected))
        )
        raise RuntimeError(f"the model's tensors are not those that the arithmetic counts with: {differing}")
    return network
