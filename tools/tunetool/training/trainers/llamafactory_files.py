"""What LLaMA-Factory is told: its YAML, DeepSpeed's configuration and a script that starts it."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

import jinja2

from tunetool.training.trainers.deepspeed_config import CLIP, ds_config
from tunetool.training.workload import Workload

TEMPLATES = Path(__file__).resolve().parents[2] / "templates/launch"
SETTINGS, DEEPSPEED, SCRIPT = "llamafactory.yaml", "llamafactory.ds.json", "llamafactory.sh"
OUTPUT, EVENTS = "output", "events"
_CUTOFF = 8192
"""Tokens: more than any sample has, for nothing must be cut off that our own loop sees."""
_ALPHA = 2
_WARM_UP = 0.1


@dataclass(frozen=True)
class Place:
    """Where it is to run, and with what."""

    directory: Path
    """The files lie here, and LLaMA-Factory writes here."""
    nodes: int
    ranks: int
    """Of each node."""
    cuda: bool
    dataset_name: str
    """Of those in dataset_info.json."""
    pixels: int
    """A picture is scaled down to so many."""
    programs: Path | None = None
    """The folder of `llamafactory-cli`; None: PATH has it."""


def render(workload: Workload, place: Place) -> dict[str, str]:
    """The three files, by name."""
    environment = jinja2.Environment(  # noqa: S701  (YAML and a shell script: each value has its own filter)
        loader=jinja2.FileSystemLoader(TEMPLATES), undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    # JSON is YAML, whatever characters a path has.
    environment.filters |= {"json": json.dumps, "sh": lambda value: shlex.quote(str(value)), "real": real}
    directory = place.directory
    settings = environment.get_template(f"{SETTINGS}.j2").render(
        model=workload.model,
        pixels=place.pixels,
        zero_stage=workload.zero_stage,
        full=workload.full,
        lora_rank=workload.lora_rank,
        lora_alpha=_ALPHA * workload.lora_rank,
        deepspeed=str(directory / DEEPSPEED),
        dataset_name=place.dataset_name,
        dataset_dir=workload.dataset,
        cutoff_len=_CUTOFF,
        workers=workload.workers,
        output=str(directory / OUTPUT),
        batch_size=workload.batch_size,
        learning_rate=workload.learning_rate,
        steps=workload.steps,
        epochs=workload.epochs,
        clip=CLIP,
        warm_up=_WARM_UP,
        cuda=place.cuda,
        seed=workload.seed,
    )
    script = environment.get_template(f"{SCRIPT}.j2").render(
        nodes=place.nodes,
        ranks=place.ranks,
        programs=place.programs,
        events=directory / EVENTS,
        settings=directory / SETTINGS,
    )
    return {SETTINGS: settings, DEEPSPEED: json.dumps(deepspeed(workload, place), indent=2) + "\n", SCRIPT: script}


def real(value: float) -> str:
    """As YAML 1.1 reads a float: `1e-05`, without a point, would be a text to it."""
    mantissa, exponent, power = repr(float(value)).partition("e")
    return f"{mantissa}{'' if '.' in mantissa else '.0'}{exponent}{power}"


def deepspeed(workload: Workload, place: Place) -> dict[str, object]:
    """DeepSpeed's configuration, with `auto` for what the YAML says already: transformers refuses a contradiction."""
    found: dict[str, object] = ds_config(workload, place.nodes * place.ranks, place.cuda)
    for name in (
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "train_batch_size",
        "gradient_clipping",
    ):
        found[name] = "auto"
    return found | {"bf16": {"enabled": "auto"}}


def write(workload: Workload, place: Place) -> Path:
    """Render into the place's directory; the script's path. Raises ``OSError``."""
    place.directory.mkdir(parents=True, exist_ok=True)
    for name, text in render(workload, place).items():
        (place.directory / name).write_text(text)
    script = place.directory / SCRIPT
    script.chmod(0o755)
    return script
