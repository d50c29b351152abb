"""``tunetool init``: an inventory to start from."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

import click

from tunetool.cli.options import argument, option, takes
from tunetool.cli.values import PATH


@dataclass(frozen=True)
class Options:
    """The options of the call."""

    directory: Path = argument("DIR", type=PATH)
    profile: str = option(
        "--profile",
        type=click.Choice(["h100", "h200"]),
        default="h100",
        show_default=True,
        help="Kind of nodes whose drives and sizes the inventory starts with.",
    )


@click.command("init")
@takes(Options)
def command(given: Options) -> int:
    """Write an inventory into the new directory DIR: hosts.yml and group_vars/all.yml with comments, and a .gitignore.

    Asks nothing and contacts no host. Put in your nodes, how to log in to them and which drives they have. No
    ansible.cfg is needed: commands with -i bring their own settings.

    Exit codes: 0 it is written; 2 the call was wrong, such as a DIR that exists; 3 it cannot be written.
    """
    from tunetool.fleet.new_inventory import write_inventory

    for path in write_inventory(given.directory, given.profile):
        click.echo(f"wrote {path}")
    click.echo(f"next: put in your hosts, then `tunetool provision -i {shlex.quote(str(given.directory))} --check`")
    return 0
