"""``tunetool verify``: read the call, run it on this node or on a fleet, print, end with the verdict's code."""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from tunetool.errors import UsageProblem
from tunetool.node.units import UnitError, parse_bandwidth, parse_rate
from tunetool.verify.expectable import EXPECTABLE

if TYPE_CHECKING:
    from tunetool.record import Record

_DURATION_HINT = "write seconds or minutes, such as `10s` or `1m`"
_LONGEST = 3600.0
_MOST_TOLERANCE = 50.0


@click.command("verify")
@click.option(
    "--expect",
    "expect",
    multiple=True,
    metavar="RATE",
    help="`50GBps` (the sequential read), `read=50GBps,write=25GBps`; at level full also `randread-4k=5MIOPS`, "
    "`randread-64k`, `randread-1m`. Default: the manifest's.",
)
@click.option("--target", metavar="DIR", help="Directory to measure. Default: the manifest's mount point.")
@click.option("--duration", default="4s", show_default=True, metavar="TIME", help="One sample, such as `10s` or `1m`.")
@click.option(
    "--tolerance",
    default="0%",
    show_default=True,
    metavar="PERCENT",
    help="What of an expectation may be missing; printed beside the verdict.",
)
@click.option(
    "--level",
    type=click.Choice(["config", "quick", "full"]),
    default="quick",
    show_default=True,
    help="config: the checks only, no I/O; quick: checks, then sequential read and write; full: the whole ladder, "
    "from each drive to a checkpoint.",
)
@click.option("--json", "json_to", metavar="FILE|-", help="Also write the record to FILE; `-`: it alone on stdout.")
@click.option("--runs-dir", metavar="DIR", help="Where records are kept.")
@click.option("--manifest", metavar="PATH", help="Default: /etc/tunetool/node.json, if there is one.")
@click.option("--allow-busy", is_flag=True, help="Measure beside a job that uses the drives or GPUs.")
@click.option("--python", metavar="PATH", help="Whose torch and DeepSpeed the upper rungs use. Default: tunetool's.")
@click.option(
    "--require",
    multiple=True,
    type=click.Choice(["deepspeed"]),
    help="No pass without it: else the DeepSpeed rung has no say.",
)
@click.option(
    "--gds",
    type=click.Choice(["require", "auto", "off"]),
    help="Prove GPUDirect Storage by cuFile's own counters. auto: measure it, without a say. "
    "Default: require where the manifest says that it was set up, else off.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be written, how long and where; do nothing.")
@click.option("-i", "--inventory", metavar="INVENTORY", help="Verify every host of an Ansible inventory.")
@click.option("--limit", metavar="PATTERN", help="With -i: only these hosts.")
@click.option("--one-at-a-time", is_flag=True, help="With -i: one host after the other.")
@click.option(
    "--forks", type=click.IntRange(min=1), metavar="N", help="With -i: so many at once. Default: all, up to 100."
)
def command(
    expect: tuple[str, ...],
    target: str | None,
    duration: str,
    tolerance: str,
    level: Literal["config", "quick", "full"],
    json_to: str | None,
    runs_dir: str | None,
    manifest: str | None,
    allow_busy: bool,
    python: str | None,
    require: tuple[str, ...],
    gds: Literal["require", "auto", "off"] | None,
    dry_run: bool,
    inventory: str | None,
    limit: str | None,
    one_at_a_time: bool,
    forks: int | None,
) -> int:
    """Check the node against its manifest, measure its storage, and judge.

    Measures sequential read and write with fio, proves the bytes by the drives' own counters, and compares the median's
    whole confidence interval with the expectation. Exit codes: 0 it holds, 1 it falls short, 2 the call was wrong,
    3 it could not be judged.
    """
    paths = {"--target": target, "--json": json_to, "--runs-dir": runs_dir, "--manifest": manifest, "-i": inventory}
    paths |= {"--python": python}
    no_empty_paths(paths)
    if one_at_a_time:
        if forks is not None and forks != 1:
            raise UsageProblem("`--one-at-a-time` and `--forks` contradict each other", "give one of them")
        forks = 1
    wanted = parse_expectations(expect)
    seconds = parse_duration(duration)
    forgiven = parse_tolerance(tolerance)
    check_json(json_to)
    if require and level == "config":
        raise UsageProblem("`--require` and `--level config` contradict each other", "config measures nothing")
    if gds in ("require", "auto") and level == "config":
        raise UsageProblem("`--gds` and `--level config` contradict each other", "config moves nothing")
    _check_level(wanted, level)
    if inventory is not None:
        if manifest is not None:
            raise UsageProblem(
                "`--manifest` and `-i` do not go together", "each host of a fleet reads its own manifest"
            )
        return _fleet(
            wanted,
            target,
            seconds,
            forgiven,
            level,
            json_to,
            runs_dir,
            allow_busy,
            dry_run,
            inventory,
            limit,
            forks,
            python,
            require,
            gds,
        )
    for name, value in (("--limit", limit), ("--one-at-a-time` or `--forks", forks)):
        if value is not None:
            raise UsageProblem(f"`{name}` needs an inventory", "add `-i INVENTORY`")
    interpreter = check_python(python)
    return _node(
        wanted,
        target,
        seconds,
        forgiven,
        level,
        json_to,
        runs_dir,
        manifest,
        allow_busy,
        dry_run,
        interpreter,
        require,
        gds,
    )


def no_empty_paths(paths: Mapping[str, str | None]) -> None:
    """Raises ``UsageProblem``: `--target "$UNSET"` must not measure the directory that the shell happens to be in."""
    for name, path in paths.items():
        if path is not None and not path.strip():
            raise UsageProblem(f"`{name}` is empty", "give a path, or leave the option out")


def parse_expectations(texts: tuple[str, ...]) -> dict[str, float]:
    """By key of ``--expect``: bytes per second, or requests per second for random reads. A bare rate is the read.

    Raises ``UsageProblem``.
    """
    found: dict[str, float] = {}
    for part in (part.strip() for text in texts for part in text.split(",")):
        name, separator, rate = part.partition("=")
        if not separator:
            name, rate = "read", part
        if name not in EXPECTABLE:
            raise UsageProblem(
                f"`{name}` is not a direction", "expect `read=50GBps`, `write=25GBps` or `randread-4k=5MIOPS`"
            )
        if name in found:
            raise UsageProblem(
                f"`--expect {part}` gives the {name} twice", "give each once: `read=50GBps,write=25GBps`"
            )
        found[name] = _rate(rate, EXPECTABLE[name][1])
    return found


def _rate(text: str, unit: str) -> float:
    try:
        value = parse_rate(text) if unit == "1/s" else parse_bandwidth(text)
    except UnitError as error:
        raise UsageProblem(error.message, error.hint) from None
    if not math.isfinite(value):
        raise UsageProblem(f"`{text[:20]}` is too large", "expect a bandwidth such as `50GBps`")
    return value


def parse_duration(text: str) -> float:
    """Seconds from ``10s`` or ``1m``; at least one second. Raises ``UsageProblem``."""
    match = re.fullmatch(r"([0-9]{1,5}(?:\.[0-9]{1,3})?)(s|m)", text.strip())
    if not match:
        raise UsageProblem(f"`{text}` is not a duration", _DURATION_HINT)
    seconds = float(match.group(1)) * (60 if match.group(2) == "m" else 1)
    if not 1 <= seconds <= _LONGEST:
        raise UsageProblem(f"`{text}` is not a duration between 1 s and {_LONGEST:.0f} s", _DURATION_HINT)
    return seconds


def parse_tolerance(text: str) -> float:
    """A fraction from ``2%``; below one half. Raises ``UsageProblem``."""
    match = re.fullmatch(r"([0-9]{1,2}(?:\.[0-9]{1,3})?)%", text.strip())
    if not match or float(match.group(1)) >= _MOST_TOLERANCE:
        raise UsageProblem(f"`{text}` is not a tolerance", f"write per cent below {_MOST_TOLERANCE:g}, such as `2%`")
    return float(match.group(1)) / 100


def _check_level(wanted: dict[str, float], level: str) -> None:
    for name in wanted:
        if EXPECTABLE[name][1] == "1/s" and level != "full":
            raise UsageProblem(f"`{name}` is measured by level full alone", "add `--level full`")


def check_python(path: str | None) -> Path:
    """The interpreter, ours without one. Raises ``UsageProblem``."""
    if path is None:
        return Path(sys.executable)
    found = shutil.which(path)
    if found is None:
        raise UsageProblem(
            f"`{path}` is not a program", "`--python` takes an interpreter, such as `/opt/venv/bin/python`"
        )
    # Not resolved: a venv's python is a link, and is the venv by its own name only.
    return Path(found).absolute()


def check_json(json_to: str | None) -> None:
    if json_to is None or json_to == "-":
        return
    path = Path(json_to)
    if path.is_dir():
        raise UsageProblem(f"`{path}` is a directory", "`--json` takes a file, or `-` for stdout")
    if not os.access(path.parent, os.W_OK | os.X_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise UsageProblem(f"`{path}` cannot be written", "`--json` takes a file in a directory that exists")


def _node(
    wanted: dict[str, float],
    target: str | None,
    seconds: float,
    tolerance: float,
    level: Literal["config", "quick", "full"],
    json_to: str | None,
    runs_dir: str | None,
    manifest: str | None,
    allow_busy: bool,
    dry_run: bool,
    python: Path,
    require: tuple[str, ...],
    gds: Literal["require", "auto", "off"] | None,
) -> int:
    from tunetool.report.progress import best_progress
    from tunetool.report.table import print_verdict, table_console
    from tunetool.verify.request import Request
    from tunetool.verify.run import verify

    request = Request(
        expect=wanted,
        target=Path(target) if target is not None else None,
        duration=seconds,
        tolerance=tolerance,
        level=level,
        manifest=Path(manifest) if manifest is not None else None,
        runs_dir=Path(runs_dir) if runs_dir is not None else None,
        allow_busy=allow_busy,
        dry_run=dry_run,
        python=python,
        require=require,
        gds=gds,
        command=sys.argv,
    )
    result = verify(request, best_progress())
    if result.record is not None:
        write_json(result.record, json_to)
        if json_to != "-":
            print_verdict(result.record, result.path, table_console())
    return int(result.code)


def _fleet(
    wanted: dict[str, float],
    target: str | None,
    seconds: float,
    tolerance: float,
    level: str,
    json_to: str | None,
    runs_dir: str | None,
    allow_busy: bool,
    dry_run: bool,
    inventory: str,
    limit: str | None,
    forks: int | None,
    python: str | None,
    require: tuple[str, ...],
    gds: str | None,
) -> int:
    from tunetool.fleet.verify import FleetRequest, verify_fleet
    from tunetool.report.progress import best_progress
    from tunetool.report.table import print_fleet, print_fleet_verdict, table_console

    request = FleetRequest(
        inventory=Path(inventory),
        limit=limit,
        forks=forks,
        expect=wanted,
        target=target,
        duration=seconds,
        tolerance=tolerance,
        level=level,
        allow_busy=allow_busy,
        runs_dir=Path(runs_dir) if runs_dir is not None else None,
        dry_run=dry_run,
        python=python,
        require=require,
        gds=gds,
        command=sys.argv,
    )
    result = verify_fleet(request, best_progress())
    if result.record is not None:
        write_json(result.record, json_to)
        if json_to != "-":
            console = table_console()
            print_fleet(result.hosts, console)
            print_fleet_verdict(result.record, result.path, console)
    return int(result.code)


def write_json(record: Record, json_to: str | None) -> None:
    from tunetool.node.common.files import replace_file
    from tunetool.record import dumps

    if json_to == "-":
        sys.stdout.write(dumps(record))
    elif json_to is not None:
        replace_file(json_to, dumps(record))
