"""DeepSpeed's handles between the file system and HBM: the one adapter between the ladder and ``measure.aio``.

The handle to pinned memory is measured at every level (``pinned_handle``); the ladder takes its figures over.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from tunetool.measure import aio
from tunetool.measure.gds.judge import remedies
from tunetool.measure.ladder.budget import SAMPLES
from tunetool.measure.ladder.rung import Context, Result, Rung, Skip
from tunetool.measure.sequential import Plan, free_bytes
from tunetool.measure.worker import Failed, Missing
from tunetool.node.gds.facts import read_gds_facts
from tunetool.node.gds.path_choice import current
from tunetool.node.machine.memory import memory_total

DEVICES: dict[aio.Device, str] = {
    "cpu": "aio_handle pinned",
    "cuda": "aio_handle HBM bounce",
    "gds": "gds_handle HBM",
}
PINNED = tuple(aio.name("cpu", direction) for direction in ("read", "write"))
_START = 10.0
"""torch's import, the buffer, the layout, the read-back."""


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
        return [aio.name(self.device, "read"), aio.name(self.device, "write")]

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
        parallelism = aio.default_parallelism(os.cpu_count() or 1)
        spec = aio.Spec(
            directory=context.directory,
            io_bytes=aio.default_io_bytes(free_bytes(context.directory), memory_total(), parallelism, context.written),
            device=self.device,
            intra_op_parallelism=parallelism,
            python=context.python,
            samples=SAMPLES,
            seconds=context.shape.duration,
        )
        outcome = aio.Outcome()
        try:
            aio.run(spec, context.stack, context.environment, context.sampler.progress, outcome, installed)
        except Failed as error:
            raise Failed(error.message, self._hint(context) or error.hint, raw=error.raw) from None
        finally:
            spec.file.unlink(missing_ok=True)
            if outcome.messages:
                context.sampler.raw[f"deepspeed-{self.device}.txt"] = outcome.messages
        return Result(aio.measurements(spec, context.stack, outcome), aio.unproven(spec, context.stack, outcome))

    def _hint(self, context: Context) -> str:
        """What blocks cuFile on this volume, if the handle needs cuFile."""
        if self.device != "gds":
            return ""
        mount = context.stack.mount
        return remedies(current(read_gds_facts("/", mount.mount_point if mount else None)))
