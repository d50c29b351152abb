"""The files for LLaMA-Factory: its YAML, DeepSpeed's configuration, and a script that starts it."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

import jinja2

from tunetool.advise.precision import FP16, Format
from tunetool.training.trainers.deepspeed_config import CLIP, ds_config
from tunetool.training.workload import Workload

TEMPLATES = Path(__file__).resolve().parents[2] / "templates/launch"
SETTINGS, DEEPSPEED, SCRIPT = "llamafactory.yaml", "llamafactory.ds.json", "llamafactory.sh"
OUTPUT, EVENTS = "output", "events"
LOG, LOGS = "llamafactory.log", "llamafactory"
"""Its log in the rank's directory, and where the logs are kept beside the record."""
VARIABLE = "TUNETOOL_LLAMAFACTORY"
"""Environment variable with the directory of LLaMA-Factory's virtual environment, or the program, on each node."""
_CUTOFF = 8192
"""Limit in tokens, above the length of any sample, so that no sample is truncated."""
_ALPHA = 2
_WARM_UP = 0.1


@dataclass(frozen=True)
class RunFiles:
    """The directory of one LLaMA-Factory run, and the values that its files need besides the workload."""

    directory: Path
    """Directory of the files and of LLaMA-Factory's output."""
    nodes: int
    ranks: int
    """Ranks per node."""
    cuda: bool
    dataset_name: str
    """A name in dataset_info.json."""
    pixels: int
    """Pictures are scaled down to this."""
    precision: Format = "bf16"
    """On GPUs; a CPU computes in fp32."""
    programs: Path | None = None
    """The directory of `llamafactory-cli`; None: it is on PATH."""


def render(workload: Workload, run_files: RunFiles) -> dict[str, str]:
    """The texts of the three files, by name."""
    environment = jinja2.Environment(  # noqa: S701  (YAML and a shell script: each value has its own filter)
        loader=jinja2.FileSystemLoader(TEMPLATES), undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    # A JSON string is valid YAML, whatever characters a path has.
    environment.filters |= {"json": json.dumps, "sh": lambda value: shlex.quote(str(value)), "real": real}
    directory = run_files.directory
    settings = environment.get_template(f"{SETTINGS}.j2").render(
        model=workload.model,
        pixels=run_files.pixels,
        zero_stage=workload.zero_stage,
        full=workload.full,
        lora_rank=workload.lora_rank,
        lora_alpha=_ALPHA * workload.lora_rank,
        deepspeed=str(directory / DEEPSPEED),
        dataset_name=run_files.dataset_name,
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
        cuda=run_files.cuda,
        precision=run_files.precision,
        seed=workload.seed,
    )
    script = environment.get_template(f"{SCRIPT}.j2").render(
        nodes=run_files.nodes,
        ranks=run_files.ranks,
        programs=run_files.programs,
        events=directory / EVENTS,
        directory=directory,
        settings=SETTINGS,
    )
    return {SETTINGS: settings, DEEPSPEED: json.dumps(deepspeed(workload, run_files), indent=2) + "\n", SCRIPT: script}


def real(value: float) -> str:
    """A float as YAML 1.1 reads it, with a point: `1e-05` would be a string."""
    mantissa, exponent, power = repr(float(value)).partition("e")
    return f"{mantissa}{'' if '.' in mantissa else '.0'}{exponent}{power}"


def deepspeed(workload: Workload, run_files: RunFiles) -> dict[str, object]:
    """DeepSpeed's configuration, with `auto` for the values in the YAML: transformers refuses a mismatch."""
    fp16 = run_files.precision == "fp16"
    config: dict[str, object] = ds_config(workload, run_files.nodes * run_files.ranks, run_files.cuda, fp16)
    for name in (
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "train_batch_size",
        "gradient_clipping",
    ):
        config[name] = "auto"
    scaling = {"fp16": {**FP16, "enabled": "auto"}} if fp16 else {}
    return config | {"bf16": {"enabled": "auto"}} | scaling


def write(workload: Workload, run_files: RunFiles) -> Path:
    """Write the files to ``run_files.directory`` and return the script's path. Raises ``OSError``."""
    run_files.directory.mkdir(parents=True, exist_ok=True)
    for name, text in render(workload, run_files).items():
        (run_files.directory / name).write_text(text)
    script = run_files.directory / SCRIPT
    script.chmod(0o755)
    return script
