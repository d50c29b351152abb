"""The modules of a vision-language model in the order in which they run, from the names of its tensors. Pure.

Names are transformers' (Qwen2.5-VL, and decoders of the Llama family) and peft's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tunetool.advise.communication import Module, Parameter
from tunetool.advise.shapes import Tensor

_BLOCK = re.compile(r"\.(?:layers|blocks|h)\.(\d+)\.")
_BEFORE_LAYERS = ("embed_tokens", "wte", "wpe")
_INSIDE = (
    *("input_layernorm", "norm1", "q_proj", "k_proj", "v_proj", "qkv", "o_proj", "attn.proj"),
    *("post_attention_layernorm", "norm2", "gate_proj", "up_proj", "gate_up_proj", "down_proj", "ln_q", "mlp"),
)
"""The modules of a block, in the order in which they run."""
_PARTS = ("base_layer", "lora_A", "lora_B")
_VISION_BLOCKS = 10_000
"""First block number of the vision tower, which keeps its blocks apart from the decoder's."""
_FIRST_IN_BLOCK = ("input_layernorm", "q_proj", "k_proj", "v_proj")
"""The modules that, in the first trained block, run on an input that needs no gradient."""


def with_lora(tensors: Sequence[Tensor], rank: int, targets: str) -> list[Parameter]:
    """The model's tensors, frozen, and peft's two trained factors for each matrix whose module fully matches the
    regular expression ``targets``.
    """
    aimed = re.compile(targets)
    parameters = []
    for tensor in tensors:
        module, _, leaf = tensor.name.rpartition(".")
        if aimed.fullmatch(module) is None:
            parameters.append(Parameter(tensor.name, tensor.numel, trained=False))
            continue
        parameters.append(Parameter(f"{module}.base_layer.{leaf}", tensor.numel, trained=False))
        if len(tensor.shape) != 2:  # a bias
            continue
        rows, columns = tensor.shape
        parameters.append(Parameter(f"{module}.lora_A.default.weight", rank * columns, trained=True))
        parameters.append(Parameter(f"{module}.lora_B.default.weight", rows * rank, trained=True))
    return parameters


def in_full(tensors: Sequence[Tensor]) -> list[Parameter]:
    """The model's tensors as parameters that are all trained (full fine-tuning)."""
    return [Parameter(tensor.name, tensor.numel, trained=True) for tensor in tensors]


def modules_of(parameters: Sequence[Parameter], tied: bool = False) -> list[Module]:
    """Group parameters by the module that owns them, in the order of a forward pass.

    ``tied``: the output layer has no tensor of its own but uses the embedding's.
    """
    held: dict[str, list[Parameter]] = {}
    for each in parameters:
        held.setdefault(each.name.rpartition(".")[0], []).append(each)
    names = sorted(held, key=_key)
    first = next((name for name in names if any(each.trained for each in held[name])), None)
    modules, touched = [], False
    for name in names:
        has_trained = any(each.trained for each in held[name])
        touched = touched or has_trained
        input_needs_no_gradient = (
            first is not None
            and _block(name) is not None
            and _block(name) == _block(first)
            and _position(name, _INSIDE) <= _INSIDE.index("v_proj")
            and any(part in name for part in _FIRST_IN_BLOCK)
        )
        modules.append(
            Module(
                name,
                tuple(held[name]),
                backward=has_trained or (touched and not input_needs_no_gradient),
                block=_block(name),
                works=not any(part in name for part in _BEFORE_LAYERS),
            )
        )
    if tied:
        embedding = next(module for module in modules if not module.works)
        modules.append(Module("lm_head", embedding.parameters, backward=touched))
    return modules


def _key(name: str) -> tuple[int, int, int, int, str]:
    block = _block(name)
    if any(part in name for part in _BEFORE_LAYERS):
        section = 0
    elif "visual" in name:
        section = 1 if "patch_embed" in name else 3 if "merger" in name else 2
    elif block is not None:
        section = 4
    else:
        section = 6 if "lm_head" in name else 5
    return section, block if block is not None else 0, _position(name, _INSIDE), _position(name, _PARTS), name


def _block(name: str) -> int | None:
    match = _BLOCK.search(f".{name}.")
    if match is None:
        return None
    return int(match[1]) + (_VISION_BLOCKS if "visual" in name else 0)


def _position(name: str, known: Sequence[str]) -> int:
    positions = [position for position, part in enumerate(known) if f".{part}." in f".{name}."]
    return min(positions, default=len(known))
