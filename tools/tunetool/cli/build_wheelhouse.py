"""``tunetool build-wheelhouse``: fetch the wheels of training environments once, for nodes without a package index."""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from pathlib import Path

import click

from tunetool.errors import UsageProblem
from tunetool.options.fields import argument, option, repeatable, takes
from tunetool.options.shared import Dry
from tunetool.options.values import PATH

_BUILD = re.compile(r"^(cpu|cu\d{3})$")


@dataclass(frozen=True)
class Options(Dry):
    """The options of the call."""

    directory: Path = argument("DIR", type=PATH)
    python_versions: tuple[str, ...] = repeatable(
        "--python-version",
        default=("3.11",),
        metavar="X.Y",
        help="Python version of the nodes. Repeatable.",
    )
    machines: tuple[str, ...] = repeatable(
        "--machine",
        default=(platform.machine(),),
        show_default="this machine's",
        metavar="TYPE",
        help="Machine type of the nodes, as `uname -m` prints it. Repeatable.",
    )
    builds: tuple[str, ...] = repeatable(
        "--build",
        metavar="cpu|cuNNN",
        help="Build of torch, such as cu126 or cpu. Repeatable. Default: the one that the lock names.",
    )
    trainers: tuple[str, ...] = repeatable(
        "--trainer",
        default=("deepspeed",),
        type=click.Choice(["deepspeed", "lightning"]),
        help="Trainer that the environments are made for. Repeatable.",
    )
    index_url: str | None = option(
        "--index-url", metavar="URL", help="Package index. Default: the one that pip is set up for."
    )
    torch_index_url: str | None = option(
        "--torch-index-url",
        metavar="URL",
        help="Additional index for other builds of torch; `{build}` in it becomes cu126 or cpu.",
    )
    source: Path | None = option(
        "--source", type=PATH, metavar="DIR", help="Copy of the collection with the lock. Default: the one in use."
    )

    def check(self) -> None:
        """Raise ``UsageProblem`` for values that no node can have."""
        for build in self.builds:
            if not _BUILD.match(build):
                raise UsageProblem(f"`--build {build}` is not a build of torch", "such as `cpu`, `cu126` or `cu130`")
        for version in self.python_versions:
            if not re.match(r"^3\.1\d$", version):
                raise UsageProblem(f"`--python-version {version}` is not 3.10 or newer", "such as `3.11`")


@click.command("build-wheelhouse")
@takes(Options)
def command(given: Options) -> int:
    """Fetch the wheels of training environments into DIR, once, for nodes without a package index.

    `tunetool provision` takes them from there: `training_environment_wheelhouse: DIR`. A call that is cut off goes on
    where it was; a file whose hash is wrong is fetched again. DIR holds the wheels and wheelhouse.json, which has their
    hashes.

    Exit codes: 0 all files are there; 2 the call was wrong; 3 something cannot be fetched.
    """
    from tunetool.fleet.wheelhouse import Request, Target, fill, find_source
    from tunetool.node.training import lock
    from tunetool.node.training.accelerator import Build
    from tunetool.node.units import format_size
    from tunetool.report.progress import best_progress

    source = find_source(given.source)
    default = Build(lock.cuda((source / "constraints.txt").read_text()), default=True)
    targets = [
        Target(python, machine, build)
        for python in dict.fromkeys(given.python_versions)
        for machine in dict.fromkeys(given.machines)
        for build in dict.fromkeys(given.builds or (default.tag,))
    ]
    trainers = tuple(dict.fromkeys(("deepspeed", *given.trainers)))
    request = Request(given.directory, source, targets, trainers, given.index_url, given.torch_index_url)
    for each in fill(request, best_progress(), given.dry_run):
        if given.dry_run:
            click.echo(f"{each.target}: {each.files} files, {each.fetched} would be fetched")
        else:
            click.echo(f"{each.target}: {each.files} files, {format_size(each.size_bytes)}, {each.fetched} fetched")
    return 0
