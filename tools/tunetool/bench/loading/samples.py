"""The samples of every medium, by engine and round. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tunetool.measure.rounds import Transfer
from tunetool.measure.sampling import Repeats
from tunetool.node.machine.block_stack import BlockStack

State = Literal["cold", "cached", "tmpfs", "huge"]
"""Where the bytes are: on the drives alone, in the page cache too, in a tmpfs, in a tmpfs with huge pages."""
TITLES: dict[State, str] = {
    "cold": "from the drives, out of the page cache",
    "cached": "from the page cache",
    "tmpfs": "from a tmpfs",
    "huge": "from a tmpfs with huge pages",
}


def key_of(state: State, gpus: int) -> str:
    """``tmpfs``, or ``tmpfs-2-gpus``."""
    return state if gpus == 1 else f"{state}-{gpus}-gpus"


def title_of(state: State, gpus: int) -> str:
    """For people."""
    return TITLES[state] if gpus == 1 else f"{TITLES[state]}, {gpus} at the same time"


@dataclass(frozen=True)
class Load(Transfer):
    """One load of all tensors, to each GPU."""

    is_equal: bool
    fetched: int = 0
    """Bytes that the kernel fetched from drives for its processes; 0 also where it does not count."""


@dataclass
class Row:
    """The loads of one engine in one state, by round."""

    name: str
    left_out: str | None = None
    """Why the engine cannot run here; None if it can."""
    failed: str | None = None
    """The error that ended its measurement; None if there was none."""
    first: dict[int, Load] = field(default_factory=dict)
    """In a fresh process, the import of the engine's library included."""
    warm: dict[int, Load] = field(default_factory=dict)
    """The next load of the same process. None from cold drives: the first may leave bytes in the page cache."""

    @property
    def differs(self) -> bool:
        """Whether a load gave other bytes than the files hold."""
        return not all(load.is_equal for load in [*self.first.values(), *self.warm.values()])

    def seconds(self, which: str) -> dict[int, float]:
        """By round; ``which`` is ``first`` or ``warm``."""
        return {number: load.seconds for number, load in (self.first if which == "first" else self.warm).items()}


@dataclass
class Matrix:
    """The samples of all engines in one state, on so many GPUs at the same time."""

    state: State
    stack: BlockStack
    gpus: int = 1
    rows: dict[str, Row] = field(default_factory=dict)
    pinned: dict[int, float] = field(default_factory=dict)
    """Bytes per second of copies from pinned memory to the GPU, by round."""
    fio: dict[int, float] = field(default_factory=dict)
    """Bytes per second at which fio reads the files from the drives, past the page cache, by round."""
    repeated: Repeats = field(default_factory=Repeats)
    """Number of samples that were repeated because something else used the drives."""

    @property
    def key(self) -> str:
        """The part of the figures' names that says where the bytes are, and how many GPUs take them."""
        return key_of(self.state, self.gpus)

    @property
    def title(self) -> str:
        """For people."""
        return title_of(self.state, self.gpus)
