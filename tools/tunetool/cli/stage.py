"""``tunetool stage``: read the call, copy (here or on a fleet), print."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from tunetool.errors import UsageProblem

if TYPE_CHECKING:
    from tunetool.stage.run import Request


@click.command("stage")
@click.argument("paths", nargs=-1, required=True, metavar="SRC DST")
@click.option("--replace", is_flag=True, help="Put the copy in the place of another tree that is at DST.")
@click.option("--verify", is_flag=True, help="Read DST (alone) again and hold it against its manifest.")
@click.option("--evict", is_flag=True, help="Remove DST (alone) and its manifest, where it is as it was staged.")
@click.option(
    "--checksum",
    type=click.Choice(["xxh3_64", "sha256"]),
    help="Kept in the manifest: xxh3_64 of every 64 MiB (the default), or sha256 of every file, as by sha256sum.",
)
@click.option("--threads", type=click.IntRange(1, 256), metavar="N", help="Default: twice the CPUs, 8 to 32.")
@click.option("--no-wait", is_flag=True, help="Where another run is at work on DST: do not wait for it (exit 3).")
@click.option("--json", "json_to", metavar="FILE|-", help="Also write the record to FILE; `-`: it alone on stdout.")
@click.option("--runs-dir", metavar="DIR", help="Where records are kept.")
@click.option("--dry-run", is_flag=True, help="Say what would be copied, from where to where; do nothing.")
@click.option("-i", "--inventory", metavar="INVENTORY", help="On every host of an Ansible inventory.")
@click.option("--limit", metavar="PATTERN", help="With -i: only these hosts.")
@click.option(
    "--forks", type=click.IntRange(min=1), metavar="N", help="With -i: so many at once. Default: all, up to 100."
)
@click.option("--no-become", is_flag=True, help="With -i: as the user who logs in, not as root.")
def command(
    paths: tuple[str, ...],
    replace: bool,
    verify: bool,
    evict: bool,
    checksum: Literal["xxh3_64", "sha256"] | None,
    threads: int | None,
    no_wait: bool,
    json_to: str | None,
    runs_dir: str | None,
    dry_run: bool,
    inventory: str | None,
    limit: str | None,
    forks: int | None,
    no_become: bool,
) -> int:
    """Make DST the copy of what the directory SRC holds: in /dev/shm, or on any file system.

    SRC is a directory, or `remote:path` where rclone is installed. DST appears whole or not at all; its manifest, with
    checksums, lies beside it. DST that is that copy already is done at once. Exit codes: 0 done (or verified), 1 what
    was verified is not as it was staged, 2 the call was wrong, 3 it could not be done.
    """
    from tunetool.cli.verify import check_json, no_empty_paths, write_json
    from tunetool.report.page import table_console
    from tunetool.report.progress import best_progress
    from tunetool.report.stage import print_stage
    from tunetool.stage.run import Request, run

    no_empty_paths({"SRC": paths[0], "DST": paths[-1], "--json": json_to, "--runs-dir": runs_dir, "-i": inventory})
    check_json(json_to)
    if verify and evict:
        raise UsageProblem("`--verify` and `--evict` do not go together", "verify it, then evict it")
    alone = "--verify" if verify else "--evict" if evict else None
    _check_paths(paths, alone)
    if alone is not None and (replace or checksum is not None):
        raise UsageProblem(f"`{alone}` copies nothing", "leave out `--replace` and `--checksum`")
    request = Request(
        action="verify" if verify else "evict" if evict else "stage",
        destination=paths[-1],
        source=None if alone else paths[0],
        replace=replace,
        checksum=checksum,
        threads=threads,
        wait=not no_wait,
        dry_run=dry_run,
        runs_dir=Path(runs_dir) if runs_dir is not None else None,
        command=sys.argv,
    )
    if inventory is not None:
        return _fleet(request, Path(inventory), limit, forks, not no_become, json_to)
    for name, value in (("--limit", limit), ("--forks", forks), ("--no-become", no_become or None)):
        if value is not None:
            raise UsageProblem(f"`{name}` needs an inventory", "add `-i INVENTORY`")
    result = run(request, best_progress())
    if result.record is not None:
        write_json(result.record, json_to)
        if json_to != "-":
            print_stage(result.record, result.path, table_console())
    return int(result.code)


def _check_paths(paths: tuple[str, ...], alone: str | None) -> None:
    if alone is None and len(paths) != 2:
        raise UsageProblem("`tunetool stage` takes SRC and DST", "such as `tunetool stage /data/model /dev/shm/model`")
    if alone is not None and len(paths) != 1:
        raise UsageProblem(f"`{alone}` takes DST alone", f"such as `tunetool stage {alone} /dev/shm/model`")


def _fleet(
    request: Request, inventory: Path, limit: str | None, forks: int | None, become: bool, json_to: str | None
) -> int:
    from tunetool.cli.verify import write_json
    from tunetool.fleet.stage import FleetRequest, stage_fleet
    from tunetool.report.progress import best_progress
    from tunetool.report.stage import print_stage_fleet
    from tunetool.report.table import print_fleet_verdict, table_console

    result = stage_fleet(FleetRequest(request, inventory, limit, forks, become), best_progress())
    if result.record is not None:
        write_json(result.record, json_to)
        if json_to != "-":
            console = table_console()
            print_stage_fleet(result.hosts, console)
            print_fleet_verdict(result.record, result.path, console)
    return int(result.code)
