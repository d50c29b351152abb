"""``tunetool advise``: compute what a job needs before anything is bought, written or run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
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
    from tunetool.advise.drive_life import Drives
    from tunetool.advise.node_loss import Copies
    from tunetool.inspect.model import Inspection

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
    shared: float | None = option(
        "--shared",
        type=BANDWIDTH,
        help="Speed at which shared storage takes the drains of all nodes together. With it, the answer says what the "
        "loss of one node costs.",
    )
    network: float | None = option(
        "--network", type=BANDWIDTH, help="Speed of a node's link to the node that keeps its replicas."
    )
    drives: int | None = number("--drives", help="Number of data drives of a node.")
    drive_size: int | None = option("--drive-size", type=SIZE, help="Size of one data drive.")
    inspection: str | None = option(
        "--inspection",
        type=TEXT,
        metavar="FILE",
        help="What `tunetool inspect --json FILE` wrote on a node: number, size and wear of its data drives.",
    )
    dwpd: float | None = option(
        "--dwpd", type=float, metavar="N", help="Rating of a drive in drive writes a day, from its data sheet."
    )
    tbw: int | None = option(
        "--tbw", type=SIZE, help="Rating of a drive in bytes written, such as 14TB, from its data sheet."
    )
    warranty: float = option(
        "--warranty", type=TIME_ABOVE_ZERO, default="1825d", help="Warranty of the drives, for which --dwpd counts."
    )


@command.command("checkpoint")
@takes(CheckpointOptions)
def checkpoint(given: CheckpointOptions) -> int:
    """Compute how often to save: by a rule of thumb, and by Young's and Daly's optimum, for weights and full state.

    \b
    rule of thumb  save every --rework, or less often where writing would take more than 5 % of the time
    Young, Daly    least time lost to checkpoints, rework and restarts together (both need --mtbf)

    \b
    With --shared: what the loss of one node costs, and how often to drain; with --network too, what replicas on another
    node save. With --dwpd or --tbw: how long the drives last by their rating.

    Exit codes: 0 computed; 2 the call was wrong.
    """
    from tunetool.advise.checkpoint import Job, bandwidth_source, plan
    from tunetool.advise.drive_life import guard
    from tunetool.node.units import format_bandwidth
    from tunetool.report.advise import as_document, print_guarded, print_plan
    from tunetool.report.page import table_console

    parameters, what = _parameters(given.model_size, given.model)
    measured = _measured(given.record, given.engine)
    speed = measured.write if measured else given.bandwidth
    if speed is None:
        raise UsageProblem(
            "the speed of writing a checkpoint is missing", "give `--bandwidth 10GBps` or `--record FILE`"
        )
    if given.nodes is not None and given.mtbf is None and given.shared is None:
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
    guarded = guard(job, states, _copies(given), _drives(given))
    source = bandwidth_source(measured, given.bandwidth) if measured else f"{format_bandwidth(speed)}, by --bandwidth"
    document = json.dumps({"schema": SCHEMA, **as_document(job, states, source, guarded)}, indent=2) + "\n"
    write_text(document, given.json_to)
    if given.json_to != "-":
        console = table_console()
        print_plan(job, states, what, source, given.writers, console)
        print_guarded(job, states, guarded, console)
    return 0


def _copies(given: CheckpointOptions) -> Copies | None:
    from tunetool.advise.node_loss import Copies

    if given.shared is None:
        if given.network is not None or given.dwpd is not None or given.tbw is not None:
            raise UsageProblem(
                "the speed of shared storage is missing", "add `--shared 2GBps`: what is drained limits what is lost"
            )
        return None
    return Copies(given.shared, given.network, given.writers if given.writers > 1 else given.nodes or 1)


def _drives(given: CheckpointOptions) -> Drives | None:
    from tunetool.advise.drive_life import Drives, in_inspection, rated_bytes

    if given.dwpd is None and given.tbw is None:
        if given.drives is not None or given.drive_size is not None or given.inspection is not None:
            raise UsageProblem("the drives' rating is missing", "add `--dwpd` or `--tbw` from their data sheet")
        return None
    if given.dwpd is not None and given.tbw is not None:
        raise UsageProblem("`--dwpd` and `--tbw` are two ratings", "give the one of the data sheet")
    if given.dwpd is not None and not 0 < given.dwpd < float("inf"):
        raise UsageProblem(f"`--dwpd {given.dwpd}` is not above zero", "give a number such as 1")
    if given.tbw == 0 or given.drive_size == 0:
        raise UsageProblem("a rating or a size of 0 bytes is none", "give those of the data sheet")
    count, size, used = given.drives, given.drive_size, None
    if given.inspection is not None:
        seen, smallest, used = in_inspection(_inspection(given.inspection))
        count, size = count or seen, size or smallest
    if count is None or (given.dwpd is not None and size is None):
        raise UsageProblem(
            "the number or the size of the drives is missing", "add `--drives 8 --drive-size 3.84TB`, or `--inspection`"
        )
    rated = float(given.tbw) if given.tbw is not None else rated_bytes(given.dwpd or 0, size or 0, given.warranty)
    return Drives(count, size, rated, used, given.warranty)


def _inspection(path: str) -> Inspection:
    from pydantic import ValidationError

    from tunetool.inspect.model import Inspection
    from tunetool.regular_files import read_bytes

    try:
        return Inspection.model_validate_json(read_bytes(Path(path)))
    except OSError as error:
        raise UsageProblem(f"`{path}` cannot be read: {error.strerror}", "name a file of `tunetool inspect`") from None
    except ValidationError:
        raise UsageProblem(
            f"`{path}` is no inspection of a node", "write it by `tunetool inspect --json FILE`"
        ) from None


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
