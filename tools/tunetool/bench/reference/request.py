"""What `bench reference` is asked: its options, and the help text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tunetool.bench.defaults import CHECKPOINT_MODEL, SHM, STAGING_ROUNDS, STATE_BYTES
from tunetool.errors import UsageProblem
from tunetool.fleet.options import need_inventory
from tunetool.node.units import parse_size
from tunetool.options import shared as options
from tunetool.options.fields import option, repeatable
from tunetool.options.shared import InRounds, parse_expectations
from tunetool.options.values import SIZE, TEXT
from tunetool.training.request import TrainingRequest
from tunetool.training_python import DEEPSPEED

KIND = "bench.reference"
FIGURES = {
    "B/s": ("bandwidth", "durable", "restore", "stage_rate"),
    "s": ("model_load", "data_per_batch", "end_to_end", "step"),
}
"""Figures of its records, by unit."""
NEEDS = DEEPSPEED
REQUIRED = False
PREREQUISITES = ("fio", "DeepSpeed")
USED_IN_PART = ("extra finetune", "pdsh", "Slurm")
"""Without such a Python `verify` still says what the storage is worth."""
VERIFY = "verify"
PARTS = (VERIFY, "checkpoint", "staging", "strategies")
"""The parts in their order: verify first, since benchmarks mean nothing on faulty storage."""
MAIN_STATE_BYTES = parse_size(STATE_BYTES)


@dataclass(frozen=True)
class Request(TrainingRequest, InRounds):
    """Run everything in one go: verify, then checkpoints, staging and strategies.

    Without other options the nodes decide: --target is the volume of the manifest, --model the largest that the GPUs
    and the memory of every node take, --matrix what the nodes can run. Says first what it will write, where, and how
    long it takes; --dry-run stops there.

    Each part writes a record of its own, and one record over all parts follows. A node of -i that fails verify, or does
    not answer any more, is left out with its reason, and the others go on. On one machine nothing else is measured
    after a FAIL of verify, unless --anyway is given. A part that cannot run is listed with its reason, and the others
    go on.

    Exit codes, over all parts: 1 a part falls short; else 3 a part could not be judged, or a node was lost; else 0. 2
    the call was wrong.
    """

    THOROUGH_ROUNDS: ClassVar[int] = STAGING_ROUNDS
    budget: float | None = options.budget("each part but `verify`")
    expect: tuple[str, ...] = options.expect()
    duration: float = options.duration_of_sample()
    anyway: bool = option(
        "--anyway", is_flag=True, help="Go on after a FAIL of verify; with -i: keep nodes that fail it."
    )
    all_or_nothing: bool = option(
        "--all-or-nothing", is_flag=True, help="With -i: stop where a node fails verify or does not answer."
    )
    skip: tuple[str, ...] = repeatable(
        "--skip",
        metavar="PART",
        help="Part to leave out: verify, checkpoint, staging or strategies. Repeatable.",
    )
    memory: Path = options.memory_target("Directory in memory on each node, to which files are staged.", default=SHM)
    checkpoint_model: str | None = option(
        "--checkpoint-model",
        type=TEXT,
        metavar="NAME",
        help=f"Model whose state is saved, as for `bench checkpoint --model`. Default: {CHECKPOINT_MODEL}, or "
        "tiny where there is too little room.",
    )
    state_bytes: int | None = option(
        "--state-bytes",
        type=SIZE,
        help=f"Upper bound of the state, such as `2GB`. Default: {STATE_BYTES}, or what every node has room for.",
    )
    matrix: str | None = option(
        "--matrix",
        metavar="CELL,...",
        help="Strategies as NODESxGPUS:zSTAGE. Default: one GPU, one node, all nodes; as the nodes allow.",
    )

    def check(self) -> None:
        """Raises ``UsageProblem`` for options that contradict each other."""
        need_inventory(self.inventory, all_or_nothing=self.all_or_nothing)
        _ = self.expected
        super().check()

    @property
    def expected(self) -> Mapping[str, float]:
        """What ``verify`` is to reach. Raises ``UsageProblem``."""
        return parse_expectations(self.expect)

    @property
    def in_rounds(self) -> dict[str, Any]:
        """What each part that measures in rounds is asked of them."""
        rounds = self.THOROUGH_ROUNDS if self.thorough and self.rounds is None else self.rounds
        return {"rounds": rounds, "budget": self.budget, "thorough": self.thorough}

    @property
    def parts(self) -> list[str]:
        """The parts to run. Raises ``UsageProblem``."""
        return parts_without(self.skip)


@dataclass(frozen=True, kw_only=True)
class Complete(Request):
    """The same with what the nodes decide. ``target``: directory on every node for checkpoints, model and data."""

    target: Path
    verify_target: Path | None = None
    """Target of ``verify``; None: the manifest's mount point."""
    checkpoint_model: str
    matrix: str


def parts_without(skip: Sequence[str]) -> list[str]:
    """The parts that remain. Raises ``UsageProblem`` for an unknown name, or if none remains."""
    for name in skip:
        if name not in PARTS:
            raise UsageProblem(f"`--skip {name}` is not a part", f"the parts are {', '.join(PARTS)}")
    chosen = [name for name in PARTS if name not in skip]
    if not chosen:
        raise UsageProblem("`--skip` leaves nothing", f"the parts are {', '.join(PARTS)}")
    return chosen
