"""The torch rung: a checkpoint saved durably and loaded from the drives, in a child under the user's own Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tunetool.measure import Direction
from tunetool.measure.fio import Outcome
from tunetool.measure.ladder.budget import CHECKPOINT_BYTES, CHECKPOINT_SHARE, SAMPLES
from tunetool.measure.ladder.rung import Context, Label, Result, Rung, Skip, figure
from tunetool.measure.metrics import MIB
from tunetool.measure.sampling import Counting, Repeats, collect, judgement
from tunetool.measure.sequential import Plan, Sample, free_bytes
from tunetool.measure.worker import Failed, Missing, Worker, child_command
from tunetool.record import Scalar

SAVE, LOAD = "checkpoint.save", "checkpoint.load"
FILE = "checkpoint.pt"
_CHILD = Path(__file__).with_name("checkpoint_child.py")
_START = 15.0
"""torch's import, and making the state."""
_LEAST = 16 * MIB
_PATIENCE = 300.0
_ORDERS: Mapping[str, Direction] = {"save": "write", "load": "read"}


@dataclass(frozen=True)
class TorchCheckpoint(Rung):
    """torch.save and torch.load of a state in HBM, or in memory where there is no GPU."""

    name: str = "torch checkpoint"

    def covers(self) -> Sequence[str]:
        """Both directions."""
        return [SAVE, LOAD]

    def seconds(self, shape: Plan, drives: int) -> float:
        """About how long it takes where a checkpoint's bytes take as long as a sample."""
        return 2 * SAMPLES * shape.duration + _START

    def run(self, context: Context) -> Result:
        """A figure for each direction. Raises ``Skip``; ``Failed`` for a child that dies or loads something else."""
        python = context.python
        try:
            torch_version = context.probe().torch
        except Missing as error:
            raise Skip(error.message) from None
        if torch_version is None:
            raise Skip(f"torch is not installed in `{python}`; name the Python that has it with `--python`")
        size = _size(context)
        path = context.directory / FILE
        samples: dict[str, list[Sample]] = {order: [] for order in _ORDERS}
        with (
            context.sampler.progress.step(
                f"{context.stack.directory}: torch checkpoint", self.seconds(context.shape, 1)
            ) as tick,
            Worker(child_command(python, _CHILD), "the checkpoint's process", context.environment, tick) as child,
        ):
            try:
                child_facts = child.ask({"do": "start", "path": str(path)}, _PATIENCE)
                child.ask({"do": "make", "bytes": size}, _PATIENCE)
                child.ask({"do": "save"}, _PATIENCE)
                repeats = 0
                for order in _ORDERS:
                    repeats += _samples(child, context, order, samples[order])
            except Failed as error:
                context.sampler.raw["checkpoint.txt"] = error.raw
                raise
            finally:
                path.unlink(missing_ok=True)
        parameters: dict[str, Scalar] = {
            "jobs": 1,
            "files": 1,
            "file_bytes": size,
            "device": str(child_facts["device"]),
            "direct": False,
            "repeated_samples": repeats,
            "python": str(python),
        }
        result = Result()
        for order in _ORDERS:
            engine = f"torch {child_facts['torch']}"
            label = Label(
                "checkpoint.{figure}", "checkpoint", engine, _ORDERS[order], context.stack.medium, figure=order
            )
            result.add(figure(label, context.stack, samples[order], parameters))
        return result


def _size(context: Context) -> int:
    """About one sample's worth, and no more than fits."""
    room = int(free_bytes(context.directory) * CHECKPOINT_SHARE)
    wanted = int(context.written * context.shape.duration) if context.written else CHECKPOINT_BYTES
    size = min(CHECKPOINT_BYTES, room, max(64 * MIB, wanted)) // (16 * MIB) * (16 * MIB)
    if size < _LEAST:
        raise Skip("there is too little space for a checkpoint")
    return size


def _samples(child: Worker, context: Context, order: str, kept: list[Sample]) -> int:
    """Samples of one direction; how many were taken again."""

    def take(name: str) -> Sample:
        with Counting(context.stack, f"`{name}`") as counting:
            answer = child.ask({"do": order}, _PATIENCE)
        if answer.get("equal") is False:
            raise Failed("`torch.load` did not return what `torch.save` was given", "look at `dmesg` for I/O errors")
        outcome = Outcome(int(answer["bytes"]), float(answer["seconds"]), {}, "", cores=float(answer["cores"]))
        return Sample(outcome, counting.count(_ORDERS[order], outcome.claimed_bytes), counting.moment)

    repeats = Repeats()
    collect(kept, f"checkpoint-{order}", SAMPLES, take, judgement, repeats, context.sampler.progress.say)
    return repeats.taken
