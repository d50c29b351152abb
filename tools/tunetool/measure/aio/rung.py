"""The DeepSpeed rung of ``verify``: short, left out where there is no DeepSpeed, judged only when it is required."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tunetool.errors import CannotJudge
from tunetool.measure.aio.driver import Outcome, run
from tunetool.measure.aio.figures import measurements, unproven
from tunetool.measure.aio.ops import Probe, need, probe
from tunetool.measure.aio.spec import Spec, default_io_bytes, default_parallelism
from tunetool.measure.progress import Progress
from tunetool.measure.sequential import FEWEST, free_bytes
from tunetool.node.common.training_part import OP_READY
from tunetool.node.machine.block_stack import BlockStack
from tunetool.node.machine.memory import memory_total
from tunetool.node.units import format_size
from tunetool.record import CheckResult, CheckStatus, Measurement
from tunetool.training_python import TrainingPython

CHECK_ID = "deepspeed.io"
OP = "async_io"
SAMPLE_SECONDS = 0.5
SAMPLE_SHARE = 0.125
"""Share of fio's sample duration: the rung must add little to a verification that ends within 90 s."""
START_SECONDS = 8
"""torch's import, the buffer, the layout, the read-back."""

_EXPECTED = "DeepSpeed's own handle writes and reads what it claims"


@dataclass(frozen=True)
class Rung:
    """Whether DeepSpeed's rung will be measured, and how."""

    python: Path
    seconds: float
    required: bool
    installed: Probe | None = None
    missing: str = ""
    """Why the rung is left out; None if it is not."""
    remedy: str = ""

    def announcement(self) -> str:
        """What the rung will do, for how long, in a line."""
        if self.installed is None:
            return f"DeepSpeed's rung is left out: {self.missing}" + (f"; {self.remedy}" if self.remedy else "")
        total = 2 * FEWEST * self.seconds + START_SECONDS
        return (
            f"then DeepSpeed's `aio_handle` ({self.installed.deepspeed}): a file of at most {format_size(2**30)}, "
            f"{FEWEST} writes and {FEWEST} reads of {self.seconds:g} s, about {total:.0f} s"
        )


@dataclass
class Result:
    """The rung's check, figures and raw files."""

    check: CheckResult
    measurements: list[Measurement] = field(default_factory=list)
    raw: dict[str, str] = field(default_factory=dict)


def prepare(
    python: Path,
    duration: float,
    required: Sequence[str],
    environment: Mapping[str, str],
    chosen: TrainingPython | None = None,
) -> Rung:
    """Check whether ``python`` has torch, DeepSpeed and its op. Compiles nothing.

    ``chosen``: how it was chosen. What a manifest promises is required: where it is not there any more, that is no
    reason to leave it out.
    """
    op = chosen.training.ops.get(OP, "") if chosen is not None and chosen.training is not None else ""
    seconds = min(SAMPLE_SECONDS, duration * SAMPLE_SHARE)
    rung = Rung(python, seconds, "deepspeed" in required or op == OP_READY)
    try:
        if chosen is not None:
            chosen.need()
        installed = probe(python, environment)
        need(installed, OP)
    except CannotJudge as error:
        why = f" ({op})" if op.startswith("missing") else ""
        return replace(rung, missing=error.message + why, remedy=error.hint or "")
    return replace(rung, installed=installed)


def measure(
    rung: Rung,
    stack: BlockStack,
    directory: Path,
    bandwidth: float,
    environment: Mapping[str, str],
    progress: Progress,
) -> Result:
    """Measure inside the run's directory. ``bandwidth`` is fio's, by which the file is sized."""
    if rung.installed is None:
        return Result(_check(rung, rung.missing, rung.remedy))
    parallelism = default_parallelism(os.cpu_count() or 1)
    size = default_io_bytes(free_bytes(directory), memory_total(), parallelism, bandwidth)
    spec = Spec(directory, size, intra_op_parallelism=parallelism, python=rung.python, seconds=rung.seconds)
    outcome = Outcome()
    try:
        run(spec, stack, environment, progress, outcome, rung.installed)
        check = _conclude(rung, spec, stack, outcome)
    except CannotJudge as error:
        # What was measured before it failed is not shown: a handle that fails later did not do it right before.
        return Result(_check(rung, error.message, error.hint or ""), raw=_raw(outcome))
    finally:
        spec.file.unlink(missing_ok=True)
    return Result(check, measurements(spec, stack, outcome), _raw(outcome))


def _conclude(rung: Rung, spec: Spec, stack: BlockStack, outcome: Outcome) -> CheckResult:
    reasons = unproven(spec, stack, outcome)
    if reasons:
        return _check(rung, next(iter(reasons.values())), "")
    moved = sum(each.claimed_bytes for samples in outcome.samples.values() for each in samples)
    proof = f"{format_size(moved)} moved and counted, {format_size(spec.io_bytes)} read back and equal"
    return CheckResult(id=CHECK_ID, status="pass", expected=_EXPECTED, found=proof)


def _check(rung: Rung, found: str, remedy: str) -> CheckResult:
    status: CheckStatus = "unknown" if rung.required else "skip"
    return CheckResult(id=CHECK_ID, status=status, expected=_EXPECTED, found=found, remedy=remedy)


def _raw(outcome: Outcome) -> dict[str, str]:
    return {"deepspeed.txt": outcome.messages} if outcome.messages else {}
