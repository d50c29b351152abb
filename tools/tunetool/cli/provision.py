"""``tunetool provision``: build every host of an inventory, or write what that would cost into a plan."""

from __future__ import annotations

from pathlib import Path

import click

from tunetool.errors import UsageProblem


@click.command("provision")
@click.option("-i", "--inventory", required=True, metavar="INVENTORY", help="An Ansible inventory.")
@click.option("--limit", metavar="PATTERN", help="Only these hosts.")
@click.option("--forks", type=click.IntRange(min=1), metavar="N", help="So many at once. Default: all, up to 100.")
@click.option("--plan", metavar="FILE", help="Change nothing; write what would happen to every drive into FILE.")
@click.option("--apply", "apply", metavar="FILE", help="Build; the drives that FILE names may lose what they hold.")
@click.option("--check", is_flag=True, help="Change nothing; go through every step and say what it would do.")
def command(
    inventory: str, limit: str | None, forks: int | None, plan: str | None, apply: str | None, check: bool
) -> int:
    """Build the scratch volume and the host around it on every host.

    Runs playbooks/provision.yml, or playbooks/plan.yml with `--plan`, and ends with one line for each host. Drives
    that hold anything are refused unless an applied plan names them. Exit codes: 0 all hosts done, 1 a host failed
    or was refused, 2 the call was wrong, 3 a host could not be reached.
    """
    from tunetool.provision import ProvisionRequest, provision
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
    )
    result = provision(request, best_progress())
    print_provision(result, table_console())
    return int(result.code)
