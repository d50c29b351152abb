"""The files of a LLaMA-Factory run: its YAML, DeepSpeed's configuration, a script that starts it; and what it leaves.

``read_outcome`` takes the figures from the files that it wrote; a figure that it does not write is not guessed.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2

from tunetool.advise.precision import FP16, Format
from tunetool.errors import CannotJudge
from tunetool.training.rank.curve_files import NoTensorBoard, read_scalars
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


_ERROR = re.compile(r"^(?:\[rank\d+\]:\s*)?((?:\w+\.)*\w*(?:Error|Exception)\b:.*)$", re.MULTILINE)
_REPORTS = ("ChildFailedError", "CalledProcessError")
"""Errors of the parents of the process that failed."""
_OVERFLOW = re.compile(r"\[deepspeed\] OVERFLOW! .*?Skipping step", re.IGNORECASE)
_PARAMETERS = re.compile(r"trainable params: ([\d,]+) \|\| all params: ([\d,]+)")


@dataclass(frozen=True)
class Outcome:
    """The figures of all ranks together."""

    seconds: float
    """Seconds from the first batch to the last step (train_runtime)."""
    losses: list[float]
    """The loss of each step, as the mean over the ranks."""
    learning_rates: list[float]
    step_seconds: list[float]
    """Seconds from one step's end to the next one's, with its wait for data."""
    ends: list[float]
    """The end of each step by the wall clock of the first node."""
    tokens: int
    samples: int
    parameters: int
    trainable: int
    overflows: int = 0
    """Updates that loss scaling skipped, as far as DeepSpeed logged them: it does at its level INFO only."""


def read_outcome(directory: Path, log: str) -> Outcome:
    """Read the figures from the run's ``directory`` and its ``log``. Raises ``CannotJudge`` where some are missing."""
    state = _json(directory / OUTPUT / "trainer_state.json")
    results = _json(directory / OUTPUT / "all_results.json")
    try:
        began, scalars = read_scalars(directory / EVENTS)
    except NoTensorBoard as error:
        raise CannotJudge(f"LLaMA-Factory's times cannot be read: {error}") from None
    return outcome(state, results, began, scalars.get("train/loss", []), log)


def outcome(
    state: Mapping[str, Any],
    results: Mapping[str, Any],
    began: float,
    points: Sequence[tuple[int, float, float]],
    log: str,
) -> Outcome:
    """Combine the figures. ``points``: the loss in TensorBoard (step, wall clock, value); ``began``: when its file was
    opened.

    Raises ``CannotJudge`` where something is missing. Pure.
    """
    try:
        steps = [entry for entry in state["log_history"] if "loss" in entry]
        seconds = float(results["train_runtime"])
        samples = round(float(results["train_samples_per_second"]) * seconds)
        losses = [float(entry["loss"]) for entry in steps]
        rates = [float(entry["learning_rate"]) for entry in steps]
        tokens = int(state["num_input_tokens_seen"])
    except (KeyError, TypeError, ValueError) as error:
        raise CannotJudge(f"LLaMA-Factory's results lack {error}", "this version reads those of 0.9.5") from None
    if not losses or len(points) != len(losses):
        raise CannotJudge(
            f"LLaMA-Factory logged {len(losses)} steps and wrote {len(points)} of them to TensorBoard",
            "is `tensorboard` installed in its environment?",
        )
    ends = [began, *(at for _, at, _ in points)]
    counted = _PARAMETERS.findall(log)
    trainable, parameters = (int(number.replace(",", "")) for number in counted[-1]) if counted else (0, 0)
    return Outcome(
        seconds=seconds,
        losses=losses,
        learning_rates=rates,
        step_seconds=[after - before for before, after in pairwise(ends)],
        ends=ends[1:],
        tokens=tokens,
        samples=samples,
        parameters=parameters,
        trainable=trainable,
        overflows=len(_OVERFLOW.findall(log)),
    )


def last_error(log: str) -> str:
    """The reason of the failure in one line: the last error in the log, or else its last line."""
    errors = [line for line in _ERROR.findall(log) if not line.partition(":")[0].endswith(_REPORTS)]
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return str((errors or lines or ["the log is empty"])[-1])


def cure(log: str) -> str:
    """What to do about a failure, by the log."""
    if "No module named" in log or "ImportError" in log:
        return f"a package is missing in LLaMA-Factory's environment ({VARIABLE})"
    if "AF_UNIX path too long" in log:
        return "its processes make sockets in the temporary directory: set TMPDIR to a short path such as `/tmp`"
    return f"its whole log is in `{LOGS}/` beside the record"


def _json(path: Path) -> Mapping[str, Any]:
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CannotJudge(f"LLaMA-Factory left no results: `{path}`: {error}", "see its log") from None
    return document if isinstance(document, dict) else {}
