"""``tunetool tune --ds-config``: its options, and what is printed of a configuration."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from tunetool.tune.configs import Request
    from tunetool.tune.settings import AioSettings

Command = TypeVar("Command", bound=Callable[..., Any])
KINDS = ("zero2", "zero3", "zero3-cpu", "zero3-nvme", "zero3-nvme-70b", "zero-inference")
_OPTIONS = (
    click.option("--ds-config", type=click.Choice(KINDS), help="Write a whole ds_config of this kind to -o."),
    click.option(
        "--model", metavar="phi3-mini|7b|13b|70b|tiny|PATH", help="For --ds-config: a config.json or safetensors files."
    ),
    click.option("--aio", metavar="FILE", help="For --ds-config: the `aio` block in FILE; nothing is measured."),
    click.option("--world-size", type=int, metavar="N", help="For --ds-config: ranks of all nodes. Default: 8."),
    click.option("--nodes", type=int, metavar="N", help="For --ds-config: nodes that share them. Default: 1."),
    click.option("--micro-batch", type=int, metavar="N", help="For --ds-config: samples of one pass. Default: 1."),
    click.option(
        "--batch", type=int, metavar="N", help="For --ds-config: samples of a step. Default: micro batch x ranks."
    ),
    click.option("--memory", metavar="SIZE", help="For --ds-config: of the node that it is for. Default: this one's."),
    click.option("--nvme-space", metavar="SIZE", help="For --ds-config: free there. Default: free in --target."),
)


def options(command: Command) -> Command:
    """Add them to ``tunetool tune``."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def read(
    asked: Mapping[str, Any], target: str, output: str | None, python: str | None
) -> tuple[Request, AioSettings | None] | None:
    """The request, and the settings unless they are to be measured; None without ``--ds-config``.

    Raises ``UsageProblem``.
    """
    from tunetool.advise.ds_config import NVME_KINDS
    from tunetool.advise.read_model import load_model
    from tunetool.cli.verify import check_python, no_empty_paths
    from tunetool.errors import UsageProblem
    from tunetool.measure.target import check_target
    from tunetool.tune.configs import Request, check_output, read_settings
    from tunetool.tune.settings import DEFAULTS

    if asked["ds_config"] is None:
        for name, value in asked.items():
            if value is not None:
                raise UsageProblem(f"`--{name.replace('_', '-')}` belongs to `--ds-config`", "name a kind as well")
        return None
    no_empty_paths({"--model": asked["model"], "--aio": asked["aio"]})
    if output is None:
        raise UsageProblem("`--ds-config` needs a file to write to", "such as `-o ds_config.json`")
    if asked["model"] is None and asked["ds_config"] != "zero3-nvme-70b":
        raise UsageProblem("`--ds-config` needs `--model`", "7b, 70b, tiny, or a model's folder")
    check_output(Path(output))
    check_target(Path(target))
    if asked["model"] is not None:
        load_model(asked["model"])
    request = Request(
        kind=asked["ds_config"],
        output=Path(output),
        target=Path(target),
        python=check_python(python),
        model=asked["model"],
        world=8 if asked["world_size"] is None else asked["world_size"],
        nodes=1 if asked["nodes"] is None else asked["nodes"],
        micro_batch=asked["micro_batch"],
        batch=asked["batch"],
        memory_bytes=_size("--memory", asked["memory"]),
        space_bytes=_size("--nvme-space", asked["nvme_space"]),
    )
    if asked["aio"] is not None:
        return request, read_settings(Path(asked["aio"]))
    # Without NVMe there is no block to measure for.
    return request, None if request.kind in NVME_KINDS else DEFAULTS


def write(request: Request, settings: AioSettings, dry_run: bool) -> int:
    """Make it, and say what came of it. The exit status."""
    from tunetool.node.units import format_size, format_size_binary
    from tunetool.report.progress import best_progress
    from tunetool.tune.configs import write_config

    if dry_run:
        click.echo(f"would move 16 MiB or more in `{request.target}` and write {request.output}")
        return 0
    done = write_config(request, settings, os.environ, best_progress())
    job = done.plan.job
    click.echo(f"{job.kind} for {job.model.name} ({job.model.numel:,} parameters) on {job.world} ranks")
    click.echo(done.accepted)
    memory, files = done.plan.rank_bytes("host", "locked"), done.plan.rank_bytes("nvme")
    if memory:
        locked = format_size_binary(done.plan.rank_bytes("locked") * job.ranks_per_node)
        all_of_it = format_size_binary(memory * job.ranks_per_node)
        click.echo(f"each node: {all_of_it} of memory, {locked} of it locked for swapping")
    if files:
        click.echo(f"each node: swap files of {format_size(files * job.ranks_per_node)} in `{job.nvme_path}`")
    click.echo(f"written: {done.config}, explained in {done.explained}")
    return 0


def _size(name: str, text: str | None) -> int | None:
    from tunetool.errors import UsageProblem
    from tunetool.node.units import UnitError, parse_size

    if text is None:
        return None
    try:
        return parse_size(text)
    except UnitError as error:
        raise UsageProblem(f"`{name} {text}`: {error.message}", error.hint) from None
