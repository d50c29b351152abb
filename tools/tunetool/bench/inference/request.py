"""The request of `bench inference`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tunetool.bench.defaults import (
    INFERENCE_BATCH,
    INFERENCE_MODEL,
    INFERENCE_PROMPT,
    INFERENCE_ROUNDS,
    INFERENCE_TOKENS,
)
from tunetool.measure.session import Run

KIND = "bench.inference"

Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True)
class Request:
    """The options of the call."""

    target: Path
    """A directory on drives, for the swap files."""
    model: str = INFERENCE_MODEL
    """A name, a config.json, or a directory with one. Its weights are random, whatever the directory holds."""
    weights: Sequence[str] = ("*",)
    """Glob patterns of ``samples.PLACES``: where the weights lie."""
    batch: int = INFERENCE_BATCH
    """Sequences that are generated at the same time."""
    prompt: int = INFERENCE_PROMPT
    """Tokens of each prompt."""
    new_tokens: int = INFERENCE_TOKENS
    """Tokens that are generated for each sequence."""
    aio: Path | None = None
    """A JSON file with the `aio` block; None: the settings of ``preflight.settings``."""
    device: Device = "auto"
    rounds: int = INFERENCE_ROUNDS
    seed: int = 0
    run: Run = field(default_factory=Run)
