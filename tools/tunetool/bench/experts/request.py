"""What `bench experts` is asked: its options, and the help text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tunetool.bench.defaults import CHECKPOINT_ROUNDS, EXPERT_BYTES, EXPERT_THREADS, EXPERTS, TOP_K
from tunetool.options import shared as options
from tunetool.options.fields import number, option, repeatable
from tunetool.options.shared import Measuring
from tunetool.options.values import COUNTS, DIRECTORY, PATH, SIZE

KIND = "bench.experts"
FIGURES = {
    "B/s": ("bandwidth",),
    "s": ("p50", "p99"),
    "1": ("gain", "hit_rate"),
    "1/s": ("tokens",),
}
"""Figures of its records, by unit."""


@dataclass(frozen=True)
class Request(Measuring):
    """Stream experts of a mixture-of-experts model from drives, with and without a cache in memory.

    Reads experts in random order, out of a cold page cache: with O_DIRECT and through the page cache. Then replays
    traces of a router, even and uneven demand, with LRU caches of several sizes. The drives' own counters prove the
    bytes, and marks in every page that each expert is the wanted one, which alone is judged. With `--config`: the
    tokens per second that this allows. Writes a record and a page into the runs directory.

    Exit codes: 0 measured, and all bytes are right; 1 the storage gives other bytes; 2 the call was wrong; 3 it could
    not be measured or proven.
    """

    target: Path = options.target(
        "Directory on drives for the file of experts, which is removed at the end.", required=True
    )
    drive_targets: tuple[Path, ...] = repeatable(
        "--drive-target",
        type=DIRECTORY,
        metavar="DIR",
        help="Directory on a single drive, read beside the target; may be given several times.",
    )
    config: Path | None = option(
        "--config",
        type=PATH,
        metavar="PATH",
        help="Mixture-of-experts model for which tokens per second are computed: its config.json, or the directory of "
        "that. The families of `advise model` are known: Mixtral, OLMoE, Qwen, DeepSeek, Kimi and GLM.",
    )
    expert_bytes: int | None = option(
        "--expert-bytes", type=SIZE, help=f"Bytes of one expert. Default: the model's, else {EXPERT_BYTES}."
    )
    experts: int = number("--experts", least=2, default=EXPERTS, help="Number of experts in the file.")
    threads: int = number("--threads", default=EXPERT_THREADS, help="Number of threads that read.")
    top_k: int | None = number(
        "--top-k", help=f"Number of experts that a step wants. Default: the model's, else {TOP_K}."
    )
    cached: tuple[int, ...] | None = option(
        "--cached",
        type=COUNTS,
        metavar="N,...",
        help="Numbers of experts that the cache in memory holds. Default: an eighth, a quarter and a half of all.",
    )
    steps: int | None = number(
        "--steps", help="Number of steps of a trace in a round. Default: each expert is wanted twice on average."
    )
    zipf: float = option("--zipf", type=float, default=1.0, metavar="S", help="Exponent of the uneven demand (Zipf).")
    rounds: int = options.rounds(CHECKPOINT_ROUNDS)
    seed: int = options.seed("the traces, the contents of the file and the order of measurements")
