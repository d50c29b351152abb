"""``tunetool advise network``: its options, and the call."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from tunetool.cli.output import write_text
from tunetool.errors import UsageProblem
from tunetool.options import shared as options
from tunetool.options.fields import number, option, takes
from tunetool.options.shared import AsJson
from tunetool.options.values import TIME, Value
from tunetool.training import request as training

if TYPE_CHECKING:
    from tunetool.advise.network import WhatIf

SCHEMA = "tunetool.advise.network/1"


def _link(name: str, text: str) -> float:
    from tunetool.node.units import UnitError, parse_link_bandwidth

    try:
        return parse_link_bandwidth(text)
    except UnitError as error:
        raise UsageProblem(f"`{name} {text}`: {error.message}", error.hint) from None


_LINK: Any = Value("rate", _link)


@dataclass(frozen=True)
class Options(AsJson):
    """What `advise network` takes."""

    bandwidth: float = option(
        "--bandwidth",
        type=_LINK,
        required=True,
        metavar="RATE",
        help="Bandwidth of a node's link, such as 1000Mb/s, 400Gb/s (bits, in this option alone) or 50GB/s (bytes).",
    )
    gpus: int = number("--gpus", least=2, required=True, help="Number of GPUs of the whole job.")
    model: str = options.model("Model that is trained", default="7b")
    lora_rank: int = training.lora_rank()
    full: bool = training.full()
    step: float | None = option(
        "--step", type=TIME, metavar="TIME", help="Time of a step on one GPU alone, such as 2s."
    )

    def check(self) -> None:
        """Raises ``UsageProblem``."""
        if self.step == 0:
            raise UsageProblem("`--step 0s` is not above zero", "such as `0.5s`")


@click.command("network")
@takes(Options)
def network(given: Options) -> int:
    """Compute what a network between nodes costs a training step under each ZeRO stage.

    Computes from the model which bytes DeepSpeed sends in a step in bf16, and the time that a node's link takes for
    them. Latency is left out; `bench strategies` measures it, and everything else.

    `--bandwidth` takes bits per second, since networks are sold by them: `b` is a bit, `B` a byte. No other option of
    tunetool takes bits.

    Exit codes: 0 computed; 2 the call was wrong.
    """
    from tunetool.advise.network import answers, as_document
    from tunetool.report.advise_network import print_network
    from tunetool.report.page import table_console

    asked, what = _question(given)
    stages = answers(asked)
    write_text(json.dumps({"schema": SCHEMA, **as_document(asked, what, stages)}, indent=2) + "\n", given.json_to)
    if given.json_to != "-":
        print_network(asked, what, stages, table_console())
    return 0


def _question(given: Options) -> tuple[WhatIf, str]:
    from tunetool.advise.modules import in_full, modules_of, with_lora
    from tunetool.advise.network import STAGES, WhatIf
    from tunetool.advise.qwen2_5_vl import LORA_TARGETS
    from tunetool.advise.read_model import load_model
    from tunetool.bench.strategies.job import zero
    from tunetool.training.workload import Workload

    loaded = load_model(given.model)
    parts = in_full(loaded.tensors) if given.full else with_lora(loaded.tensors, given.lora_rank, LORA_TARGETS)
    if not any(part.trained for part in parts):
        raise UsageProblem(f"LoRA finds no layer in `{given.model}`", "give `--full`")
    tied = not any("lm_head" in tensor.name for tensor in loaded.tensors)
    has_embedding = any(name in tensor.name for tensor in loaded.tensors for name in ("embed_tokens", "wte"))
    settings = {stage: zero(stage, Workload(model="", dataset=""), cuda=True) for stage in STAGES}
    modules = modules_of(parts, tied and has_embedding)
    return WhatIf(modules, given.gpus, given.bandwidth, compute=given.step, zero=settings), loaded.name
