"""A tokenizer that needs no download: one token per byte, and Qwen2.5's special tokens with the model's numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunetool.advise.qwen2_5_vl import SPECIAL_TOKENS
from tunetool.errors import UsageProblem
from tunetool.regular_files import refuse_pointers

FILE = "tokenizer.json"
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen2.5-VL's chat template, for pictures and text only."""


def _byte_letters() -> list[str]:
    """The printable letter for each byte in a byte-level vocabulary (GPT-2's bytes_to_unicode)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    substitutes = iter(range(256, 512))
    return [chr(byte if byte in printable else next(substitutes)) for byte in range(256)]


def _vocabulary(first_special: int, size: int) -> dict[str, int]:
    """The numbers of all tokens. Unused numbers get filler tokens, since libraries warn about gaps."""
    special = {first_special + index: name for index, name in enumerate(SPECIAL_TOKENS)}
    named = {number: f"<|unused_{number}|>" for number in range(256, size)}
    letters = dict(enumerate(_byte_letters()))
    return {name: number for number, name in sorted({**named, **letters, **special}.items())}


def write(directory: Path, configuration: Mapping[str, Any]) -> None:
    """Write tokenizer.json and tokenizer_config.json to ``directory``."""
    first = int(configuration["bos_token_id"])
    # The numbers after the special tokens only pad the embedding matrix, as in the published models.
    vocabulary = _vocabulary(first, first + len(SPECIAL_TOKENS))
    added = [
        {
            "id": first + index,
            "content": name,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index, name in enumerate(SPECIAL_TOKENS)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    document: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }
    (directory / FILE).write_text(json.dumps(document, ensure_ascii=False) + "\n")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": int(configuration["max_position_embeddings"]),
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


class Tokenizer:
    """Converts text to token numbers. ``special``: the numbers of the special tokens by name."""

    def __init__(self, directory: Path) -> None:
        """Read ``tokenizer.json`` in a model's directory. Raises ``UsageProblem`` where it is missing or not Qwen's."""
        from tokenizers import Tokenizer as Fast

        path = directory / FILE
        hint = "the directory of a Qwen2.5-VL has one; copy or download the model again"
        if not path.is_file():
            raise UsageProblem(f"`{path}` is missing", hint)
        refuse_pointers([path])
        try:
            self._fast = Fast.from_file(str(path))
        except Exception as error:  # the library raises a bare Exception
            raise UsageProblem(f"`{path}` is not a tokenizer: {error}", hint) from None
        numbers = {name: self._fast.token_to_id(name) for name in SPECIAL_TOKENS}
        missing = [name for name in ("<|im_start|>", "<|im_end|>", "<|image_pad|>") if numbers[name] is None]
        if missing:
            raise UsageProblem(f"`{path}` has no token `{missing[0]}`: it is not a Qwen2.5-VL's", hint)
        self.special = {name: int(number) for name, number in numbers.items() if number is not None}

    def encode(self, text: str) -> list[int]:
        """The token numbers of ``text``; each special token becomes its one number."""
        return list(self._fast.encode(text, add_special_tokens=False).ids)

    def decode(self, numbers: list[int]) -> str:
        """The text of token numbers, with special tokens."""
        return str(self._fast.decode(numbers, skip_special_tokens=False))
