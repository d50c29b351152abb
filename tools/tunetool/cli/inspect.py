"""``tunetool inspect``: show a node, a recording of one, or what differs in a fleet; judge nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tunetool.cli.output import write_text
from tunetool.errors import UsageProblem
from tunetool.fleet.options import HostsCommand, OnManyHosts, need_inventory, no_become
from tunetool.options import shared as options
from tunetool.options.fields import option, takes
from tunetool.options.shared import AsJson
from tunetool.options.values import NEW_FILE, PATH

if TYPE_CHECKING:
    from tunetool.inspect.source import Source


@dataclass(frozen=True)
class Options(AsJson, OnManyHosts):
    """What the call says."""

    gds: bool = option("--gds", is_flag=True, help="Show GPUDirect Storage alone: each path, blocker and remedy.")
    root: Path | None = option(
        "--root", type=PATH, help="Recording to inspect instead of this node: a directory or *.json."
    )
    capture: Path | None = option(
        "--capture", type=PATH, help="Recording of this node to write: a new directory or a new *.json file."
    )
    anonymous: bool = option(
        "--anonymous", is_flag=True, help="With --capture: replace serial numbers, host name and addresses."
    )
    page: Path | None = option(
        "--page", type=NEW_FILE, help="File for an HTML page: of this node or recording, or with -i of what differs."
    )
    no_become: bool = no_become()

    def check(self) -> None:
        """Raises ``UsageProblem`` for options that contradict each other."""
        need_inventory(self.inventory, limit=self.limit, forks=self.forks, no_become=self.no_become)
        for name, given in (("gds", self.gds), ("root", self.root), ("capture", self.capture)):
            if self.inventory is not None and given:
                raise UsageProblem(
                    f"`--{name}` and `-i` do not go together", f"run `tunetool inspect --{name}` on the host itself"
                )
        if self.anonymous and self.capture is None:
            raise UsageProblem("`--anonymous` needs `--capture`", "it decides what a recording leaves out")
        if self.capture is not None and (self.json_to is not None or self.page is not None or self.gds):
            raise UsageProblem(
                "`--capture` shows nothing",
                "leave out `--json`, `--page` and `--gds`, or inspect the recording: `--root`",
            )


@click.command("inspect", cls=HostsCommand)
@takes(Options)
def command(given: Options) -> int:
    """Show one screen of the node: drives, PCIe paths, volume, memory, GPUs, what limits it, and what to repair.

    Changes nothing, and needs no GPU, no driver and no drive. Root also sees the drives' health. A recording holds what
    this command reads and nothing else. It contains serial numbers and the host's name unless --anonymous is given; it
    never contains the environment, logs or addresses of network cards.

    With -i, inspects every host of the inventory and shows what differs: the value of most hosts and the odd hosts,
    the most severe first. Nothing is judged. --page writes an HTML page of either: one file, which needs no network.

    Exit codes: 0 shown or recorded, whatever is absent or differs; 2 the call was wrong; 3 a host could not be
    inspected.
    """
    from tunetool.inspect.capture import capture, check_destination
    from tunetool.inspect.source import opened

    if given.inventory is not None:
        return _fleet(given, given.inventory)
    if given.capture is not None:
        check_destination(given.capture)
    with opened(given.root) as source:
        if given.capture is None:
            return _show(source, given)
        document = capture(source, given.capture, given.anonymous)
        size = sum(len(text) for text in document["files"].values())
        kept = (
            "names and serial numbers replaced" if given.anonymous else "the host's name and serial numbers are in it"
        )
        click.echo(f"{given.capture}: {len(document['files'])} files, {size} bytes; {kept}")
        return 0


def _show(source: Source, given: Options) -> int:
    from tunetool.inspect.collect import inspect
    from tunetool.inspect.model import dumps
    from tunetool.report.inspection import screen

    shown = inspect(source)
    write_text(dumps(shown), given.json_to)
    if given.page is not None:
        from tunetool.record import utc_now
        from tunetool.report.inspection_page import write_page

        write_page(shown, given.page, options.command_line(), utc_now())
    if given.json_to != "-":
        click.echo(screen(shown, given.gds), nl=False)
    return 0


def _fleet(given: Options, inventory: Path) -> int:
    from tunetool.fleet.inspect import FleetRequest, exit_code, inspect_fleet
    from tunetool.inspect.fleet_model import dumps
    from tunetool.report.fleet_inspection import screen, write_page
    from tunetool.report.progress import best_progress

    request = FleetRequest(given.selection(inventory), not given.no_become, options.command_line())
    fleet = inspect_fleet(request, best_progress())
    write_text(dumps(fleet), given.json_to)
    if given.page is not None:
        write_page(fleet, given.page)
    if given.json_to != "-":
        click.echo(screen(fleet), nl=False)
    return int(exit_code(fleet))
