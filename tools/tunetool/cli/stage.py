"""``tunetool stage``: copy a tree, verify a copy, evict one; here or on the hosts of an inventory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import click

from tunetool.cli.groups import Group
from tunetool.cli.output import finish
from tunetool.errors import UsageProblem
from tunetool.fleet.options import HostsCommand, OnManyHosts, need_inventory, no_become
from tunetool.options.fields import argument, option, takes
from tunetool.options.shared import AsJson, Dry, InRuns, command_line
from tunetool.options.values import TEXT

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from tunetool.record import Record
    from tunetool.stage.run import Request


class _CopyByDefault(Group):
    """Reads `stage SRC DST` as `stage copy SRC DST`, unless the first word names a command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["copy", *args]
        return super().parse_args(ctx, args)


@click.group("stage", cls=_CopyByDefault)
def command() -> None:
    """Copy directory trees to memory or a local disk, verify the copies, evict them.

    `tunetool stage SRC DST` is short for `tunetool stage copy SRC DST`. The first word is the command if it is `copy`,
    `verify` or `evict`; a directory of such a name is written `./verify`.
    """


@dataclass(frozen=True)
class _Options(AsJson, InRuns, Dry, OnManyHosts):
    threads: int | None = option(
        "--threads",
        type=click.IntRange(1, 256),
        metavar="N",
        help="Number of threads. Default: twice the CPUs, from 8 to 32.",
    )
    no_wait: bool = option(
        "--no-wait", is_flag=True, help="End with 3 if another run works on DST; do not wait for it."
    )
    no_become: bool = no_become()

    def check(self) -> None:
        """Raises ``UsageProblem``."""
        need_inventory(self.inventory, limit=self.limit, forks=self.forks, no_become=self.no_become)

    def run(self, action: Literal["stage", "verify", "evict"], destination: str, **more: Any) -> int:
        """Run the action, here or on the hosts. Returns the exit code."""
        from tunetool.report.progress import best_progress
        from tunetool.stage.run import Request, run

        request = Request(
            action=action,
            destination=destination,
            threads=self.threads,
            wait=not self.no_wait,
            dry_run=self.dry_run,
            runs_dir=self.runs_dir,
            command=command_line(),
            **more,
        )
        if self.inventory is not None:
            return self._run_on_hosts(request, self.inventory)
        return finish(run(request, best_progress()), self.json_to)

    def _run_on_hosts(self, request: Request, inventory: Path) -> int:
        from tunetool.fleet.stage import FleetRequest, stage_fleet
        from tunetool.report.progress import best_progress
        from tunetool.report.stage_fleet import print_stage_fleet
        from tunetool.report.table import print_fleet_verdict

        asked = FleetRequest(request, self.selection(inventory), not self.no_become)
        result = stage_fleet(asked, best_progress())

        def show(record: Record, path: Path | None, console: Console) -> None:
            print_stage_fleet(result.hosts, console)
            print_fleet_verdict(record, path, console)

        return finish(result, self.json_to, show)


@dataclass(frozen=True)
class CopyOptions(_Options):
    """What `stage copy` takes."""

    source: str = argument("SRC", type=TEXT)
    destination: str = argument("DST", type=TEXT)
    replace: bool = option("--replace", is_flag=True, help="Replace another tree that is at DST.")
    checksum: Literal["xxh3_64", "sha256"] | None = option(
        "--checksum",
        type=click.Choice(["xxh3_64", "sha256"]),
        help="Checksums in the manifest: xxh3_64 of every 64 MiB (the default), or sha256 of every file, as sha256sum "
        "prints it.",
    )


@dataclass(frozen=True)
class CopiedOptions(_Options):
    """What `stage verify` and `stage evict` take."""

    destination: str = argument("DST", type=TEXT)


@command.command("copy", cls=HostsCommand)
@takes(CopyOptions)
def copy(given: CopyOptions) -> int:
    """Copy the directory SRC to DST, in /dev/shm or on any file system.

    SRC is a directory, or `remote:path` if rclone is installed. DST appears whole or not at all; its manifest, with
    checksums, lies beside it. If DST is that copy already, nothing is copied. Writes a record into the runs
    directory.

    Exit codes: 0 DST is the copy; 2 the call was wrong; 3 it could not be done.
    """
    if given.source in command.commands:
        raise UsageProblem(
            f"`{given.source}` must be the first word after `stage`", f"a directory of that name is `./{given.source}`"
        )
    return given.run("stage", given.destination, source=given.source, replace=given.replace, checksum=given.checksum)


@command.command("verify", cls=HostsCommand)
@takes(CopiedOptions)
def verify(given: CopiedOptions) -> int:
    """Read the copy DST again and compare it with its manifest.

    Names every entry that is missing, was added or differs. Writes a record into the runs directory.

    Exit codes: 0 DST is as it was copied; 1 it differs; 2 the call was wrong; 3 it could not be read.
    """
    return given.run("verify", given.destination)


@command.command("evict", cls=HostsCommand)
@takes(CopiedOptions)
def evict(given: CopiedOptions) -> int:
    """Remove the copy DST and its manifest, unless something in it was changed or added.

    Writes a record into the runs directory.

    Exit codes: 0 DST is gone; 2 the call was wrong, or DST is not as it was copied; 3 it could not be removed.
    """
    return given.run("evict", given.destination)
