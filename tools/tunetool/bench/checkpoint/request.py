"""What `bench checkpoint` is asked: its options, and the help text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tunetool.bench.defaults import CHECKPOINT_ENGINES
from tunetool.measure.pace import Pace
from tunetool.options import shared as options
from tunetool.options.fields import number, option
from tunetool.options.shared import InRounds, Measuring

KIND = "bench.checkpoint"
FIGURES = {
    "B/s": ("bandwidth", "durable", "restore"),
    "s": ("durable_time", "stall", "cpu", "first_stall", "lost_time", "held", "baseline"),
    "B": ("peak_memory",),
    "1": (
        "size",
        "of_fio_write",
        "of_fio_read",
        "versus_torch_save",
        "restore_versus_torch_load",
        "versus_best_other",
        "restore_versus_best_other",
    ),
}
"""Figures of its records, by unit."""
NEEDS = ("torch",)
PREREQUISITES = ("torch",)
USED_IN_PART = ("fio", "DeepSpeed", "extra engines")

Device = Literal["auto", "cpu", "cuda"]


def gathers(engine: str) -> bool:
    """Whether an engine brings the whole state to one rank, and so is used less often."""
    return engine.endswith("-consolidated")


@dataclass(frozen=True)
class Training:
    """The small training loop with saves."""

    steps: int
    sharded_every: int
    consolidated_every: int
    loops: int = 3
    """Loops with each engine, if there are that many rounds."""
    step_seconds: float = 0.25
    """Work of one step, calibrated on the device before."""

    def every(self, engine: str) -> int:
        """After how many steps that engine saves; 0: never."""
        return self.consolidated_every if gathers(engine) else self.sharded_every

    def saves(self, every: int) -> int:
        """How many saves that makes: none after the last step, where there is nothing to hold."""
        return (self.steps - 1) // every if every else 0


@dataclass(frozen=True)
class Request(Measuring, InRounds):
    """Save and restore checkpoints of a real model's shapes by every engine, in turns, on the same medium.

    Measures for each engine: seconds that the training loop waits, seconds until everything is durable, seconds of a
    restore from a cold cache, CPU seconds, host memory. The drives' own counters prove what an engine calls durable.
    Only one thing is judged: that each restore is equal to what was saved. Writes a record and a page of plots into the
    runs directory.

    Exit codes: 0 measured, and all restores are equal; 1 a restore differs; 2 the call was wrong; 3 an engine failed,
    or the drives prove nothing.
    """

    model: str = options.model(
        "Model whose state is saved; also 70b-shard, one of 64 equal parts of 70b for each rank", required=True
    )
    target: Path | None = options.target("Directory on drives; what is written there is removed at the end.")
    memory_target: Path | None = options.memory_target(
        "Directory in memory, such as /dev/shm: a stand-in for a medium of that speed; every table says so."
    )
    state_bytes: int | None = options.state_bytes()
    tensors: int | None = number(
        "--tensors",
        default=None,
        help="Number of tensors into which the state is cut, such as 1344; the bytes stay the same.",
    )
    device: Device = options.device("Device that holds the state. auto: the GPU if torch has one, else the CPU.")
    ranks: int = number("--ranks", default=1, help="Number of processes that share the state.")
    engines: tuple[str, ...] = options.engines("direct*,torch-save-zip", CHECKPOINT_ENGINES)
    against_fio: bool = option("--against-fio", is_flag=True, help="Also measure fio's best write in every round.")
    train: bool = option(
        "--train",
        is_flag=True,
        help="Also run a small training loop with each engine, for the time lost per checkpoint.",
    )
    steps: int = number("--steps", least=2, default=24, help="With --train: number of steps of the loop.")
    sharded_every: int = number(
        "--sharded-every", least=0, default=6, help="With --train: steps between two saves; 0: no saves."
    )
    consolidated_every: int = number(
        "--consolidated-every",
        least=0,
        default=12,
        help="With --train: steps between two saves of engines that gather the whole state on one rank; 0: no saves.",
    )
    python: str | None = options.python()
    seed: int = options.seed("the state and of the order of engines")

    @property
    def pace(self) -> Pace:
        """With the training loop, which comes after the rounds, there is no hurry unless ``--budget`` says so."""
        asked = super().pace
        return Pace(asked.fewest, self.budget) if self.train else asked

    @property
    def training(self) -> Training | None:
        """The small training loop; None without one."""
        return Training(self.steps, self.sharded_every, self.consolidated_every) if self.train else None
