"""``tunetool provision``: its options, and the call."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from tunetool.cli.groups import answering
from tunetool.cli.output import write_text
from tunetool.errors import UsageProblem
from tunetool.fleet.options import INVENTORY, HostsCommand, OnManyHosts
from tunetool.options.fields import number, option, takes
from tunetool.options.shared import AsJson
from tunetool.options.values import FILE, NEW_FILE, PATH, Value

_SIZE = re.compile(r"([1-9]\d*|([1-9]\d?|100)%)")


def _sizes(name: str, text: str) -> tuple[str, ...]:
    sizes = tuple(text.split(","))
    for size in sizes:
        if not _SIZE.fullmatch(size):
            raise UsageProblem(
                f"`{name} {text}`: `{size}` is neither a number of hosts nor a share of them", "such as `10` or `25%`"
            )
    return sizes


_HOSTS: Any = Value("size", _sizes)


@dataclass(frozen=True)
class Options(AsJson, OnManyHosts):
    """What the call says."""

    inventory: Path = option(
        "-i",
        "--inventory",
        required=True,
        type=PATH,
        metavar="INVENTORY",
        help=f"Ansible inventory of the hosts. {INVENTORY}",
    )
    limit: str | None = option("--limit", metavar="PATTERN", help="Only the hosts that match.")
    forks: int | None = number("--forks", help="Number of hosts at the same time. Default: all, up to 100.")
    hosts_per_batch: tuple[str, ...] | None = option(
        "--hosts-per-batch",
        type=_HOSTS,
        help="Number of hosts that are built to the end before the next ones begin: 10, a share such as 25%, or a list "
        "such as 1,10,25%. Default: all hosts.",
    )
    max_fail: int | None = option(
        "--max-fail",
        type=click.IntRange(0, 100),
        metavar="PERCENT",
        help="Share of a batch that may fail before the run ends. Default: 100, so that no host stops another.",
    )
    plan: Path | None = option(
        "--plan", type=NEW_FILE, help="File for a plan of what would happen to every drive. Changes nothing."
    )
    apply: Path | None = option("--apply", type=FILE, help="Plan to apply: the drives in it may lose what they hold.")
    dry_run: bool = option(
        "--dry-run",
        "--check",
        is_flag=True,
        help="Go through every step and say what it would change. Changes nothing.",
    )


@click.command("provision", cls=HostsCommand)
@takes(Options)
def command(given: Options) -> int:
    """Build the scratch volume and the host around it on every host of an inventory.

    Runs the playbook `tunetool.node.provision`, or `tunetool.node.plan` with --plan, and ends with one line for each
    host. Refuses drives that hold anything unless an applied plan names them.

    Exit codes: 0 all hosts are done; 1 a host failed or was refused; 2 the call was wrong; 3 a host could not be
    reached.
    """
    from tunetool.fleet.provision import ProvisionRequest, provision
    from tunetool.report.page import table_console
    from tunetool.report.progress import best_progress
    from tunetool.report.provision import as_document
    from tunetool.report.table import print_provision

    request = ProvisionRequest(
        selection=given.selection(given.inventory),
        plan=given.plan,
        apply=given.apply,
        check=given.dry_run,
        batch=given.hosts_per_batch or (),
        max_fail=given.max_fail,
    )
    result = provision(request, best_progress())
    with answering(result.code):
        write_text(as_document(result), given.json_to)
        if given.json_to != "-":
            print_provision(result, table_console())
    return int(result.code)
