"""The model that generates: its config.json, its tensors, and the memory that it needs beside them. Pure but for files.

Its weights are random, so nothing is downloaded. A name means the same model as in every other command.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunetool.advise import qwen2_5_vl
from tunetool.advise.read_model import load_config
from tunetool.advise.shapes import PRESETS, Decoder, Model, decoder_from_config
from tunetool.errors import UsageProblem

BYTES = 2
"""Of an element in bfloat16."""
_LONGEST = 131072
"""Positions of a named model: those of Llama 3.1."""


@dataclass(frozen=True)
class Described:
    """A model that transformers can make."""

    config: Mapping[str, Any]
    """As config.json."""
    model: Model
    decoder: Decoder
    """What reads and writes text; a vision tower is not part of it."""
    vocabulary: int
    """Numbers of tokens below this are plain text."""

    @property
    def weight_bytes(self) -> int:
        """Of all tensors."""
        return self.model.numel * BYTES

    def cache_bytes(self, batch: int, length: int) -> int:
        """Of keys and values: two vectors of a token, for each layer."""
        each = self.decoder
        return 2 * batch * length * each.layers * each.kv_heads * each.head_dim * BYTES

    def working_bytes(self, batch: int, prompt: int) -> int:
        """About what a layer holds of the prompts: the residual, what goes into and comes out of attention, and the
        two wide tensors of the feed-forward layer with their product; then a row of logits, in fp32 too."""
        each = self.decoder
        of_token = 6 * each.hidden + 3 * each.intermediate
        return batch * prompt * of_token * BYTES + batch * each.vocabulary * (BYTES + 4)


def describe(text: str) -> Described:
    """The model of that name or path. Raises ``UsageProblem`` for one that is no decoder of a known family."""
    if text in qwen2_5_vl.CONFIGURATIONS:
        return _vision(text, qwen2_5_vl.CONFIGURATIONS[text], text)
    if text in PRESETS:
        source, decoder = PRESETS[text]
        return Described(_config_of(decoder), Model(text, source, decoder.tensors()), decoder, decoder.vocabulary)
    path = Path(text)
    if not path.exists():
        raise UsageProblem(
            f"`{text}` is neither a decoder that is known by name nor a path",
            f"known: {', '.join([*qwen2_5_vl.CONFIGURATIONS, *PRESETS])}; or a config.json, or its directory",
        )
    document, shown = load_config(path)
    # Weights are random here, and none of them is quantized.
    document.pop("quantization_config", None)
    if document.get("model_type") == qwen2_5_vl.MODEL_TYPE:
        return _vision(path.name, document, shown)
    decoder = decoder_from_config(document, shown, [qwen2_5_vl.MODEL_TYPE])
    model = Model(path.resolve().parent.name if path.is_file() else path.resolve().name, shown, decoder.tensors())
    return Described(document, model, decoder, decoder.vocabulary)


def _vision(name: str, document: Mapping[str, Any], shown: str) -> Described:
    model = Model(name, "Qwen2.5-VL", qwen2_5_vl.tensors(document, shown))
    decoder = qwen2_5_vl.decoder(document)
    # Its special tokens come after those of text; one of an image would be looked up in the picture.
    special = [value for name, value in document.items() if name.endswith("_token_id") and isinstance(value, int)]
    return Described(document, model, decoder, min([decoder.vocabulary, *(value for value in special if value > 0)]))


def _config_of(decoder: Decoder) -> dict[str, Any]:
    """config.json of a named decoder."""
    return {
        "model_type": "phi3" if decoder.fused else "llama",
        "hidden_size": decoder.hidden,
        "num_hidden_layers": decoder.layers,
        "num_attention_heads": decoder.heads,
        "num_key_value_heads": decoder.kv_heads,
        "intermediate_size": decoder.intermediate,
        "vocab_size": decoder.vocabulary,
        "head_dim": decoder.head_dim,
        "tie_word_embeddings": decoder.tied,
        "max_position_embeddings": _LONGEST,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
