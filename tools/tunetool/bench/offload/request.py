"""What `bench offload` is asked: its options, and the help text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from tunetool.advise.precision import Asked
from tunetool.bench.defaults import CHECKPOINT_ROUNDS, OFFLOAD_TOKENS
from tunetool.options import shared as options
from tunetool.options.fields import number, option
from tunetool.options.shared import Measuring
from tunetool.options.values import DURATION, FILE
from tunetool.training_python import DEEPSPEED

KIND = "bench.offload"
FIGURES = {
    "s": ("step", "compute", "wait"),
    "B/s": ("bandwidth", "rung"),
    "1": ("share", "gain", "against_dram"),
}
"""Figures of its records, by unit."""
NEEDS = DEEPSPEED
REQUIRED = False
USED_IN_PART = ("DeepSpeed",)
"""What DeepSpeed lacks is kept in the record."""
WARM_UPS = 2
"""Steps before the rounds: in the first two ZeRO-3 learns the order of the modules, and Adam makes its states."""


@dataclass(frozen=True)
class Request(Measuring):
    """Train with DeepSpeed's ZeRO-3 whose optimizer lies on drives, in memory and in DRAM, step by step in turns.

    Splits a step into computation, reads and writes, by the handle's default and by a tuned `aio` block, and compares
    what the swap moves with what the handle alone moves on the same files' directory in the same round. The drives'
    counters prove the bytes. Two things are judged: that the swap files have the sizes that DeepSpeed must have written
    after every step, and that the losses are those with states in DRAM. Writes a record and a page into the runs
    directory.

    Exit codes: 0 measured, and it trains right; 1 it trains wrong; 2 the call was wrong; 3 it could not be measured or
    proven.
    """

    model: str = options.built_model("Model of Llama's family, or Qwen2.5-VL, with random weights", required=True)
    target: Path | None = options.target("Directory on drives for the swap files, which are removed at the end.")
    memory_target: Path | None = options.memory_target(
        "Directory in memory for swap files, such as /dev/shm: what a drive without a limit would be worth."
    )
    without_dram: bool = option(
        "--without-dram",
        is_flag=True,
        help="Leave out the same training with its states in DRAM, whose losses are the reference.",
    )
    parameters: str = option(
        "--parameters",
        type=click.Choice(["device", "nvme"]),
        default="device",
        help="Place of the parameters. device: in the memory of the GPU, or of the CPU; nvme: swapped beside the "
        "optimizer's states.",
    )
    aio: Path | None = option(
        "--aio",
        type=FILE,
        help="JSON file with the tuned `aio` block, such as `tunetool tune -o` writes. Default: searched first, as "
        "`tunetool tune` does, where there is a --target.",
    )
    budget: float = option(
        "--budget", type=DURATION, default="60s", help="Time for the search, such as `60s` or `5m`; without --aio."
    )
    ranks: int = number("--ranks", default=1, help="Number of processes, each with a GPU of its own if there are any.")
    device: str = options.device("Device that trains. auto: GPUs if there are any, else the CPU.")
    precision: Asked = option(
        "--precision",
        type=click.Choice(["auto", "bf16", "fp16"]),
        default="auto",
        help="Number format. auto: bf16 where every GPU has it (compute capability 8.0), and on CPUs; else fp16.",
    )
    tokens: int = number(
        "--sequence-length", default=OFFLOAD_TOKENS, help="Number of tokens in a sequence; they are drawn once."
    )
    micro_batch: int = number("--micro-batch", default=1, help="Sequences of one rank in a step.")
    rounds: int = options.rounds(CHECKPOINT_ROUNDS)
    python: str | None = options.python()
    seed: int = options.seed("weights, tokens and the order of measurements")

    @property
    def dram(self) -> bool:
        """Whether the same is also trained with everything in DRAM, whose losses are the reference."""
        return not self.without_dram
