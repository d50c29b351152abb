"""Options of commands that run on the hosts of an inventory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tunetool.errors import UsageProblem
from tunetool.options.fields import argument, number, option
from tunetool.options.values import PATH

if TYPE_CHECKING:
    from tunetool.fleet.playbook import HostSelection

INVENTORY = "What follows `--` goes to ansible-playbook, such as `-- --ask-become-pass`."
"""Of ``-i``, in every command."""


@dataclass(frozen=True)
class OnHosts:
    """The hosts of an inventory instead of this node. Its commands are of the class ``HostsCommand``."""

    inventory: Path | None = option(
        "-i",
        "--inventory",
        type=PATH,
        metavar="INVENTORY",
        help=f"Ansible inventory: run on its hosts, not here. {INVENTORY}",
    )
    limit: str | None = option("--limit", metavar="PATTERN", help="With -i: only the hosts that match.")
    ansible: tuple[str, ...] = argument("[-- ANSIBLE_OPTION...]", nargs=-1, type=click.UNPROCESSED)

    def ansible_options(self) -> tuple[str, ...]:
        """The options for Ansible. Passwords are asked for now; what holds them ends with the command.

        Raises ``UsageProblem``.
        """
        if not self.ansible:
            return ()
        from tunetool.fleet.ansible_options import answered

        def ask(prompt: str) -> str:
            password: str = click.prompt(prompt, hide_input=True, default="", show_default=False, err=True)
            return password

        return click.get_current_context().with_resource(answered(self.ansible, ask))


class HostsCommand(click.Command):
    """A command whose options are ``OnHosts``. Only what follows ``--`` goes to Ansible: anything else is a mistake."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Raises ``UsageProblem`` where there are words for Ansible and no inventory."""
        after = args[args.index("--") + 1 :] if "--" in args else []
        rest = super().parse_args(ctx, args)
        words = ctx.params.get("ansible") or ()
        if len(words) > len(after):
            extra = words[: len(words) - len(after)]
            raise click.UsageError(f"Got unexpected extra argument{'s' * (len(extra) > 1)} ({' '.join(extra)})", ctx)
        if words and ctx.params.get("inventory") is None:
            raise UsageProblem("what follows `--` is for Ansible, and there is no inventory", "add `-i INVENTORY`")
        return rest


@dataclass(frozen=True)
class OnManyHosts(OnHosts):
    """The hosts of an inventory, several at the same time."""

    forks: int | None = number("--forks", help="With -i: number of hosts at the same time. Default: all, up to 100.")

    def selection(self, inventory: Path) -> HostSelection:
        """The hosts, and how Ansible reaches them. Raises ``UsageProblem``."""
        from tunetool.fleet.playbook import HostSelection

        return HostSelection(inventory, self.limit, self.forks, self.ansible_options())


def no_become() -> Any:
    """``--no-become``."""
    return option("--no-become", is_flag=True, help="With -i: run as the user who logs in, not as root.")


def need_inventory(inventory: Path | None, **given: Any) -> None:
    """Raises ``UsageProblem`` if an option for hosts is given without an inventory."""
    for name, value in given.items():
        if inventory is None and value not in (None, False):
            raise UsageProblem(f"`--{name.replace('_', '-')}` needs an inventory", "add `-i INVENTORY`")
