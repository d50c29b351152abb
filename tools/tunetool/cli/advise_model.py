"""``tunetool advise model``: its options, and the call."""

from __future__ import annotations

import json
from dataclasses import dataclass

import click

from tunetool.cli.output import write_text
from tunetool.errors import UsageProblem
from tunetool.options.fields import argument, number, option, takes
from tunetool.options.shared import AsJson
from tunetool.options.values import SIZE, TEXT, TIME_ABOVE_ZERO, TOLERANCE

SCHEMA = "tunetool.advise.model/1"
STAGES = ("0", "1", "2", "3")
OFFLOADS = ("none", "cpu", "nvme-optimizer", "nvme")


@dataclass(frozen=True)
class Options(AsJson):
    """What `advise model` takes."""

    model: str = argument("MODEL", type=TEXT)
    gpus: int = number("--gpus", default=8, help="Number of GPUs of the whole job.")
    nodes: int = number("--nodes", default=1, help="Number of nodes.")
    stage: str | None = option("--stage", type=click.Choice(STAGES), help="Only this ZeRO stage.")
    offload: str | None = option(
        "--offload",
        type=click.Choice(OFFLOADS),
        help="Only this offload. cpu: optimizer and parameters in the node's memory; nvme-optimizer: the optimizer on "
        "NVMe; nvme: both on NVMe.",
    )
    save_in: float | None = option(
        "--save-in", type=TIME_ABOVE_ZERO, help="Time in which a checkpoint must be written, instead of the next two."
    )
    save_every: float = option(
        "--save-every", type=TIME_ABOVE_ZERO, default="30min", help="Time from one checkpoint to the next."
    )
    save_share: float = option(
        "--save-share", type=TOLERANCE, default="5%", help="Share of that time which writing may take."
    )
    keep: int = number("--keep", least=0, default=1, help="Number of full checkpoints that stay on the nodes' NVMe.")
    step: float | None = option(
        "--step", type=TIME_ABOVE_ZERO, help="Time of a training step, in which swapping to NVMe must be done."
    )
    micro_batches: int = number("--micro-batches", default=1, help="Micro batches of a step on each GPU.")
    gpu_memory: int | None = option("--gpu-memory", type=SIZE, help="Memory of a GPU, such as 80GB: says what fits.")
    memory: int | None = option("--memory", type=SIZE, help="Memory of each node of the job: says what fits.")
    nvme_space: int | None = option("--nvme-space", type=SIZE, help="NVMe of each node of the job: says what fits.")

    def check(self) -> None:
        """Raises ``UsageProblem``."""
        if self.gpus % self.nodes:
            raise UsageProblem(
                f"`--gpus {self.gpus}` do not spread evenly over `--nodes {self.nodes}`",
                "`--gpus` counts the GPUs of all nodes together",
            )
        if not self.save_share:
            raise UsageProblem("`--save-share 0%` leaves no time to write", "such as `5%`")


@click.command("model")
@takes(Options)
def model(given: Options) -> int:
    """Compute what a model needs under each ZeRO stage and offload: memory, NVMe, bandwidth, checkpoints.

    MODEL is a config.json, a directory with it or with safetensors files, or a name: 3b, 7b, tiny (Qwen2.5-VL), 70b
    (Llama 3.1), 13b, llama2-7b and llama-tiny (Llama 2), 33b and 65b (LLaMA), phi3-mini, 175b (GPT-3), mixtral-8x7b.
    Models with experts count: the parameters that a token uses are shown too.

    Counts weights, gradients and Adam's states of training in bf16 or fp16. Activations, buffers and the allocator's
    gaps come on top, so that what is said to fit may still not fit. `ds-config` computes the buffers of one kind.

    Exit codes: 0 computed; 2 the call was wrong.
    """
    from tunetool.advise.needs import Machines, Saving, as_document, needs
    from tunetool.advise.read_model import load_model
    from tunetool.report.advise_model import print_needs
    from tunetool.report.page import table_console

    loaded = load_model(given.model)
    machines = Machines(given.gpus, given.nodes, given.gpu_memory, given.memory, given.nvme_space)
    seconds = given.save_in or given.save_every * given.save_share
    saving = Saving(seconds, given.keep, given.step, given.micro_batches)
    found = [
        each
        for each in needs(loaded, machines, saving)
        if given.stage in (None, str(each.strategy.stage)) and given.offload in (None, each.strategy.offload)
    ]
    if not found:
        raise UsageProblem(
            f"`--stage {given.stage}` has no `--offload {given.offload}`", "offload goes with `--stage 3`"
        )
    document = {"schema": SCHEMA, **as_document(loaded, found, machines, saving)}
    write_text(json.dumps(document, indent=2) + "\n", given.json_to)
    if given.json_to != "-":
        print_needs(loaded, found, machines, saving, table_console())
    return 0
