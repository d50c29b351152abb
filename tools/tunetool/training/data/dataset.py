"""A dataset in LLaMA-Factory's format, as the tensors that Qwen2.5-VL is trained on.

``conversations`` reads it, ``pictures.make`` makes one.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tunetool import regular_files
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.training.data.conversations import Message, read_conversations
from tunetool.training.model.reference_model import PIXELS
from tunetool.training.model.tokenizer import Tokenizer

IGNORED = -100
"""The label of a token that is not part of the loss."""
_SYSTEM = "You are a helpful assistant."


class Samples:
    """The samples of a dataset, which are read and decoded on access; for a ``torch.utils.data.DataLoader``."""

    def __init__(
        self,
        directory: Path,
        model: Path,
        name: str | None = None,
        max_pixels: int | None = None,
        limit: int | None = None,
    ) -> None:
        """``name``: of the entry in ``dataset_info.json``, as ``conversations.choose`` takes it.

        ``model``: the directory with the tokenizer and the image processor's settings.

        ``max_pixels``: pictures are scaled down to this; by default the limit in the model's
        ``preprocessor_config.json``, at most ``reference_model.PIXELS``. ``limit``: use only this many samples. Raises
        ``UsageProblem`` for an invalid dataset or model.
        """
        self.conversations = read_conversations(directory, name)[:limit]
        self._tokenizer = Tokenizer(model)
        self._pad = self._tokenizer.special["<|image_pad|>"]
        self._processor = _image_processor(model, max_pixels)

    def __len__(self) -> int:
        return len(self.conversations)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        """``input_ids``, ``labels`` and ``mm_token_type_ids``: (tokens,), int64; ``pixel_values``: (patches, 1176),
        float32; ``image_grid_thw``: (pictures, 3), in patches. Raises ``CannotJudge`` that
        names a picture that cannot be read."""
        conversation = self.conversations[number]
        pictures = [_open(path) for path in conversation.images]
        images: dict[str, torch.Tensor] = {}
        counts: list[int] = []
        if pictures:
            processed = self._processor(images=pictures, return_tensors="pt")
            images = {"pixel_values": processed["pixel_values"], "image_grid_thw": processed["image_grid_thw"]}
            merged = int(self._processor.merge_size) ** 2
            counts = [int(grid.prod()) // merged for grid in images["image_grid_thw"]]
        ids: list[int] = []
        labels: list[int] = []
        for text, learned in _parts(conversation.messages, iter(counts)):
            tokens = self._tokenizer.encode(text)
            ids += tokens
            labels += tokens if learned else [IGNORED] * len(tokens)
        input_ids = torch.tensor(ids)
        return {
            "input_ids": input_ids,
            "labels": torch.tensor(labels),
            "mm_token_type_ids": (input_ids == self._pad).long(),
            **images,
        }


def _parts(messages: Sequence[Message], counts: Iterator[int]) -> Iterator[tuple[str, bool]]:
    """A conversation in Qwen's chat format, as parts (text, whether it is part of the loss): only answers are."""
    if messages[0].role != "system":
        yield f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n", False
    for message in messages:
        text = re.sub(
            "<image>", lambda _: f"<|vision_start|>{'<|image_pad|>' * next(counts)}<|vision_end|>", message.content
        )
        yield f"<|im_start|>{message.role}\n", False
        yield f"{text}<|im_end|>", message.role == "assistant"
        yield "\n", False


def _open(path: Path) -> Any:
    from PIL import Image

    try:
        with Image.open(path) as picture:
            return picture.convert("RGB")
    except (OSError, ValueError, SyntaxError) as error:
        raise CannotJudge(
            f"`{path}`: the picture cannot be read: {str(error).partition(chr(10))[0]}",
            "copy the dataset again, or remove the picture from it",
        ) from None


def _image_processor(model: Path, max_pixels: int | None) -> Any:
    """The image processor that needs no torchvision; its module differs between versions of transformers."""
    path = model / "preprocessor_config.json"
    settings = _settings(path) if path.is_file() else {}
    size = settings.get("size") or {}
    least = settings.get("min_pixels") or size.get("shortest_edge") or 56 * 56
    most = settings.get("max_pixels") or size.get("longest_edge") or PIXELS
    most = max(least, max_pixels if max_pixels is not None else min(most, PIXELS))
    package = "transformers.models.qwen2_vl.image_processing"
    try:
        made = importlib.import_module(f"{package}_pil_qwen2_vl").Qwen2VLImageProcessorPil
    except ModuleNotFoundError:
        made = importlib.import_module(f"{package}_qwen2_vl").Qwen2VLImageProcessor
    return made(size={"shortest_edge": least, "longest_edge": most})


def _settings(path: Path) -> dict[str, Any]:
    try:
        settings = regular_files.read_json(path)
    except (OSError, ValueError) as error:
        raise UsageProblem(f"`{path}` cannot be read: {error}", "copy the model again") from None
    return settings if isinstance(settings, dict) else {}


def collate(batch: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Samples as one batch, padded at the end: ``input_ids``, ``labels``, ``mm_token_type_ids``, ``attention_mask``:
    (samples, longest), and the pictures of all samples concatenated."""
    longest = max(len(sample["input_ids"]) for sample in batch)

    def padded(name: str, value: int) -> torch.Tensor:
        rows = [sample[name] for sample in batch]
        return torch.stack([torch.nn.functional.pad(row, (0, longest - len(row)), value=value) for row in rows])

    tensors = {
        "input_ids": padded("input_ids", 0),
        "labels": padded("labels", IGNORED),
        "mm_token_type_ids": padded("mm_token_type_ids", 0),
        "attention_mask": torch.stack([(torch.arange(longest) < len(sample["input_ids"])).long() for sample in batch]),
    }
    for name in ("pixel_values", "image_grid_thw"):
        parts = [sample[name] for sample in batch if name in sample]
        if parts:
            tensors[name] = torch.cat(parts)
    return tensors
