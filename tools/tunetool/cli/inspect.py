"""``tunetool inspect``: look at a node, or at a recorded one; judge nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tunetool.errors import UsageProblem

if TYPE_CHECKING:
    from tunetool.inspect.source import Source


@click.command("inspect")
@click.option("--gds", "gds_in_full", is_flag=True, help="GPUDirect Storage alone: each path, each blocker, each cure.")
@click.option("--json", "json_to", metavar="FILE|-", help="Also write it as JSON to FILE; `-`: it alone on stdout.")
@click.option("--root", metavar="PATH", help="Look at a recording, a directory or a file *.json, instead of this node.")
@click.option(
    "--capture", "capture_to", metavar="PATH", help="Record into a new directory, or a new file *.json; print where."
)
@click.option(
    "--anonymous", is_flag=True, help="With --capture: replace serial numbers, the host's name and addresses."
)
def command(gds_in_full: bool, json_to: str | None, root: str | None, capture_to: str | None, anonymous: bool) -> int:
    """Show one screen of the node: drives, PCIe paths, volume, memory, GPUs, what limits it, and what to mend.

    Reads only, needs no GPU, no driver and no drive, and ends with 0 whatever is absent. As root it also asks the
    drives for their health. A recording holds what this command reads and nothing else: the drives' serial numbers and
    the host's name are in it (unless --anonymous); no environment, no log, no address of a network card.
    """
    from tunetool.cli.verify import check_json, no_empty_paths
    from tunetool.inspect.capture import capture, check_destination
    from tunetool.inspect.source import opened

    no_empty_paths({"--json": json_to, "--root": root, "--capture": capture_to})
    check_json(json_to)
    if anonymous and capture_to is None:
        raise UsageProblem("`--anonymous` needs `--capture`", "it says what a recording leaves out")
    if capture_to is not None and (json_to is not None or gds_in_full):
        raise UsageProblem(
            "`--capture` shows nothing", "leave out `--json` and `--gds`, or inspect the recording: `--root`"
        )
    if capture_to is not None:
        check_destination(Path(capture_to))
    with opened(Path(root) if root is not None else None) as source:
        if capture_to is not None:
            document = capture(source, Path(capture_to), anonymous)
            size = sum(len(text) for text in document["files"].values())
            kept = "names and serial numbers replaced" if anonymous else "the host's name and serial numbers are in it"
            click.echo(f"{capture_to}: {len(document['files'])} files, {size} bytes; {kept}")
            return 0
        return _show(source, json_to, gds_in_full)


def _show(source: Source, json_to: str | None, gds_in_full: bool) -> int:
    from tunetool.inspect.collect import inspect
    from tunetool.inspect.model import dumps
    from tunetool.node.common.files import replace_file
    from tunetool.report.inspection import screen

    shown = inspect(source)
    if json_to == "-":
        sys.stdout.write(dumps(shown))
        return 0
    if json_to is not None:
        replace_file(json_to, dumps(shown))
    click.echo(screen(shown, gds_in_full), nl=False)
    return 0
