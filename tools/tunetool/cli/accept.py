"""``tunetool accept``: its options, and the call on this node or on a fleet."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tunetool.cli.output import finish
from tunetool.errors import UsageProblem
from tunetool.fleet.options import HostsCommand, OnManyHosts, need_inventory
from tunetool.options.fields import argument, option, takes
from tunetool.options.shared import Measuring, goal_settings
from tunetool.options.values import TIME

if TYPE_CHECKING:
    from tunetool.accept.goals_file import GoalsFile


_TEXT = "--text"


@dataclass(frozen=True)
class Options(Measuring, OnManyHosts):
    """What the call says."""

    goals: str = argument("GOALS")
    settings: tuple[str, ...] = goal_settings()
    max_time: float = option(
        "--max-time",
        type=TIME,
        default="1h",
        help="Time from the start on in which goals that are not decided get further rounds. What the file names is "
        "measured in any case.",
    )
    afresh: bool = option("--afresh", is_flag=True, help="Measure all again that an interrupted call has measured.")
    # On a host of a fleet, which does not have the file.
    text: str | None = option(_TEXT, hidden=True, help="Text of the file in base64, instead of what GOALS names.")

    def check(self) -> None:
        """Raises ``UsageProblem`` for options that need an inventory."""
        need_inventory(self.inventory, limit=self.limit, forks=self.forks)


@click.command("accept", cls=HostsCommand)
@takes(Options)
def command(given: Options) -> int:
    """Measure whether this machine, or each node of an inventory, keeps every promise of the file GOALS.

    GOALS is a file that comes with tunetool: rented (a GPU machine with one disk, about 10 minutes), nvme8 (a node with
    8 NVMe drives and H100 or H200 GPUs), fleet (each node of an inventory). What has a `/` or ends in .toml is the path
    of another. The file is checked whole, and each command says how long it takes and how much it writes, before
    anything is measured. An interrupted call goes on where it was. Writes a record and a page, for print too, into the
    runs directory.

    Exit codes: 0 every goal that could be judged is held; 1 one is missed, or a run found a fault; 2 the call or the
    file was wrong; 3 a goal could not be decided.
    """
    text = base64.b64decode(given.text).decode() if given.text is not None else text_of(given.goals)
    goals = read_goals(text, given.goals, given.settings)
    return _node(given, goals) if given.inventory is None else _fleet(given, given.inventory, goals, text)


def _node(given: Options, goals: GoalsFile) -> int:
    from tunetool.accept.run import Request, accept
    from tunetool.report.progress import PlainProgress

    run = replace(given.run, command=_repeatable(given.run.command))
    request = Request(goals, given.max_time, given.afresh, run, _takes_rounds)
    # The commands that measure have the bars.
    return finish(accept(request, PlainProgress()), given.json_to)


def _repeatable(command: Sequence[str]) -> list[str]:
    """The command line without the file's text, which nobody could read."""
    words = list(command)
    at = words.index(_TEXT) if _TEXT in words else len(words)
    return [*words[:at], *words[at + 2 :]]


def _fleet(given: Options, inventory: Path, goals: GoalsFile, text: str) -> int:
    from tunetool.accept.fleet import FleetRequest, accept_fleet
    from tunetool.report.progress import best_progress

    arguments = [
        given.goals,
        _TEXT,
        base64.b64encode(text.encode()).decode(),
        "--max-time",
        f"{given.max_time:.0f}s",
    ]
    arguments += [part for each in given.settings for part in ("--set", each)]
    arguments += [*(["--afresh"] if given.afresh else []), *(["--allow-busy"] if given.allow_busy else [])]
    request = FleetRequest(given.selection(inventory), goals, arguments, given.run)
    return finish(accept_fleet(request, best_progress()), given.json_to)


def read_goals(text: str, name: str, settings: Sequence[str] = ()) -> GoalsFile:
    """The goals of a file's text. Prints each problem where there are several, and raises ``UsageProblem``."""
    from tunetool.accept.goals_file import Problems, parse

    values = dict(_setting(each) for each in settings)
    try:
        return parse(text, Path(name).name, values, _problem_of_call)
    except Problems as problems:
        for line in problems.lines:
            click.echo(line, err=True)
        raise


def text_of(name: str) -> str:
    """The text of the goals file of this name or path. Raises ``UsageProblem``."""
    from tunetool.accept.files import NAMES, path_of

    is_path = "/" in name or name.endswith(".toml")
    if not is_path and name not in NAMES:
        from tunetool.accept.goal import unknown

        raise unknown("a goals file that comes with tunetool", name, NAMES)
    path = Path(name) if is_path else path_of(name)
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise UsageProblem(
            f"`{path}` cannot be read: {error.strerror}", f"name a file, or one of {', '.join(NAMES)}"
        ) from None
    except UnicodeDecodeError:
        raise UsageProblem(f"`{path}` is not UTF-8", "a goals file is TOML") from None


def _setting(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name or not value:
        raise UsageProblem(f"`--set {text}` sets nothing", "write `--set NAME=VALUE`, such as `--set target=/mnt/data`")
    return name, value


def _context(words: Sequence[str]) -> click.Context:
    """What the command would be called with. Raises what the command line raises."""
    from tunetool.cli.main import cli

    context, left = click.Context(cli, info_name="tunetool"), list(words)
    while isinstance(context.command, click.Group):
        if not left:
            raise UsageProblem(f"`{context.command_path}` names no command", f"see `{context.command_path} --help`")
        name, command, left = context.command.resolve_command(context, left)
        if command is None:
            raise UsageProblem(f"`{name}` is not a command", f"see `{context.command_path} --help`")
        if isinstance(command, click.Group):
            context = click.Context(command, info_name=name, parent=context)
        else:
            context = command.make_context(name, left, parent=context)
    return context


def _problem_of_call(words: Sequence[str]) -> UsageProblem | None:
    from tunetool.accept.goals_file import OURS
    from tunetool.cli.main import usage

    try:
        context = _context(words)
    except UsageProblem as error:
        return error
    except click.ClickException as error:
        return UsageProblem(*usage(error))
    except click.exceptions.Exit:
        return UsageProblem(f"`{' '.join(words)}` only prints a help text", "leave `--help` out")
    # As the parser read it: `-iPATH` is one word.
    for each in context.command.params:
        is_given = context.get_parameter_source(each.name or "") is click.core.ParameterSource.COMMANDLINE
        if is_given and any(option in OURS for option in each.opts):
            return UsageProblem(f"`{each.opts[-1]}` does not go into `run`", "`tunetool accept` gives it itself")
    return None


def _takes_rounds(line: Sequence[str]) -> bool:
    return any("--rounds" in each.opts for each in _context(line).command.params)
