"""DeepSpeed's handles as rungs: to pinned memory at every level of ``verify``, and to HBM on the ladder.

The rung of pinned memory is short, left out where there is no DeepSpeed, and judged only when it is required; the
ladder takes its figures over.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from tunetool.errors import CannotJudge
from tunetool.measure import aio
from tunetool.measure.aio.ops import Probe, probe
from tunetool.measure.gds.counters import remedies
from tunetool.measure.ladder.budget import SAMPLES
from tunetool.measure.ladder.rung import Context, Result, Rung, Skip
from tunetool.measure.sequential import FEWEST, Plan, free_bytes
from tunetool.measure.worker import Failed, Missing
from tunetool.node.common.training_part import OP_READY
from tunetool.node.gds.facts import read_gds_facts
from tunetool.node.gds.path_choice import current
from tunetool.node.machine.block_stack import BlockStack
from tunetool.node.machine.memory import memory_total
from tunetool.node.units import format_size
from tunetool.record import CheckResult, CheckStatus
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
class PinnedHandle(Rung):
    """DeepSpeed's handle to pinned memory: whether it will be measured, and how."""

    python: Path
    sample_seconds: float
    required: bool
    needs_direct_io: ClassVar[bool] = False
    name: str = "DeepSpeed's rung"
    installed: Probe | None = None
    missing: str = ""
    """Why the rung is left out; None if it is not."""
    remedy: str = ""

    def announcement(self, shape: Plan) -> Sequence[str]:
        """What the rung will do, for how long, in a line."""
        if self.installed is None:
            return [f"DeepSpeed's rung is left out: {self.missing}" + (f"; {self.remedy}" if self.remedy else "")]
        return [
            f"then DeepSpeed's `aio_handle` ({self.installed.deepspeed}): a file of at most {format_size(2**30)}, "
            f"{FEWEST} writes and {FEWEST} reads of {self.sample_seconds:g} s, about {self.seconds(shape, 0):.0f} s"
        ]

    def seconds(self, shape: Plan, drives: int) -> float:
        """About how long it takes."""
        return 2 * FEWEST * self.sample_seconds + START_SECONDS if self.installed is not None else 0.0

    def run(self, context: Context) -> Result:
        """A check, and a figure for each direction. A handle that fails is no error of the run: its check says it."""
        if self.installed is None:
            return self._no_figures(self.missing, self.remedy)
        spec = _spec(context, context.slowest, python=self.python, seconds=self.sample_seconds)
        try:
            outcome = _measure(spec, context, self.installed, "deepspeed.txt")
            check = self._conclude(spec, context.stack, outcome)
        except CannotJudge as error:
            # What was measured before it failed is not shown: a handle that fails later did not do it right before.
            return self._no_figures(error.message, error.hint or "")
        return Result(aio.measurements(spec, context.stack, outcome), checks=[check])

    def _conclude(self, spec: aio.Spec, stack: BlockStack, outcome: aio.Outcome) -> CheckResult:
        reasons = aio.unproven(spec, stack, outcome)
        if reasons:
            return self._check(next(iter(reasons.values())), "")
        moved = sum(each.claimed_bytes for samples in outcome.samples.values() for each in samples)
        proof = f"{format_size(moved)} moved and counted, {format_size(spec.io_bytes)} read back and equal"
        return CheckResult(id=CHECK_ID, status="pass", expected=_EXPECTED, found=proof)

    def covers(self) -> Sequence[str]:
        """Both directions."""
        return _names("cpu")

    def _no_figures(self, found: str, remedy: str) -> Result:
        return Result(checks=[self._check(found, remedy)], skipped=dict.fromkeys(self.covers(), found))

    def _check(self, found: str, remedy: str) -> CheckResult:
        status: CheckStatus = "unknown" if self.required else "skip"
        return CheckResult(id=CHECK_ID, status=status, expected=_EXPECTED, found=found, remedy=remedy)


def prepare(
    python: Path,
    duration: float,
    required: Sequence[str],
    environment: Mapping[str, str],
    chosen: TrainingPython | None = None,
) -> PinnedHandle:
    """Check whether ``python`` has torch, DeepSpeed and its op. Compiles nothing.

    ``chosen``: how it was chosen. What a manifest promises is required: where it is not there any more, that is no
    reason to leave it out.
    """
    op = chosen.training.ops.get(OP, "") if chosen is not None and chosen.training is not None else ""
    seconds = min(SAMPLE_SECONDS, duration * SAMPLE_SHARE)
    rung = PinnedHandle(python, seconds, "deepspeed" in required or op == OP_READY)
    try:
        if chosen is not None:
            chosen.need()
        installed = probe(python, environment)
        aio.need(installed, OP)
    except CannotJudge as error:
        why = f" ({op})" if op.startswith("missing") else ""
        return replace(rung, missing=error.message + why, remedy=error.hint or "")
    return replace(rung, installed=installed)


DEVICES: dict[aio.Device, str] = {
    "cpu": "aio_handle pinned",
    "cuda": "aio_handle HBM bounce",
    "gds": "gds_handle HBM",
}
_START = 10.0
"""torch's import, the buffer, the layout, the read-back."""


def _names(device: aio.Device) -> list[str]:
    return [aio.name(device, "read"), aio.name(device, "write")]


def _spec(context: Context, bandwidth: float, **settings: Any) -> aio.Spec:
    """A file that takes about a sample's time at ``bandwidth``, and as many threads as suit the machine."""
    parallelism = aio.default_parallelism(os.cpu_count() or 1)
    size = aio.default_io_bytes(free_bytes(context.directory), memory_total(), parallelism, bandwidth)
    return aio.Spec(context.directory, size, intra_op_parallelism=parallelism, **settings)


def _measure(spec: aio.Spec, context: Context, installed: Probe, raw: str) -> aio.Outcome:
    """Write and read the file; ``raw`` gets what the child said. Raises ``CannotJudge``."""
    outcome = aio.Outcome()
    try:
        aio.run(spec, context.stack, context.environment, context.sampler.progress, outcome, installed)
    finally:
        spec.file.unlink(missing_ok=True)
        if outcome.messages:
            context.sampler.raw[raw] = outcome.messages
    return outcome


@dataclass(frozen=True)
class Handle(Rung):
    """DeepSpeed's handle to one kind of memory."""

    device: aio.Device

    @property
    def name(self) -> str:
        """For people."""
        return DEVICES[self.device]

    def covers(self) -> Sequence[str]:
        """Both directions."""
        return _names(self.device)

    def seconds(self, shape: Plan, drives: int) -> float:
        """About how long it takes."""
        return 2 * SAMPLES * shape.duration + _START

    def has_a_say(self, context: Context) -> bool:
        """Only where it is required, as the handle to pinned memory."""
        return context.require_deepspeed

    def run(self, context: Context) -> Result:
        """A figure for each direction. Raises ``Skip``, or ``Failed`` for a handle that does not do what it says."""
        try:
            installed = context.probe()
            aio.need(installed, "gds" if self.device == "gds" else "async_io")
        except Missing as error:
            raise Skip(error.message + (f"; {error.hint}" if error.hint else "")) from None
        if not installed.cuda:
            raise Skip(f"the torch of `{context.python}` sees no GPU")
        spec = _spec(
            context,
            context.written,
            device=self.device,
            python=context.python,
            samples=SAMPLES,
            seconds=context.shape.duration,
        )
        try:
            outcome = _measure(spec, context, installed, f"deepspeed-{self.device}.txt")
        except Failed as error:
            raise Failed(error.message, self._hint(context) or error.hint, raw=error.raw) from None
        return Result(aio.measurements(spec, context.stack, outcome), aio.unproven(spec, context.stack, outcome))

    def _hint(self, context: Context) -> str:
        """What blocks cuFile on this volume, if the handle needs cuFile."""
        if self.device != "gds":
            return ""
        mount = context.stack.mount
        return remedies(current(read_gds_facts("/", mount.mount_point if mount else None)))
