"""``tunetool bench offload``: its options, and the call."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tunetool.bench.defaults import CHECKPOINT_ROUNDS, OFFLOAD_TOKENS
from tunetool.cli.output import finish
from tunetool.options import shared as options
from tunetool.options.fields import number, option, takes
from tunetool.options.shared import Measuring
from tunetool.options.values import DURATION, FILE

if TYPE_CHECKING:
    from tunetool.bench.offload.request import Request
    from tunetool.tune.request import Request as Search


@dataclass(frozen=True)
class Options(Measuring):
    """What the call says."""

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
    precision: str = option(
        "--precision",
        type=click.Choice(["auto", "bf16", "fp16"]),
        default="auto",
        help="Number format. auto: bf16 where every GPU has it (compute capability 8.0), and on CPUs; else fp16.",
    )
    sequence_length: int = number(
        "--sequence-length", default=OFFLOAD_TOKENS, help="Number of tokens in a sequence; they are drawn once."
    )
    micro_batch: int = number("--micro-batch", default=1, help="Sequences of one rank in a step.")
    rounds: int = options.rounds(CHECKPOINT_ROUNDS)
    python: str | None = options.python()
    seed: int = options.seed("weights, tokens and the order of measurements")

    def request(self) -> Request:
        """The request, with the block of ``--aio``. Raises ``UsageProblem``."""
        from tunetool.bench.offload.request import Request
        from tunetool.tune.configs import read_settings

        # The options have the names of the request's fields, but for these.
        other = {"run", "tuned", "dram", "tokens"}
        asked = {each.name: getattr(self, each.name) for each in fields(Request) if each.name not in other}
        return Request(
            **asked,
            tuned=read_settings(self.aio) if self.aio is not None else None,
            dram=not self.without_dram,
            tokens=self.sequence_length,
            run=self.run,
        )

    def search(self, target: Path) -> Search:
        """The search for a block, under the Python that runs this."""
        from tunetool.tune.goals import parse_mix
        from tunetool.tune.request import Request
        from tunetool.tune.space import SWEEP, settings_of

        return Request(
            target=target,
            space=settings_of(SWEEP),
            mix=parse_mix("read=1,write=1"),
            budget=self.budget,
            output=None,
            processes=self.ranks,
            python=Path(sys.executable),
            seed=self.seed,
            run=self.run,
        )


@click.command("offload")
@takes(Options)
def offload(given: Options) -> int:
    """Train with DeepSpeed's ZeRO-3 whose optimizer lies on drives, in memory and in DRAM, step by step in turns.

    Splits a step into computation, reads and writes, by the handle's default and by a tuned `aio` block, and compares
    what the swap moves with what the handle alone moves on the same files' directory in the same round. The drives'
    counters prove the bytes. Two things are judged: that the swap files have the sizes that DeepSpeed must have written
    after every step, and that the losses are those with states in DRAM. Writes a record and a page into the runs
    directory.

    Exit codes: 0 measured, and it trains right; 1 it trains wrong; 2 the call was wrong; 3 it could not be measured or
    proven.
    """
    from contextlib import suppress
    from importlib.util import find_spec

    from tunetool.bench.offload.preflight import plan
    from tunetool.bench.offload.run import bench
    from tunetool.cli.under_python import go_on_under
    from tunetool.measure.worker import Missing
    from tunetool.report.progress import best_progress
    from tunetool.report.tune import best_view
    from tunetool.tune import run

    request = given.request()
    plan(request)  # what is wrong under every Python, before one with DeepSpeed is looked for
    go_on_under(given.python, required=given.python is not None)
    if given.aio is None and request.target is not None and not given.dry_run and find_spec("deepspeed"):
        # What DeepSpeed lacks, the benchmark itself keeps in its record.
        with suppress(Missing):
            search = run.tune(given.search(request.target), best_view(), os.environ)
            if search.choice is None or search.code != 0:
                return finish(search, given.json_to)
            click.echo(f"tuned: {search.choice.settings}, in `{search.path}`", err=True)
            request = replace(request, tuned=search.choice.settings)
    return finish(bench(request, best_progress()), given.json_to)
