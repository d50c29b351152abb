"""The tensors of models like GPT-2 and GPT-3, by their sizes. Pure.

Names and order are those of transformers' GPT-2: learned positions, biases, LayerNorm, and an output layer that is the
embedding (modeling_gpt2.py; Brown et al., arXiv 2005.14165, section 2.1: GPT-3 has the architecture of GPT-2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tunetool.advise.shapes import Tensor, check_least, check_sizes, reading, size_of

MODEL_TYPE = "gpt2"


@dataclass(frozen=True)
class Gpt2:
    """The sizes of such a model."""

    hidden: int
    layers: int
    vocabulary: int
    positions: int
    inner: int
    """Width of the MLP, in the published models four times ``hidden``."""

    def tensors(self) -> tuple[Tensor, ...]:
        """Its parameters, as transformers names and orders them."""
        hidden, inner = self.hidden, self.inner
        tensors = [
            Tensor("transformer.wte.weight", (self.vocabulary, hidden)),
            Tensor("transformer.wpe.weight", (self.positions, hidden)),
        ]
        parts: tuple[tuple[str, tuple[int, ...]], ...] = (
            ("ln_1", (hidden,)),
            ("attn.c_attn", (hidden, 3 * hidden)),
            ("attn.c_proj", (hidden, hidden)),
            ("ln_2", (hidden,)),
            ("mlp.c_fc", (hidden, inner)),
            ("mlp.c_proj", (inner, hidden)),
        )
        for number in range(self.layers):
            for name, shape in parts:
                tensors += _with_bias(f"transformer.h.{number}.{name}", shape)
        return (*tensors, *_with_bias("transformer.ln_f", (hidden,)))


def _with_bias(name: str, shape: tuple[int, ...]) -> list[Tensor]:
    return [Tensor(f"{name}.weight", shape), Tensor(f"{name}.bias", shape[-1:])]


PRESETS: Mapping[str, tuple[str, Gpt2]] = {
    "175b": ("GPT-3 175B (arXiv 2005.14165, table 2.1)", Gpt2(12288, 96, 50257, 2048, 4 * 12288)),
}


def from_config(document: Mapping[str, Any], path: str) -> Gpt2:
    """The sizes in a config.json of this type. Raises ``UsageProblem`` where one is missing or wrong."""
    with reading(path):
        hidden, layers = size_of(document, "n_embd"), size_of(document, "n_layer")
        vocabulary, positions = size_of(document, "vocab_size"), size_of(document, "n_positions")
        inner = size_of(document, "n_inner", default=0) or 4 * hidden
    check_least(path, 1, hidden, layers, vocabulary, positions, inner)
    check_sizes(path, layers, hidden, vocabulary, positions, inner)
    return Gpt2(hidden, layers, vocabulary, positions, inner)
