"""The commands that run on the hosts of an inventory."""

from __future__ import annotations

from collections.abc import Iterator

import click

_TRAINING = ["--model", "tiny", "--target", "/bulk"]
ON_HOSTS = {
    ("verify",): [],
    ("accept",): ["fleet"],
    ("inspect",): [],
    ("provision",): [],
    ("stage", "copy"): ["/source", "/copy"],
    **{("stage", action): ["/copy"] for action in ("verify", "evict")},
    **{("bench", name): _TRAINING for name in ("finetune", "staging", "strategies", "reference")},
}
"""Every command with `-i`, and what it needs beside it."""


def with_inventory(
    command: click.Command, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """The commands below ``command`` that run on the hosts of `-i`, each with its words."""
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from with_inventory(child, (*path, name))
    # `report fleet` asks Ansible for the groups alone.
    elif path != ("report", "fleet") and any("-i" in parameter.opts for parameter in command.params):
        yield path, command
