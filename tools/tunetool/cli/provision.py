"""``tunetool provision``: build every host of an inventory, or write what that would cost into a plan."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from tunetool.errors import UsageProblem

_SIZE = re.compile(r"([1-9]\d*|([1-9]\d?|100)%)")


class BatchSize(click.ParamType[tuple[str, ...]]):
    """`10`, `25%` or a list of them."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        sizes = tuple(str(value).split(","))
        for size in sizes:
            if not _SIZE.fullmatch(size):
                self.fail(f"`{size}` is no number of hosts from 1 on and no share such as 25%", param, ctx)
        return sizes


@click.command("provision")
@click.option("-i", "--inventory", required=True, metavar="INVENTORY", help="An Ansible inventory.")
@click.option("--limit", metavar="PATTERN", help="Only these hosts.")
@click.option("--forks", type=click.IntRange(min=1), metavar="N", help="So many at once. Default: all, up to 100.")
@click.option(
    "--batch",
    type=BatchSize(),
    metavar="SIZE",
    help="Build so many hosts to the end before the next ones: a number, a share such as 25%, or 1,10,25% one after the"
    " other. Default: all hosts.",
)
@click.option(
    "--max-fail",
    type=click.IntRange(0, 100),
    metavar="PERCENT",
    help="End the run when more than that of a batch failed. Default: 100, so that no host stops another.",
)
@click.option("--plan", metavar="FILE", help="Change nothing; write what would happen to every drive into FILE.")
@click.option("--apply", "apply", metavar="FILE", help="Build; the drives that FILE names may lose what they hold.")
@click.option("--check", is_flag=True, help="Change nothing; go through every step and say what it would do.")
def command(
    inventory: str,
    limit: str | None,
    forks: int | None,
    batch: tuple[str, ...] | None,
    max_fail: int | None,
    plan: str | None,
    apply: str | None,
    check: bool,
) -> int:
    """Build the scratch volume and the host around it on every host.

    Runs playbooks/provision.yml, or playbooks/plan.yml with `--plan`, and ends with one line for each host. Drives
    that hold anything are refused unless an applied plan names them. Exit codes: 0 all hosts done, 1 a host failed
    or was refused, 2 the call was wrong, 3 a host could not be reached.
    """
    from tunetool.fleet.provision import ProvisionRequest, provision
    from tunetool.report.progress import best_progress
    from tunetool.report.table import print_provision, table_console

    for name, path in {"-i": inventory, "--plan": plan, "--apply": apply}.items():
        if path is not None and not path.strip():
            raise UsageProblem(f"`{name}` is empty", "give a path, or leave the option out")
    request = ProvisionRequest(
        inventory=Path(inventory),
        limit=limit,
        forks=forks,
        plan=Path(plan) if plan is not None else None,
        apply=Path(apply) if apply is not None else None,
        check=check,
        batch=batch or (),
        max_fail=max_fail,
    )
    result = provision(request, best_progress())
    print_provision(result, table_console())
    return int(result.code)
