"""``tunetool tune``: its options, and the call."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tunetool.cli.output import finish
from tunetool.options import shared as options
from tunetool.options.fields import number, option, takes
from tunetool.options.shared import Measuring
from tunetool.options.values import DIRECTORY, DURATION, FILE, IO_SIZE, NEW_FILE

if TYPE_CHECKING:
    from tunetool.training_python import TrainingPython
    from tunetool.tune.request import Request


@dataclass(frozen=True)
class SearchOptions(Measuring):
    """Options of the search over `aio` settings."""

    target: Path = options.target("Directory on the storage to which DeepSpeed will offload.", required=True)
    budget: float = option(
        "--budget", type=DURATION, default="60s", help="Time for the whole search, such as `60s` or `5m`."
    )
    space: Path | None = option(
        "--space", type=FILE, help="JSON file with the values to try for each key. Default: the values of ds_nvme_tune."
    )
    mix: str = option(
        "--mix",
        default="read=1,write=1",
        metavar="MIX",
        help="Ratio of the bytes that the job reads and writes, such as `write=1` for checkpoints.",
    )
    exhaustive: bool = option(
        "--exhaustive", is_flag=True, help="Measure six rounds of every setting, without regard to --budget."
    )
    driver: str = option(
        "--driver",
        type=click.Choice(["deepspeed", "fio"]),
        default="deepspeed",
        help="Program that does the I/O. fio: the same requests, where torch cannot start.",
    )
    device: str = option(
        "--device",
        type=click.Choice(["cpu", "cuda"]),
        default="cpu",
        help="Memory that holds the data. cpu: host memory; cuda: GPU memory, through a buffer that CUDA pinned.",
    )
    processes: int = number(
        "--processes", default=1, help="Number of processes that do I/O at the same time, as the ranks of a node do."
    )
    io_size: int | None = option(
        "--io-size", type=IO_SIZE, help="Bytes of one transfer: `1G` is 2^30. Default: chosen from the storage's speed."
    )
    python: str | None = options.python()
    seed: int = options.seed("the order in which settings are tried")

    def chosen(self) -> TrainingPython:
        """The Python whose DeepSpeed does the I/O. Raises ``UsageProblem``, ``CannotJudge`` where there is none."""
        from tunetool.training_python import choose

        python = choose(self.python)
        return python if self.driver == "fio" else python.need()

    def environment(self) -> dict[str, str]:
        """What the search is started with."""
        return self.chosen().environment(os.environ)

    def request(self, output: Path | None) -> Request:
        """The request; ``output`` is the file for the `aio` block. Raises ``UsageProblem``, ``CannotJudge``."""
        from tunetool.tune.goals import parse_mix
        from tunetool.tune.request import Request
        from tunetool.tune.settings import SWEEP, read_space, settings_of

        return Request(
            target=self.target,
            space=settings_of(read_space(self.space) if self.space is not None else SWEEP),
            mix=parse_mix(self.mix),
            budget=self.budget,
            output=output,
            exhaustive=self.exhaustive,
            driver="fio" if self.driver == "fio" else "deepspeed",
            device="cuda" if self.device == "cuda" else "cpu",
            processes=self.processes,
            io_bytes=self.io_size or 0,
            python=self.chosen().path,
            seed=self.seed,
            run=self.run,
        )


@dataclass(frozen=True)
class Options(SearchOptions):
    """What the call says."""

    output: Path | None = option(
        "-o", "--output", type=NEW_FILE, help="File for the `aio` block, written after DeepSpeed has read the block."
    )
    explain: Path | None = option(
        "--explain",
        type=DIRECTORY,
        help="Directory for an explanation of each parameter, with the curves measured here.",
    )
    store_vars: Path | None = option(
        "--store-vars", type=DIRECTORY, help="Directory for the result as Ansible variables, such as `group_vars/all`."
    )


@click.command("tune")
@takes(Options)
def command(given: Options) -> int:
    """Find the best settings of DeepSpeed's `aio` block for this storage, within a minute.

    Rounds of short transfers drop the settings that are significantly slower; the rest is compared with DeepSpeed's own
    default in pairs. "No significant difference" is a result: then the default is written. The drives' counters prove
    every sample. Writes a record into the runs directory, and the files that -o, --explain and --store-vars name.

    Exit codes: 0 done; 2 the call was wrong; 3 a setting could not be measured or proven, and no block was written.
    """
    from tunetool.report.tune import best_view
    from tunetool.tune import run
    from tunetool.tune.explain import check_explain
    from tunetool.tune.explain import explain as write_explanation
    from tunetool.tune.store import check_store, store

    request = given.request(given.output)
    if given.store_vars is not None:
        check_store(given.store_vars)
    if given.explain is not None:
        check_explain(given.explain)
    result = run.tune(request, best_view(), given.environment())
    code = finish(result, given.json_to)
    if result.choice is not None and code == 0 and request.output is not None:
        click.echo(f"written: {request.output}", err=True)
    if result.record is not None and result.choice is not None:
        if given.explain is not None:
            click.echo(f"explained: {write_explanation(result.record, given.explain)}", err=True)
        if given.store_vars is not None and code == 0:
            path = store(given.store_vars, result.record, result.choice.settings.block(), str(request.mix))
            click.echo(f"stored: {path}", err=True)
    return code
