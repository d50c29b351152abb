"""What `bench inference` is asked: its options, and the help text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tunetool.bench.defaults import (
    INFERENCE_BATCH,
    INFERENCE_MODEL,
    INFERENCE_PROMPT,
    INFERENCE_ROUNDS,
    INFERENCE_TOKENS,
)
from tunetool.options import shared as options
from tunetool.options.fields import number, option
from tunetool.options.shared import Measuring
from tunetool.options.values import FILE, NAMES
from tunetool.training_python import DEEPSPEED

KIND = "bench.inference"
FIGURES = {
    "B/s": ("bandwidth", "read"),
    "s": ("first_pass", "next_pass"),
    "1/s": ("tokens", "predicted"),
    "B": ("bytes_per_token", "peak_memory"),
    "1": ("read_share", "of_predicted", "versus_nvme"),
}
"""Figures of its records, by unit."""
NEEDS = DEEPSPEED
PREREQUISITES = ("DeepSpeed",)
USED_IN_PART = ("extra finetune",)


@dataclass(frozen=True)
class Request(Measuring):
    """Generate text by a model whose weights lie on drives, in host memory, or in the GPU's memory.

    ZeRO-Inference of DeepSpeed reads the weights for every pass; transformers generates. Measures tokens per second in
    turns, the bytes that drives read for each token, and DeepSpeed's handle alone, from which a speed is predicted.
    Published figures stand beside them. Weights are random: nothing is downloaded. Only one thing is judged: that the
    tokens are the same wherever the weights lie. Writes a record, a page and launch lines for SGLang's offline
    benchmark into the runs directory, and runs those where SGLang is installed.

    Exit codes: 0 measured, and all tokens are the same; 1 they differ; 2 the call was wrong; 3 the model does not fit,
    or it could not be measured or proven.
    """

    target: Path = options.target(
        "Directory on drives for the swap files, which are removed at the end.", required=True
    )
    model: str = options.built_model("Model that generates, with random weights", default=INFERENCE_MODEL)
    weights: tuple[str, ...] = option(
        "--weights",
        type=NAMES,
        default="*",
        metavar="GLOB,...",
        help="Places of the weights to measure: nvme (drives), dram (host memory), device (the GPU's memory).",
    )
    batch: int = number("--batch", default=INFERENCE_BATCH, help="Number of sequences generated at the same time.")
    prompt: int = number("--prompt", default=INFERENCE_PROMPT, help="Number of tokens in a prompt.")
    new_tokens: int = number(
        "--new-tokens", default=INFERENCE_TOKENS, help="Number of tokens generated for each sequence."
    )
    aio: Path | None = option(
        "--aio",
        type=FILE,
        help="JSON file with the `aio` block, such as `tunetool tune -o` writes. Default: that of `verify`.",
    )
    device: str = options.device("What computes. auto: a GPU where there is one.")
    rounds: int = options.rounds(INFERENCE_ROUNDS)
    python: str | None = options.python()
    seed: int = options.seed("the weights, the prompts and the order of measurements")
