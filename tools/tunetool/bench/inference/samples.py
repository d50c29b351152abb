"""The generations of every row, by round. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from tunetool.measure.evidence import Counted
from tunetool.measure.sampling import Repeats
from tunetool.node.machine.block_stack import BlockStack
from tunetool.record import Scalar

Place = Literal["nvme", "dram", "device"]
Mode = Literal["aio", "gds"]
MODES: tuple[Mode, ...] = ("aio", "gds")
"""How SGLang reads weights from drives."""
SCRIPTS: Mapping[Mode, str] = {"aio": "sglang-aio.sh", "gds": "sglang-gds.sh"}
"""Files beside the record that start its benchmark."""
PLACES: tuple[Place, ...] = ("nvme", "dram", "device")
TITLES: Mapping[Place, str] = {
    "nvme": "drives",
    "dram": "host memory",
    "device": "device memory",
}
_TRUSTED: tuple[Place, ...] = ("device", "dram", "nvme")
"""Whose tokens the others must give: what moves its weights least comes first."""


@dataclass(frozen=True)
class Generation:
    """One call of ``model.generate``."""

    seconds: float
    passes: Sequence[float]
    """Seconds until each token was known; the first pass is that over the prompts."""
    tokens: Sequence[Sequence[int]]
    """Of each sequence, without its prompt."""
    claimed_bytes: int = 0
    """Of weights that DeepSpeed reads from drives: those of a pass, times the passes."""
    counted: Counted | None = None
    moment: float = 0.0
    peak_bytes: int = 0
    """Of the GPU's memory; 0 on a CPU."""
    close: Sequence[Sequence[Sequence[int]]] = ()
    """By sequence and token: the tokens whose score is the best, but for rounding."""

    @property
    def count(self) -> int:
        """Tokens of all sequences."""
        return sum(map(len, self.tokens))

    @property
    def rate(self) -> float:
        """Tokens per second, the pass over the prompts included."""
        return self.count / self.seconds

    @property
    def next_pass(self) -> float:
        """Median seconds of a pass after the first; with a single token that of the first."""
        return median(self.passes[1:] or self.passes)


@dataclass
class Row:
    """The generations with the weights in one place."""

    place: Place
    stack: BlockStack
    medium: str
    left_out: str | None = None
    """Why it is not measured."""
    remedy: str = ""
    failed: str | None = None
    facts: Mapping[str, Scalar] = field(default_factory=dict)
    readings: dict[int, Generation] = field(default_factory=dict)
    """By round."""
    repeated: Repeats = field(default_factory=Repeats)

    def seconds(self) -> dict[int, float]:
        """By round."""
        return {number: reading.seconds for number, reading in self.readings.items()}


@dataclass(frozen=True)
class Absent:
    """Why SGLang's benchmark cannot run here, and what helps."""

    why: str
    remedy: str


@dataclass
class Served:
    """SGLang's benchmark in one mode."""

    mode: Mode
    absent: Absent | None = None
    failed: str | None = None
    result: Mapping[str, Any] = field(default_factory=dict)
    """As it wrote it: ``output_throughput`` in tokens per second, ``total_output_tokens``."""


def reference(rows: Sequence[Row]) -> Row | None:
    """The row whose tokens the others must give; None without any generation."""
    by_place = {row.place: row for row in rows if row.readings}
    return next((by_place[place] for place in _TRUSTED if place in by_place), None)


@dataclass(frozen=True)
class Compared:
    """Sequences of all rounds of a row, beside those of the first round of another."""

    count: int
    rounded: int
    """Those that go another way where both tokens score the same but for rounding."""
    wrong: int


def compare(row: Row, trusted: Row) -> Compared:
    """Compare the tokens up to the first that differs: what follows it has another text before it."""
    expected = next(iter(trusted.readings.values()))
    close = expected.close or [[[]] * len(each) for each in expected.tokens]
    count = rounded = wrong = 0
    for reading in row.readings.values():
        for ours, theirs, rivals in zip(reading.tokens, expected.tokens, close, strict=True):
            count += 1
            parted = next(
                (at for at in range(max(len(ours), len(theirs))) if ours[at : at + 1] != theirs[at : at + 1]), None
            )
            if parted is None:
                continue
            if len(ours) == len(theirs) and ours[parted] in rivals[parted]:
                rounded += 1
            else:
                wrong += 1
    return Compared(count, rounded, wrong)
