"""What `bench loading` is asked: its options, and the help text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tunetool.bench.defaults import LOADING_ENGINES
from tunetool.options import shared as options
from tunetool.options.fields import option
from tunetool.options.shared import InRounds, Measuring
from tunetool.options.values import COUNTS

KIND = "bench.loading"
FIGURES = {
    "B/s": ("bandwidth", "first", "warm"),
    "s": ("first_time", "warm_time"),
    "1": (
        "first_of_pinned",
        "first_of_fio",
        "first_versus_best_other",
        "warm_of_pinned",
        "warm_of_fio",
        "warm_versus_best_other",
    ),
}
"""Figures of its records, by unit."""
NEEDS = ("torch",)
PREREQUISITES = ("torch",)
USED_IN_PART = ("fio",)


@dataclass(frozen=True)
class Request(Measuring, InRounds):
    """Load a model into a GPU by every loader, from cold drives, the page cache and memory.

    Each load is measured in a fresh process, with the import of the loader's library, and again in the same one. Copies
    from pinned memory are the ceiling, and the drives' own counters prove that a cold load came from them. Only one
    thing is judged: that every tensor is as in the files. A loader that is not installed is left out, with the line
    that installs it. Writes a record and a page of plots into the runs directory.

    Exit codes: 0 measured, and all tensors are equal; 1 an engine gives other bytes; 2 the call was wrong; 3 an engine
    failed, or the drives prove nothing.
    """

    model: str = options.model_files(
        "Model that is loaded: a size of Qwen2.5-VL, made with random weights, or a directory with .safetensors "
        "files, read where it is.",
        default="7b",
    )
    target: Path | None = options.target("Directory on drives where the model is made; removed at the end.")
    memory_targets: tuple[Path, ...] = options.memory_target(
        "Directory in memory where the model is made, such as /dev/shm; may be given several times.", multiple=True
    )
    device: str = options.device("Device that gets the tensors. auto: the GPU if there is one, else the CPU.")
    gpus: tuple[int, ...] = option(
        "--gpus",
        type=COUNTS,
        default="1",
        metavar="N,...",
        help="Numbers of GPUs, such as `1,2,4`, that load the whole model at the same time; with `--device cpu`, of "
        "processes.",
    )
    engines: tuple[str, ...] = options.engines("direct,instanttensor", LOADING_ENGINES)
    python: str | None = options.python()
    seed: int = options.seed("the weights and of the order of engines")
