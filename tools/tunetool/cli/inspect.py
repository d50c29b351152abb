"""``tunetool inspect``: show a node or a recording of one; judge nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tunetool.cli.options import AsJson, option, takes
from tunetool.cli.output import write_text
from tunetool.cli.values import PATH
from tunetool.errors import UsageProblem

if TYPE_CHECKING:
    from tunetool.inspect.source import Source


@dataclass(frozen=True)
class Options(AsJson):
    """What the call says."""

    gds: bool = option("--gds", is_flag=True, help="Show GPUDirect Storage alone: each path, obstacle and remedy.")
    root: Path | None = option(
        "--root", type=PATH, help="Recording to inspect instead of this node: a directory or *.json."
    )
    capture: Path | None = option(
        "--capture", type=PATH, help="Recording of this node to write: a new directory or a new *.json file."
    )
    anonymous: bool = option(
        "--anonymous", is_flag=True, help="With --capture: replace serial numbers, host name and addresses."
    )

    def check(self) -> None:
        """Raises ``UsageProblem`` for options that contradict each other."""
        if self.anonymous and self.capture is None:
            raise UsageProblem("`--anonymous` needs `--capture`", "it decides what a recording leaves out")
        if self.capture is not None and (self.json_to is not None or self.gds):
            raise UsageProblem(
                "`--capture` shows nothing", "leave out `--json` and `--gds`, or inspect the recording: `--root`"
            )


@click.command("inspect")
@takes(Options)
def command(given: Options) -> int:
    """Show one screen of the node: drives, PCIe paths, volume, memory, GPUs, what limits it, and what to repair.

    Changes nothing, and needs no GPU, no driver and no drive. Root also sees the drives' health. A recording holds what
    this command reads and nothing else. It contains serial numbers and the host's name unless --anonymous is given; it
    never contains the environment, logs or addresses of network cards.

    Exit codes: 0 shown or recorded, even if parts are absent; 2 the call was wrong.
    """
    from tunetool.inspect.capture import capture, check_destination
    from tunetool.inspect.source import opened

    if given.capture is not None:
        check_destination(given.capture)
    with opened(given.root) as source:
        if given.capture is None:
            return _show(source, given.json_to, given.gds)
        document = capture(source, given.capture, given.anonymous)
        size = sum(len(text) for text in document["files"].values())
        kept = (
            "names and serial numbers replaced" if given.anonymous else "the host's name and serial numbers are in it"
        )
        click.echo(f"{given.capture}: {len(document['files'])} files, {size} bytes; {kept}")
        return 0


def _show(source: Source, json_to: str | None, gds_in_full: bool) -> int:
    from tunetool.inspect.collect import inspect
    from tunetool.inspect.model import dumps
    from tunetool.report.inspection import screen

    shown = inspect(source)
    write_text(dumps(shown), json_to)
    if json_to != "-":
        click.echo(screen(shown, gds_in_full), nl=False)
    return 0
