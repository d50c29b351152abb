"""``tunetool doctor``: what is missing on this machine for which command, and the line that installs it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from tunetool import __version__
from tunetool.cli.groups import Group, answering
from tunetool.cli.output import write_text
from tunetool.errors import UsageProblem
from tunetool.options import shared as options
from tunetool.options.fields import argument, takes
from tunetool.options.shared import AsJson

SCHEMA = "tunetool.doctor/1"


@dataclass(frozen=True)
class Options(AsJson):
    """The options of the call."""

    words: tuple[str, ...] = argument("[COMMAND]...", nargs=-1)
    python: str | None = options.python()
    target: Path | None = options.target("Directory that is to be measured: whether it can be written, and O_DIRECT.")


@click.command("doctor")
@takes(Options)
def command(given: Options) -> int:
    """Show what this machine lacks for which command, with the line that installs it.

    COMMAND is one command, such as `verify` or `bench checkpoint`; without it, every command is looked at, and few
    machines have what all of them need. Programs, Python packages, the kernel and rights are checked. Reads alone:
    installs and writes nothing, and needs no network.

    Exit codes: 0 COMMAND lacks nothing that it needs; 1 something is missing; 2 the call was wrong; 3 something could
    not be found out, and nothing is missing. What a command only uses for a part of its work does not count.
    """
    from tunetool.doctor import as_document, code, examine
    from tunetool.report.doctor import print_doctor
    from tunetool.report.page import table_console

    answers = examine(_commands(given.words), given.target, given.python)
    ended = code(answers)
    with answering(ended):
        write_text(json.dumps({"schema": SCHEMA, **as_document(answers, __version__)}, indent=2) + "\n", given.json_to)
        if given.json_to != "-":
            print_doctor(answers, table_console())
    return int(ended)


def _commands(words: Sequence[str]) -> list[str]:
    """The command that ``words`` name; with ``-i`` where it takes an inventory. Raises ``UsageProblem``."""
    from tunetool.doctor import WITH_INVENTORY

    context = click.get_current_context().find_root()
    command_: click.Command | None = context.command
    for number, word in enumerate(words):
        if not isinstance(command_, Group):
            raise UsageProblem(f"`{' '.join(words[:number])}` has no command `{word}`", "name one command")
        _, command_, _ = command_.resolve_command(context, [word])
    if not words or command_ is None:
        return []
    inventory = any(WITH_INVENTORY in each.opts for each in command_.params)
    return [" ".join(words), *([WITH_INVENTORY] if inventory else [])]
