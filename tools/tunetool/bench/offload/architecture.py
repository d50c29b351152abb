"""The models that can be trained here, by their sizes. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunetool.advise import qwen2_5_vl
from tunetool.advise.read_model import NAMES, load_config
from tunetool.advise.shapes import PRESETS, Decoder, Model, decoder_from_config
from tunetool.errors import UsageProblem

IMAGE_TOKENS = 4
"""Of each sequence, which come from the vision tower where the model has one."""


@dataclass(frozen=True)
class Architecture:
    """A decoder of Llama's family, and perhaps Qwen2.5-VL's vision tower."""

    model: Model
    """Its tensors in the order in which the modules have them."""
    decoder: Decoder
    vision: Mapping[str, Any] | None = None
    """The block ``vision_config`` of the config.json."""


def architecture(model: str) -> Architecture:
    """Of a known name, a config.json, or a directory with one. Raises ``UsageProblem`` for other families."""
    if model in PRESETS:
        source, sizes = PRESETS[model]
        return Architecture(Model(model, source, sizes.tensors()), sizes)
    if model in qwen2_5_vl.CONFIGURATIONS:
        return _qwen2_5_vl(qwen2_5_vl.CONFIGURATIONS[model], model, model, "Qwen2.5-VL, as `bench finetune` builds it")
    hint = f"known families: Llama, Mistral, Qwen 2 and 3, Phi-3, Qwen2.5-VL; names: {', '.join(_trainable())}"
    if model in NAMES:
        raise UsageProblem(f"`{model}` is of a family that `bench offload` does not train", hint)
    path = Path(model)
    if not path.exists():
        raise UsageProblem(f"`{model}` is neither a known model nor a path", hint)
    document, read = load_config(path)
    name, source = Path(read).parent.name or path.stem, f"the sizes in `{read}`"
    if document.get("model_type") == qwen2_5_vl.MODEL_TYPE:
        return _qwen2_5_vl(document, read, name, source)
    sizes = decoder_from_config(document, read, (qwen2_5_vl.MODEL_TYPE,))
    return Architecture(Model(name, source, sizes.tensors()), sizes)


def _qwen2_5_vl(document: Mapping[str, Any], path: str, name: str, source: str) -> Architecture:
    tensors = qwen2_5_vl.tensors(document, path)  # refuses what is missing
    return Architecture(Model(name, source, tensors), qwen2_5_vl.decoder(document), document["vision_config"])


def _trainable() -> list[str]:
    return [*qwen2_5_vl.CONFIGURATIONS, *PRESETS]
