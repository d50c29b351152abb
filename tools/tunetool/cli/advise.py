"""``tunetool advise``: compute what a job needs before anything is bought, written or run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from tunetool.cli import advise_expect, advise_io, advise_model, advise_network
from tunetool.cli.groups import Group
from tunetool.cli.output import write_text
from tunetool.errors import UsageProblem
from tunetool.options import shared as options
from tunetool.options.fields import number, option, takes
from tunetool.options.shared import AsJson
from tunetool.options.values import BANDWIDTH, SIZE, TEXT, TIME, TIME_ABOVE_ZERO

if TYPE_CHECKING:
    from tunetool.advise.checkpoint import Measured

SCHEMA = "tunetool.advise.checkpoint/1"


@click.group("advise", cls=Group)
def command() -> None:
    """Compute what a job needs before anything is bought, written or run. Measures nothing."""


command.add_command(advise_expect.expect)
command.add_command(advise_network.network)
command.add_command(advise_model.model)
command.add_command(advise_io.io)


@dataclass(frozen=True)
class CheckpointOptions(AsJson):
    """What `advise checkpoint` takes."""

    model_size: int | None = option(
        "--model-size", type=SIZE, help="Size of the weights in bf16, 2 bytes for each parameter."
    )
    model: str | None = options.model("Model, instead of --model-size")
    bandwidth: float | None = option(
        "--bandwidth", type=BANDWIDTH, help="Speed of writing a checkpoint, such as 10GBps."
    )
    record: str | None = option(
        "--record",
        type=TEXT,
        metavar="FILE",
        help="Record of `bench checkpoint` or `verify` with that speed, instead of --bandwidth.",
    )
    engine: str | None = option(
        "--engine", metavar="NAME", help="With --record: engine whose speed counts. Default: the fastest one."
    )
    writers: int = number("--writers", default=1, help="Number of nodes that write their parts at the same time.")
    samples_per_second: float = option(
        "--samples-per-second", type=float, required=True, metavar="N", help="Training speed of the whole job."
    )
    rework: float = option(
        "--rework", type=TIME_ABOVE_ZERO, default="0.5h", help="Training time that a failure may cost."
    )
    mtbf: float | None = option(
        "--mtbf", type=TIME_ABOVE_ZERO, help="Mean time between failures of one node, such as 50000h."
    )
    nodes: int | None = number("--nodes", help="Number of nodes that must all be up. Default: 1.")
    restart: float = option(
        "--restart", type=TIME, default="0s", help="Time from a failure until the checkpoint is read."
    )
    batch: int | None = number(
        "--batch", help="Samples of one step of the whole job. With it, the answer is in steps too."
    )


@command.command("checkpoint")
@takes(CheckpointOptions)
def checkpoint(given: CheckpointOptions) -> int:
    """Compute how often to save: by a rule of thumb, and by Young's and Daly's optimum, for weights and full state.

    \b
    rule of thumb  save every --rework, or less often where writing would take more than 5 % of the time
    Young, Daly    least time lost to checkpoints, rework and restarts together (both need --mtbf)

    Exit codes: 0 computed; 2 the call was wrong.
    """
    from tunetool.advise.checkpoint import Job, bandwidth_source, plan
    from tunetool.node.units import format_bandwidth
    from tunetool.report.advise import as_document, print_plan
    from tunetool.report.page import table_console

    parameters, what = _parameters(given.model_size, given.model)
    measured = _measured(given.record, given.engine)
    speed = measured.write if measured else given.bandwidth
    if speed is None:
        raise UsageProblem(
            "the speed of writing a checkpoint is missing", "give `--bandwidth 10GBps` or `--record FILE`"
        )
    if given.nodes is not None and given.mtbf is None:
        raise UsageProblem(
            "`--nodes` needs `--mtbf`", "add the mean time between failures of one node, such as `--mtbf 50000h`"
        )
    if not 0 < given.samples_per_second < float("inf"):
        raise UsageProblem(
            f"`--samples-per-second {given.samples_per_second}` is not above zero", "give a number such as 100"
        )
    job = Job(
        parameters=parameters,
        bandwidth=speed * given.writers,
        samples_per_second=given.samples_per_second,
        rework=given.rework,
        read_bandwidth=measured.read * given.writers if measured and measured.read else None,
        node_mtbf=given.mtbf,
        nodes=given.nodes or 1,
        restart=given.restart,
        batch=given.batch,
    )
    states = plan(job)
    source = bandwidth_source(measured, given.bandwidth) if measured else f"{format_bandwidth(speed)}, by --bandwidth"
    document = json.dumps({"schema": SCHEMA, **as_document(job, states, source)}, indent=2) + "\n"
    write_text(document, given.json_to)
    if given.json_to != "-":
        print_plan(job, states, what, source, given.writers, table_console())
    return 0


def _parameters(size: int | None, model: str | None) -> tuple[float, str]:
    """The number of parameters, and a description of the model."""
    from tunetool.advise.checkpoint import WEIGHTS
    from tunetool.advise.read_model import load_model
    from tunetool.node.units import format_size

    if model is not None and size is None:
        loaded = load_model(model)
        return loaded.numel, f"{loaded.name}: {loaded.numel:,} parameters"
    if size is None or model is not None:
        raise UsageProblem("the model's size must be given exactly once", "give `--model-size 140GB` or `--model 70b`")
    if size < WEIGHTS:
        raise UsageProblem(f"`--model-size {size}` holds no parameter", "such as `140GB` for 70 billion in bf16")
    return size / WEIGHTS, f"{format_size(size)} of weights: {size / WEIGHTS:,.0f} parameters"


def _measured(path: str | None, engine: str | None) -> Measured | None:
    from tunetool import record as records
    from tunetool.advise.checkpoint import measured
    from tunetool.report.runs import find_record
    from tunetool.user_directories import default_runs_dir

    if path is None:
        if engine is not None:
            raise UsageProblem("`--engine` needs `--record`", "give a record of `tunetool bench checkpoint`")
        return None
    return measured(records.read(find_record(path, default_runs_dir())), engine)
