"""``tunetool bench loading``: its options, and the call."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from tunetool.bench.defaults import CHECKPOINT_ROUNDS
from tunetool.cli import options
from tunetool.cli.options import Measuring, option, takes
from tunetool.cli.output import finish
from tunetool.cli.values import COUNTS


@dataclass(frozen=True)
class Options(Measuring):
    """What the call says."""

    model: str = options.model_files(
        "Model that is loaded: a size of Qwen2.5-VL, made with random weights, or a directory with .safetensors "
        "files, read where it is.",
        default="7b",
    )
    target: Path | None = options.target("Directory on drives where the model is made; removed at the end.")
    memory_target: tuple[Path, ...] = options.memory_target(
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
    engines: tuple[str, ...] = options.engines("direct,instanttensor")
    rounds: int = options.rounds(CHECKPOINT_ROUNDS)
    python: str | None = options.python()
    seed: int = options.seed("the weights and of the order of engines")


@click.command("loading")
@takes(Options)
def loading(given: Options) -> int:
    """Load a model into a GPU by every loader, from cold drives, the page cache and memory.

    Each load is measured in a fresh process, with the import of the loader's library, and again in the same one. Copies
    from pinned memory are the ceiling, and the drives' own counters prove that a cold load came from them. Only one
    thing is judged: that every tensor is as in the files. A loader that is not installed is left out, with the line
    that installs it. Writes a record and a page of plots into the runs directory.

    Exit codes: 0 measured, and all tensors are equal; 1 an engine gives other bytes; 2 the call was wrong; 3 an engine
    failed, or the drives prove nothing.
    """
    from tunetool.bench.loading.preflight import check_call
    from tunetool.bench.loading.request import Request
    from tunetool.bench.loading.run import bench
    from tunetool.cli.under_python import go_on_under
    from tunetool.report.progress import best_progress
    from tunetool.training_python import TORCH

    request = Request(
        model=given.model,
        target=given.target,
        memory_targets=list(given.memory_target),
        device=given.device,  # type: ignore[arg-type]  # click holds it to the choices
        gpus=list(given.gpus),
        engines=list(given.engines),
        rounds=given.rounds,
        seed=given.seed,
        run=given.run(),
    )
    check_call(request)
    go_on_under(given.python, TORCH)
    return finish(bench(request, best_progress()), given.json_to)
