"""What was published of this experiment, in its own words, and what follows from its numbers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SOURCE = (
    "Mark III Systems Blog, `Benchmarking LLM, Multi-GPU Finetuning Training Strategies with PyTorch Lightning on "
    "NVIDIA DGX`"
)
HARDWARE = "2 DGX with 8 V100 each, 1000 Mb/s between them"
LINK = 1000e6 / 8
"""1000 Mb/s between its two nodes, in bytes per second."""


@dataclass(frozen=True)
class Epoch:
    """The time of one epoch on one layout."""

    nodes: int
    ranks: int
    """On each node."""
    stage: int | None
    """None: not said."""
    words: str
    """As it was published."""
    low: float
    """The shortest time that the words allow, in minutes."""
    high: float

    @property
    def name(self) -> str:
        """As the matrix writes it."""
        return f"{self.nodes}x{self.ranks}" + (f":z{self.stage}" if self.stage is not None else "")

    @property
    def shape(self) -> tuple[str, int]:
        """By which a scaled-down cell is its counterpart: one rank, one node or several, and the stage."""
        return shape(self.nodes, self.ranks, self.stage if self.stage is not None else 2)


def shape(nodes: int, ranks: int, stage: int) -> tuple[str, int]:
    """Of a cell: cells of one shape differ in numbers of nodes and ranks only."""
    return ("nodes" if nodes > 1 else "node" if ranks > 1 else "one", stage)


ONE, HOURS_OF_ONE = 60.0, (60.0, 75.0)
"""Minutes: \"a little over an hour\" is more than 60; above 75 nobody would say \"a little\"."""
_FEW = (2.0, 5.0)
"""\"A few minutes\"."""
EPOCHS: Sequence[Epoch] = (
    Epoch(1, 1, None, "a little over an hour", *HOURS_OF_ONE),
    Epoch(1, 8, 2, "~ 9 minutes", 8.5, 9.5),
    Epoch(2, 8, 2, "a little less than 8 minutes", 7.0, 8.0),
    Epoch(2, 8, 3, "about 3 times as long as one GPU", 2.5 * HOURS_OF_ONE[0], 3.5 * HOURS_OF_ONE[1]),
    Epoch(1, 8, 3, "a few minutes slower than ZeRO 2", 8.5 + _FEW[0], 9.5 + _FEW[1]),
)


def relative(epoch: Epoch) -> str:
    """Its time over that of one GPU, as far as the words go."""
    if epoch == EPOCHS[0]:
        return "1"
    if epoch.stage == 3 and epoch.nodes > 1:
        return "~3"  # published as a ratio
    low, high = epoch.low / HOURS_OF_ONE[1], epoch.high / HOURS_OF_ONE[0]
    return f"{low:.2f}-{high:.2f}"


def remarks() -> list[str]:
    """What its numbers need beside them, and whether its explanation follows from them."""
    node, nodes, over = EPOCHS[1], EPOCHS[2], EPOCHS[3]
    gain = 9.0 / 8.0
    return [
        f"published: {SOURCE}; {HARDWARE}. Times are its words in minutes: a little over an hour as "
        f"{HOURS_OF_ONE[0]:g}-{HOURS_OF_ONE[1]:g}, a few minutes as {_FEW[0]:g}-{_FEW[1]:g}; the model, the batch and "
        "the samples are not said, so that only ratios compare",
        f"published: more than 6x on 8 GPUs follows from its times (60 / 9 = {60 / 9:.1f}x, {60 / 9 / 8:.0%} of 8); "
        f"from 8 to 16 GPUs it gains {gain:.2f}x of the possible 2x; its times include the start, which is a column of "
        "its own here",
        f"published: 1000 Mb/s are {LINK / 1e9:g} GB/s; ZeRO-3 over it took {over.low / nodes.high:.0f} to "
        f"{over.high / nodes.low:.0f} times as long as ZeRO-2. That ZeRO-3 shares all parameters explains it only "
        "where most of them are frozen (LoRA): ZeRO-2 never sends those. With all parameters trained, DeepSpeed sends "
        "up to 3 (N-1)/N of the model in either stage (the ZeRO paper: 3 against 2), and both would be about as slow",
        f"published: ZeRO-3 on one node, {node.low + _FEW[0]:g}-{node.high + _FEW[1]:g} minutes, shows that the "
        "network between nodes was the cause; it does not show what ZeRO-3 costs by itself (its hooks)",
    ]
