"""``tunetool init``: an inventory to start from."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

import click

from tunetool.options.fields import argument, option, takes
from tunetool.options.values import PATH


@dataclass(frozen=True)
class Options:
    """The options of the call."""

    directory: Path = argument("DIR", type=PATH)
    profile: str = option(
        "--profile",
        type=click.Choice(["h100", "h200", "lab"]),
        default="h100",
        show_default=True,
        help="Kind of nodes whose drives and sizes the inventory starts with; lab: virtual ones, whose hosts.yml "
        "`tunetool lab` writes.",
    )


@click.command("init")
@takes(Options)
def command(given: Options) -> int:
    """Write an inventory into the new directory DIR: hosts.yml and group_vars/all.yml with comments, and a .gitignore.

    For real nodes also goals.toml, the promises that `tunetool accept DIR/goals.toml -i DIR` measures. Asks nothing and
    contacts no host. Put in your nodes, how to log in to them and which drives they have. No ansible.cfg is needed:
    commands with -i bring their own settings. Directories above DIR are made.

    Exit codes: 0 it is written; 2 the call was wrong, such as a DIR that exists; 3 it cannot be written.
    """
    from tunetool.accept.files import path_of
    from tunetool.fleet.new_inventory import LAB, write_inventory

    goals = path_of("fleet").read_text() if given.profile != LAB else None
    for path in write_inventory(given.directory, given.profile, goals):
        click.echo(f"wrote {path}")
    first = _lab_up(given.directory) if given.profile == LAB else "put in your hosts"
    click.echo(f"next: {first}, then `tunetool provision -i {shlex.quote(str(given.directory))} --check`")
    return 0


def _lab_up(directory: Path) -> str:
    """What starts virtual nodes and writes the hosts.yml of ``directory``."""
    from tunetool.lab.inventory import DEFAULT_PATH

    hosts = directory / DEFAULT_PATH.name
    if hosts == DEFAULT_PATH:
        return "`tunetool lab up`"
    return f"`tunetool lab up`, `tunetool lab inventory --output {shlex.quote(str(hosts))}`"
