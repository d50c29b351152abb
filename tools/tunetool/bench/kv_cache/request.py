"""What `bench kv-cache` is asked: its options, and the help text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from tunetool.bench.defaults import EXPERT_THREADS, KV_BLOCK_TOKENS, KV_BYTES, KV_ENGINES, KV_PREFIXES
from tunetool.options import shared as options
from tunetool.options.fields import number, option
from tunetool.options.shared import InRounds, Measuring
from tunetool.options.values import COUNTS, FILE, SIZE, TEXT

KIND = "bench.kv-cache"
FIGURES = {
    "B/s": ("restore", "store"),
    "s": ("p50", "p99", "drive_life"),
    "B": ("writes_a_day",),
    "1/s": ("prefill",),
    "1": (
        *("of_fio", "versus_page_cache", "versus_prefill", "pays_from"),
        *("from_drives", "write_amplification", "hit_rate", "evictions"),
    ),
}
"""Figures of its records, by unit."""
NEEDS = ("torch",)
REQUIRED = False
USED_IN_PART = ("torch", "fio")


@dataclass(frozen=True)
class Request(Measuring, InRounds):
    """Restore the KV cache of an inference engine from drives, as its offload does, and compare that with prefill.

    Fills a store of blocks for each engine, then replays requests: each prompt's longest stored prefix is read into
    page-locked memory, and on to the GPU where one is; the rest is written, and blocks that were not used for longest
    go. fio reads blocks of the same size at the same depth in the same rounds, and the drives' own counters prove the
    bytes. Only one thing is judged: that every block has the bytes that were written. An engine that is not installed
    is left out, with the line that installs it. Writes a record and a page into the runs directory.

    Exit codes: 0 measured, and all blocks are right; 1 an engine gives other bytes; 2 the call was wrong, such as a
    trace with a broken line; 3 an engine failed, or the drives prove nothing.
    """

    target: Path = options.target(
        "Directory on drives, or in memory such as /dev/shm, for the stores, which are removed at the end.",
        required=True,
    )
    model: str = options.model("Model whose keys and values are stored", default="7b")
    kv_dtype: str = option(
        "--kv-dtype",
        type=click.Choice(["auto", "fp8", "bf16", "fp16", "fp32"]),
        default="auto",
        help="Number format of keys and values. auto: the model's own.",
    )
    block_tokens: int | None = number(
        "--block-tokens",
        show_default=f"{KV_BLOCK_TOKENS}, LMCache's; with --trace 512",
        help="Tokens of a block; vLLM has 16, SGLang with storage 64.",
    )
    size: int | None = option(
        "--size",
        type=SIZE,
        show_default=f"{KV_BYTES} or more for long prompts; with --thorough 1.25 times the memory of the machine",
        help="Bytes of the store of each engine.",
    )
    trace: Path | None = option(
        "--trace",
        type=FILE,
        help="Requests in the format of Mooncake's traces: JSON lines with `timestamp`, `input_length`, "
        "`output_length` and `hash_ids`, one for each 512 tokens.",
    )
    requests: int = number("--requests", default=16, help="Number of requests in a round.")
    longest: int = number("--longest", default=8192, help="Most tokens of a drawn prompt with its answer.")
    zipf: float = option(
        "--zipf", type=float, default=1.0, metavar="S", help="Exponent of the demand for documents (Zipf)."
    )
    prefix_tokens: tuple[int, ...] = option(
        "--prefix-tokens",
        type=COUNTS,
        default=KV_PREFIXES,
        metavar="N,...",
        help="Lengths of the prefixes whose time is measured apart, in tokens.",
    )
    prefill_rate: float | None = option(
        "--prefill-rate",
        type=float,
        metavar="N",
        help="Tokens per second that the inference engine prefills. Default: on a GPU, those of the model's matrix "
        "products alone, which no engine reaches.",
    )
    dwpd: float | None = option(
        "--dwpd", type=float, metavar="N", help="Rating of a drive in drive writes a day, from its data sheet."
    )
    threads: int = number("--threads", default=EXPERT_THREADS, help="Number of threads that read and write.")
    device: str = options.device("Device that gets the blocks. auto: the GPU if there is one, else the CPU.")
    engines: tuple[str, ...] = options.engines("direct,lmcache", KV_ENGINES)
    engine_python: str | None = option(
        "--engine-python",
        type=TEXT,
        metavar="PATH",
        help="Python with lmcache or vllm. Default: the one that measures.",
    )
    python: str | None = options.python()
    seed: int = options.seed("the requests, the contents of the blocks and the order of engines")
