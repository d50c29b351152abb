"""What `bench dataset` is asked: its options, and the help text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tunetool.bench.defaults import DATASET_ENGINES
from tunetool.options import shared as options
from tunetool.options.fields import number, option
from tunetool.options.shared import InRounds, Measuring
from tunetool.options.values import DURATION, FILE, NAMES, NUMBERS, SIZE, TEXT

if TYPE_CHECKING:
    from tunetool.bench.dataset.engines import Device

KIND = "bench.dataset"
FIGURES = {
    "1/s": ("samples",),
    "B/s": ("read",),
    "1": ("fetched", "versus_base"),
}
"""Figures of its records, by unit."""
NEEDS = ("torch",)
REQUIRED = False
USED_IN_PART = ("torch", "fio")


@dataclass(frozen=True)
class Request(Measuring, InRounds):
    """Read training data as frameworks read it: tokens by mmap, past the page cache and into a GPU, images by a
    DataLoader.

    Tokens are in Megatron's .bin and .idx; images are in files of their own and in tar shards. Each engine reads in a
    fresh process, from cold drives and from the page cache; the drives' counters and those of the kernel prove which
    of the two it was. Only one thing is judged: that samples are as in the files. What is not installed is left out,
    with the line that installs it. Writes a record and a page of plots into the runs directory.

    Exit codes: 0 measured, and all samples are equal; 1 an engine gives other bytes; 2 the call was wrong, such as a
    corpus with a broken line; 3 an engine failed, or the counters prove nothing.
    """

    target: Path = options.target(
        "Directory on drives, or in memory such as /dev/shm, where the files are made; removed at the end.",
        required=True,
    )
    jsonl: Path | None = option(
        "--jsonl",
        type=FILE,
        metavar="FILE",
        help="Corpus with a JSON object in each line, as Megatron's preprocess_data.py takes it. Default: one is made.",
    )
    key: str = option(
        "--jsonl-key", type=TEXT, default="text", metavar="KEY", help="With --jsonl: the key of the text."
    )
    size: int = option("--size", type=SIZE, default="4GB", help="Bytes of the tokens of the corpus that is made.")
    sequence_length: int = number("--sequence-length", default=4096, help="Number of tokens in a sample.")
    threads: int = number(
        "--threads", default=16, help="Number of threads that read past the page cache, or into a GPU."
    )
    device: Device = options.device(
        "Memory that gets the batches of `gpu-direct`; auto: a GPU, without which it is left out."
    )
    images: int = number("--images", default=2000, help="Number of images that are made.")
    image_side: int = number("--image-side", default=256, help="Width and height of an image in pixels.")
    workers: tuple[int, ...] = option(
        "--num-workers",
        type=NUMBERS,
        default="0,2",
        metavar="N,...",
        help="Numbers of processes of torch's DataLoader; 0: it reads by itself.",
    )
    states: tuple[str, ...] = option(
        "--states",
        type=NAMES,
        default="cold,warm",
        metavar="STATE,...",
        help="States of the page cache in which the files are read: cold, warm.",
    )
    seconds: float = option("--duration", type=DURATION, default="4s", help="The longest time of one pass.")
    huge_pages: int | None = number(
        "--huge-pages",
        help="Also measure with this number of pages in the pool (vm.nr_hugepages), which is put back. Needs root.",
    )
    engines: tuple[str, ...] = options.engines("mmap-*,direct-shuffled", DATASET_ENGINES)
    python: str | None = options.python()
    seed: int = options.seed("the files and of the order of samples and engines")
