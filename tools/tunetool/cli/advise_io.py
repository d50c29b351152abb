"""``tunetool advise io``: its options, and the call."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tunetool.cli.output import write_text
from tunetool.errors import UsageProblem
from tunetool.options import shared as options
from tunetool.options.fields import number, option, takes
from tunetool.options.shared import AsJson
from tunetool.options.values import SIZE, TEXT, TIME_ABOVE_ZERO

if TYPE_CHECKING:
    from tunetool.advise.io import Asked
    from tunetool.advise.layers import Layers

SCHEMA = "tunetool.advise.io/1"


@dataclass(frozen=True)
class Options(AsJson):
    """What `advise io` takes."""

    model: str = options.model("Model of the job", default="70b")
    tensor: int = number("--tp", default=1, help="Ranks that share each matrix (tensor parallelism).")
    pipeline: int = number("--pp", default=1, help="Stages of layers (pipeline parallelism).")
    data: int = number("--dp", default=1, help="Copies of the model with samples of their own (data parallelism).")
    experts: int = number(
        "--ep", default=1, help="Ranks over which experts are divided, among those of --dp and --fsdp."
    )
    fsdp: int = number("--fsdp", default=1, help="Ranks over which each copy is divided (FSDP, ZeRO-3).")
    of_node: int = number("--gpus-per-node", default=8, help="Number of GPUs of a node.")
    sample: int = option(
        "--sample", type=SIZE, default="16KiB", help="Size of a sample; 16KiB are 4,096 tokens of 4 bytes."
    )
    batch: int | None = number("--batch", help="Samples of one step of the whole job. Default: one for each copy.")
    step: float | None = option("--step", type=TIME_ABOVE_ZERO, help="Time of a training step.")
    record: str | None = option(
        "--record",
        type=TEXT,
        metavar="FILE",
        help="Record of `verify` of a node of the job. Default: published figures of eight Gen5 drives.",
    )
    megatron: str | None = option(
        "--megatron",
        type=TEXT,
        metavar="FILE|-",
        help="File for a script that launches this job by Megatron-LM with asynchronous checkpoints, `-` for standard "
        "output alone; 175b, or a model of the Llama family, without --ep and --fsdp.",
    )


@click.command("io")
@takes(Options)
def io(given: Options) -> int:
    """Compute who reads and writes what: in a step, at the start and at a checkpoint; and which layer limits it.

    Shows for each way the bytes of the busiest rank and node, how often a byte is read or written, and the time at the
    speed of the slowest layer of the node's storage, by the ladder of --record. Then a strategy for each: pre-shard,
    read once and broadcast, double-buffer, expert cache.

    Ranks are numbered as in Megatron: those of --tp are neighbours, those of --pp farthest apart. Nothing is taken to
    come from the page cache, latency is left out. `bench loading` measures reading once against reading everywhere.

    --megatron writes the launch of the job: checkpoints in the format torch_dist, saved while the training goes on.

    Exit codes: 0 computed; 2 the call was wrong.
    """
    from tunetool.advise.io import Asked, as_document, ways
    from tunetool.advise.layout import Layout
    from tunetool.advise.read_model import load_model
    from tunetool.report.advise_io import print_ways
    from tunetool.report.page import table_console

    if given.megatron == "-" == given.json_to:
        raise UsageProblem("`--json -` and `--megatron -` both want standard output", "name a file for one of them")
    layout = Layout(given.tensor, given.pipeline, given.data, given.experts, given.fsdp, given.of_node)
    batch = given.batch or layout.samplers
    if batch % layout.samplers:
        raise UsageProblem(
            f"`--batch {batch}` does not spread evenly over the {layout.samplers} ranks of `--dp` and `--fsdp`",
            f"give a multiple of {layout.samplers}",
        )
    asked = Asked(load_model(given.model), layout, given.sample, batch, given.step)
    layout.check(asked.model)
    if given.megatron is not None:
        write_text(_launch(given, asked), given.megatron)
    layers = _layers(given.record)
    found = ways(asked, layers)
    write_text(json.dumps({"schema": SCHEMA, **as_document(asked, layers, found)}, indent=2) + "\n", given.json_to)
    if "-" not in (given.json_to, given.megatron):
        print_ways(asked, layers, found, table_console())
    return 0


def _launch(given: Options, asked: Asked) -> str:
    from tunetool.advise.megatron import PRESETS, Job, gpt_3, script
    from tunetool.advise.read_model import load_config, load_decoder

    decoder = gpt_3(given.model) or load_decoder(given.model)
    known = PRESETS.get(given.model)
    config, path = (known, given.model) if known is not None else load_config(Path(given.model))
    return script(Job(asked.model.name, decoder, config, path, asked.layout, asked.sample, asked.batch))


def _layers(path: str | None) -> Layers:
    from tunetool import record as records
    from tunetool.advise.layers import of_record, published
    from tunetool.report.runs import find_record
    from tunetool.user_directories import default_runs_dir

    return published() if path is None else of_record(records.read(find_record(path, default_runs_dir())))
