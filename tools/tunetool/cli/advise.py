"""``tunetool advise``: arithmetic before anything is bought, written or run."""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING, Any

import click

from tunetool.cli.groups import Group
from tunetool.errors import UsageProblem

if TYPE_CHECKING:
    from tunetool.advise.measured import Measured

_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
SCHEMA = "tunetool.plan.checkpoint/1"


@click.group("advise", cls=Group)
def command() -> None:
    """Arithmetic before anything is bought, written or run. Measures nothing."""


@command.command("checkpoint")
@click.option("--model-size", metavar="SIZE", help="Of the weights in bf16, 2 bytes for each parameter.")
@click.option("--model", metavar="7b|70b|tiny|PATH", help="Instead: a config.json or safetensors files.")
@click.option("--bandwidth", metavar="RATE", help="Of writing a checkpoint, such as 10GBps.")
@click.option("--record", metavar="FILE", help="Take it from this record of `bench checkpoint` or `verify`.")
@click.option("--engine", metavar="NAME", help="With --record: this engine's figure. Default: the fastest one's.")
@click.option(
    "--writers", type=click.IntRange(min=1), default=1, show_default=True, help="Nodes that write their parts at once."
)
@click.option("--samples-per-second", type=float, required=True, metavar="N", help="Of the whole job.")
@click.option("--rework", default="0.5h", show_default=True, metavar="TIME", help="Training that a failure may cost.")
@click.option("--mtbf", metavar="TIME", help="Mean time between failures of one node, such as 50000h.")
@click.option("--nodes", type=click.IntRange(min=1), metavar="N", help="That must all live. Default: 1.")
@click.option(
    "--restart", default="0s", show_default=True, metavar="TIME", help="From a failure until it is read back."
)
@click.option("--batch", type=click.IntRange(min=1), metavar="N", help="Samples of a step: tells steps as well.")
@click.option("--json", "json_to", metavar="FILE|-", help="Also write the plan to FILE; `-`: it alone on stdout.")
def checkpoint(json_to: str | None, **asked: Any) -> None:
    """How often to save: a rule of thumb, and Young's and Daly's optimum, for the weights and for the full state.

    \b
    rule of thumb  the acceptable rework, but writing stays below 5 % of the time
    Young, Daly    least time lost to checkpoints, rework and restarts together (need --mtbf)
    """
    from tunetool.advise.checkpoint import Job, plan
    from tunetool.advise.measured import told
    from tunetool.cli.verify import check_json, no_empty_paths
    from tunetool.node.common.files import replace_file
    from tunetool.node.units import format_bandwidth
    from tunetool.report.advise import as_document, print_plan
    from tunetool.report.table import table_console

    no_empty_paths({"--model": asked["model"], "--record": asked["record"], "--json": json_to})
    check_json(json_to)
    parameters, what = _parameters(asked["model_size"], asked["model"])
    given = _bandwidth(asked["bandwidth"]) if asked["bandwidth"] is not None else None
    found = _measured(asked["record"], asked["engine"])
    speed = found.write if found else given
    if speed is None:
        raise UsageProblem(
            "nothing says how fast a checkpoint is written", "give `--bandwidth 10GBps` or `--record FILE`"
        )
    if asked["nodes"] is not None and asked["mtbf"] is None:
        raise UsageProblem("`--nodes` without `--mtbf` says nothing of failures", "add such as `--mtbf 50000h`")
    if not 0 < asked["samples_per_second"] < float("inf"):
        raise UsageProblem(f"`--samples-per-second {asked['samples_per_second']}` is not above zero", "such as 100")
    job = Job(
        parameters=parameters,
        bandwidth=speed * asked["writers"],
        samples_per_second=asked["samples_per_second"],
        rework=_time("--rework", asked["rework"], least=1.0),
        read_bandwidth=found.read * asked["writers"] if found and found.read else None,
        node_mtbf=_time("--mtbf", asked["mtbf"], least=1.0) if asked["mtbf"] is not None else None,
        nodes=asked["nodes"] or 1,
        restart=_time("--restart", asked["restart"]),
        batch=asked["batch"],
    )
    states = plan(job)
    source = told(found, given) if found else f"{format_bandwidth(speed)}, by --bandwidth"
    if json_to is not None:
        document = json.dumps({"schema": SCHEMA, **as_document(job, states, source)}, indent=2) + "\n"
        if json_to == "-":
            sys.stdout.write(document)
            return
        replace_file(json_to, document)
    print_plan(job, states, what, source, asked["writers"], table_console())


def _parameters(size: str | None, model: str | None) -> tuple[float, str]:
    """How many, and what they are called."""
    from tunetool.advise.checkpoint import WEIGHTS
    from tunetool.advise.read_model import load_model
    from tunetool.node.units import UnitError, format_size, parse_size

    if (size is None) == (model is None):
        raise UsageProblem("the model's size is asked once", "give `--model-size 140GB` or `--model 70b`")
    if model is not None:
        loaded = load_model(model)
        return loaded.numel, f"{loaded.name}: {loaded.numel:,} parameters"
    try:
        found = parse_size(size or "")
    except UnitError as error:
        raise UsageProblem(f"`--model-size {size}`: {error.message}", error.hint) from None
    if found < WEIGHTS:
        raise UsageProblem(f"`--model-size {size}` holds no parameter", "such as `140GB` for 70 billion in bf16")
    return found / WEIGHTS, f"{format_size(found)} of weights: {found / WEIGHTS:,.0f} parameters"


def _bandwidth(text: str) -> float:
    from tunetool.node.units import UnitError, parse_bandwidth

    try:
        return parse_bandwidth(text)
    except UnitError as error:
        raise UsageProblem(f"`--bandwidth {text}`: {error.message}", error.hint) from None


def _measured(path: str | None, engine: str | None) -> Measured | None:
    from tunetool import record as records
    from tunetool.advise.measured import measured
    from tunetool.report.runs import find_record

    if path is None:
        if engine is not None:
            raise UsageProblem("`--engine` belongs to `--record`", "name a record of `tunetool bench checkpoint`")
        return None
    return measured(records.read(find_record(path, records.default_runs_dir())), engine)


def _time(name: str, text: str, least: float = 0.0) -> float:
    """Seconds from ``0.5h``, ``30min``, ``90s`` or ``2d``."""
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)\s*(s|m|min|h|d)", text.strip())
    seconds = float(match[1]) * _SECONDS[match[2]] if match else -1.0
    if seconds < least:
        raise UsageProblem(f"`{name} {text}` is not a time", "such as `30min`, `0.5h` or `50000h`")
    return seconds
