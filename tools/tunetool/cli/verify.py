"""``tunetool verify``: its options, and the call on this node or on a fleet."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tunetool.cli.output import finish
from tunetool.errors import UsageProblem
from tunetool.fleet.options import HostsCommand, OnManyHosts, need_inventory
from tunetool.measure.metrics import EXPECTABLE
from tunetool.options import shared as options
from tunetool.options.fields import option, repeatable, takes
from tunetool.options.shared import Measuring, parse_expectations
from tunetool.options.values import PATH, TEXT, TOLERANCE

if TYPE_CHECKING:
    from rich.console import Console

    from tunetool.record import Record


@dataclass(frozen=True)
class Options(Measuring, OnManyHosts):
    """What the call says."""

    expect: tuple[str, ...] = options.expect()
    target: str | None = options.target("Directory to measure. Default: the manifest's mount point.", type=TEXT)
    duration: float = options.duration_of_sample()
    tolerance: float = option(
        "--tolerance",
        type=TOLERANCE,
        default="0%",
        help="Share of an expectation that may be missing; printed beside the verdict.",
    )
    level: str = option(
        "--level",
        type=click.Choice(["config", "quick", "full"]),
        default="quick",
        help="Extent of the run. config: only the checks; quick: also sequential read and write; full: also every rung "
        "from each drive alone to a checkpoint.",
    )
    manifest: Path | None = option(
        "--manifest", type=PATH, help="Manifest of the node. Default: /etc/tunetool/node.json."
    )
    python: str | None = options.python(hosts=True)
    require: tuple[str, ...] = repeatable(
        "--require",
        type=click.Choice(["deepspeed"]),
        help="Part without which there is no pass. Default: DeepSpeed's I/O where the node has a training environment "
        "with its op; elsewhere it is measured if it can be, and not judged.",
    )
    gds: str | None = option(
        "--gds",
        type=click.Choice(["require", "auto", "off"]),
        help="Proof of GPUDirect Storage by cuFile's own counters. auto: measured but not judged. "
        "Default: require if the manifest says that it was set up, else off.",
    )
    one_at_a_time: bool = option("--one-at-a-time", is_flag=True, help="With -i: one host after the other.")

    def check(self) -> None:
        """Raises ``UsageProblem`` for options that contradict each other."""
        if self.one_at_a_time and self.forks not in (None, 1):
            raise UsageProblem("`--one-at-a-time` and `--forks` contradict each other", "give one of them")
        if self.require and self.level == "config":
            raise UsageProblem("`--require` and `--level config` contradict each other", "config measures nothing")
        if self.gds in ("require", "auto") and self.level == "config":
            raise UsageProblem("`--gds` and `--level config` contradict each other", "config moves nothing")
        if self.inventory is not None and self.manifest is not None:
            raise UsageProblem(
                "`--manifest` and `-i` do not go together", "each host of a fleet reads its own manifest"
            )
        need_inventory(self.inventory, limit=self.limit, one_at_a_time=self.one_at_a_time, forks=self.forks)

    def demands(self, expectations: dict[str, float]) -> dict[str, Any]:
        """The fields of ``tunetool.verify.request.Demands``."""
        same = {name: getattr(self, name) for name in ("duration", "tolerance", "level", "require", "gds")}
        return {"expect": expectations, **same}


@click.command("verify", cls=HostsCommand)
@takes(Options)
def command(given: Options) -> int:
    """Check the node against its manifest, measure its storage, and judge both.

    Reads /etc/tunetool/node.json, measures sequential read and write with fio, proves the bytes by the drives' own
    counters, and compares the whole confidence interval of the median with the expectation. Writes a record into the
    runs directory; what it writes to --target is removed at the end.

    Exit codes: 0 everything holds; 1 something falls short; 2 the call was wrong; 3 something could not be judged.
    """
    expectations = parse_expectations(given.expect)
    _check_level(expectations, given.level)
    return _node(given, expectations) if given.inventory is None else _fleet(given, given.inventory, expectations)


def _check_level(expectations: dict[str, float], level: str) -> None:
    for name in expectations:
        if EXPECTABLE[name].level == "full" != level:
            raise UsageProblem(f"only `--level full` measures `{name}`", "add `--level full`")


def _node(given: Options, expectations: dict[str, float]) -> int:
    from tunetool.report.progress import best_progress
    from tunetool.training_python import choose
    from tunetool.verify.request import Request
    from tunetool.verify.run import verify

    chosen = choose(given.python, given.manifest)
    request = Request(
        **given.demands(expectations),
        target=Path(given.target) if given.target is not None else None,
        manifest=given.manifest,
        python=chosen.path,
        chosen=chosen,
        run=given.run,
    )
    return finish(verify(request, best_progress(), chosen.environment(os.environ)), given.json_to)


def _fleet(given: Options, inventory: Path, expectations: dict[str, float]) -> int:
    from tunetool.fleet.verify import FleetRequest, verify_fleet
    from tunetool.report.progress import best_progress
    from tunetool.report.table import print_fleet, print_fleet_verdict

    request = FleetRequest(
        selection=replace(given.selection(inventory), forks=1 if given.one_at_a_time else given.forks),
        **given.demands(expectations),
        target=given.target,
        python=given.python,
        run=given.run,
    )
    result = verify_fleet(request, best_progress())

    def show(record: Record, path: Path | None, console: Console) -> None:
        print_fleet(result.hosts, console)
        print_fleet_verdict(record, path, console)

    return finish(result, given.json_to, show)
