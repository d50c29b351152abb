"""``tunetool ds-config``: its options, the call, and the lines that it prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tunetool.cli.output import finish
from tunetool.cli.tune import SearchOptions
from tunetool.errors import UsageProblem
from tunetool.options import shared as options
from tunetool.options.fields import argument, option, takes
from tunetool.options.values import ALIGNMENT, FILE, NEW_FILE, SIZE

if TYPE_CHECKING:
    from tunetool.advise.precision import Asked
    from tunetool.tune.configs import Request
    from tunetool.tune.settings import AioSettings

KINDS = ("zero2", "zero3", "zero3-cpu", "zero3-nvme", "zero3-nvme-70b", "zero-inference")


@dataclass(frozen=True)
class Options(SearchOptions):
    """What the call says."""

    kind: str = argument("KIND", type=click.Choice(KINDS))
    model: str | None = options.model("Model; zero3-nvme-70b has its own, 70b")
    output: Path = option(
        "-o",
        "--output",
        required=True,
        type=NEW_FILE,
        help="File for the configuration; an explanation in Markdown goes beside it.",
    )
    aio: Path | None = option(
        "--aio",
        type=FILE,
        help="JSON file with the `aio` block, such as `tunetool tune -o` writes. Default: the block is measured first.",
    )
    world_size: int = option("--world-size", type=int, default=8, metavar="N", help="Number of ranks on all nodes.")
    nodes: int = option("--nodes", type=int, default=1, metavar="N", help="Number of nodes.")
    micro_batch: int | None = option(
        "--micro-batch", type=int, metavar="N", help="Samples of one rank in one pass. Default: 1."
    )
    batch: int | None = option(
        "--batch", type=int, metavar="N", help="Samples of one step of the whole job. Default: micro batch x ranks."
    )
    precision: Asked = options.precision()
    memory: int | None = option("--memory", type=SIZE, help="Memory of each node of the job. Default: this node's.")
    nvme_space: int | None = option(
        "--nvme-space", type=SIZE, help="Free space for offload on each node of the job. Default: that of --target."
    )
    dma_alignment: int | None = option(
        "--dma-alignment",
        type=ALIGNMENT,
        help="Alignment in bytes that direct I/O on the job's node needs of an address in memory: "
        "a power of two from 4 to 4096. Default: that of --target, as reads there show.",
    )

    def config(self) -> Request:
        """The request. Raises ``UsageProblem`` for options that cannot be used."""
        from tunetool.advise.read_model import load_model
        from tunetool.measure.target import check_target
        from tunetool.tune.configs import Request, check_output

        if self.model is None and self.kind != "zero3-nvme-70b":
            raise UsageProblem("`--model` is missing", "7b, 70b, tiny, or a model's folder")
        check_output(self.output)
        check_target(self.target)
        if self.model is not None:
            load_model(self.model)
        return Request(
            kind=self.kind,
            output=self.output,
            target=self.target,
            python=self.chosen().path,
            model=self.model,
            world=self.world_size,
            nodes=self.nodes,
            micro_batch=self.micro_batch,
            batch=self.batch,
            precision=self.precision,
            memory_bytes=self.memory,
            space_bytes=self.nvme_space,
            address_bytes=self.dma_alignment,
        )


@click.command("ds-config")
@takes(Options)
def command(given: Options) -> int:
    """Write a whole DeepSpeed configuration of one kind, computed for a model and a node.

    KIND is zero2, zero3, zero3-cpu, zero3-nvme, zero3-nvme-70b or zero-inference.

    Reads the `aio` block from --aio, or measures it first with the search of `tunetool tune`, whose options it shares.
    Kinds without NVMe need no block. DeepSpeed's own classes check the configuration before it is written. Writes the
    configuration to -o, and an explanation of every value beside it.

    Exit codes: 0 written; 2 the call was wrong; 3 the configuration cannot work, or the block could not be measured,
    and nothing was written.
    """
    from tunetool.advise.ds_config import NVME_KINDS
    from tunetool.report.tune import best_view
    from tunetool.tune import run
    from tunetool.tune.configs import read_settings
    from tunetool.tune.settings import DEFAULTS

    config = given.config()
    if given.aio is not None or config.kind not in NVME_KINDS:
        if given.json_to is not None:
            raise UsageProblem("`--json` writes the record of a measurement", "leave it out: nothing is measured here")
        settings = read_settings(given.aio) if given.aio is not None else DEFAULTS
        return _write(config, settings, given.environment(), given.dry_run)
    result = run.tune(given.request(None), best_view(), given.environment())
    code = finish(result, given.json_to)
    if result.choice is not None and code == 0:
        _write(config, result.choice.settings, given.environment(), given.dry_run, err=given.json_to == "-")
    return code


def _write(
    request: Request, settings: AioSettings, environment: Mapping[str, str], dry_run: bool, err: bool = False
) -> int:
    from tunetool.node.units import format_size, format_size_binary
    from tunetool.report.progress import best_progress
    from tunetool.tune.configs import write_config

    if dry_run:
        click.echo(f"would move 16 MiB or more in `{request.target}` and write {request.output}")
        return 0
    done = write_config(request, settings, environment, best_progress())
    job = done.plan.job
    click.echo(f"{job.kind} for {job.model.name} ({job.model.numel:,} parameters) on {job.world} ranks", err=err)
    click.echo(f"{done.plan.node.precision}: {done.plan.node.precision.why}", err=err)
    click.echo(done.accepted, err=err)
    memory, files = done.plan.rank_bytes("host", "locked"), done.plan.rank_bytes("nvme")
    if memory:
        locked = format_size_binary(done.plan.rank_bytes("locked") * job.ranks_per_node)
        everything = format_size_binary(memory * job.ranks_per_node)
        click.echo(f"each node: {everything} of memory, {locked} of it locked for swapping", err=err)
    if files:
        click.echo(f"each node: swap files of {format_size(files * job.ranks_per_node)} in `{job.nvme_path}`", err=err)
    click.echo(f"written: {done.config}, explained in {done.explained}", err=err)
    return 0
