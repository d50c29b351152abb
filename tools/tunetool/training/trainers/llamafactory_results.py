"""The figures of a LLaMA-Factory run, from the files that it wrote; a figure that it does not write is not guessed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from tunetool.errors import CannotJudge
from tunetool.training.rank.events import NoTensorBoard, read_scalars
from tunetool.training.trainers.llamafactory_files import EVENTS, LOGS, OUTPUT, VARIABLE

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
