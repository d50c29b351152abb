"""What LLaMA-Factory left behind, as figures. Its own files alone: no figure is guessed that it does not give."""

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
from tunetool.training.trainers.llamafactory_files import EVENTS, OUTPUT

_ERROR = re.compile(r"^(?:\[rank\d+\]:\s*)?((?:\w+\.)*\w*(?:Error|Exception)\b:.*)$", re.MULTILINE)
_REPORTS = ("ChildFailedError", "CalledProcessError")
"""What those say who started the process that failed."""
_PARAMETERS = re.compile(r"trainable params: ([\d,]+) \|\| all params: ([\d,]+)")


@dataclass(frozen=True)
class Outcome:
    """Of all ranks together."""

    seconds: float
    """From the first batch to the last step (train_runtime)."""
    losses: list[float]
    """Of each step; mean over the ranks."""
    learning_rates: list[float]
    step_seconds: list[float]
    """From one step's end to the next one's, its wait for data included."""
    ends: list[float]
    """Of the steps, by the wall clock of the first node."""
    tokens: int
    samples: int
    parameters: int
    trainable: int


def read_outcome(directory: Path, log: str) -> Outcome:
    """From ``directory``, where its files were rendered, and what it printed. Raises ``CannotJudge``."""
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
    """``points`` are TensorBoard's of the loss: step, wall clock, value. ``began``: when its file was opened.

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
            "is `tensorboard` installed beside it?",
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
    )


def last_error(log: str) -> str:
    """Why it failed, in one line."""
    errors = [line for line in _ERROR.findall(log) if not line.partition(":")[0].endswith(_REPORTS)]
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return str((errors or lines or ["it said nothing"])[-1])


def _json(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CannotJudge(f"LLaMA-Factory left no results: `{path}`: {error}", "see its log") from None
    return found if isinstance(found, dict) else {}
