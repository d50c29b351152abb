"""Goals of the search: reads, writes, or a given mix of both. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from tunetool.errors import UsageProblem
from tunetool.measure import Direction

Goal = Literal["read", "write", "mix"]

_HINT = "write bytes read for bytes written, such as `read=1,write=1`"


@dataclass(frozen=True)
class Mix:
    """Bytes that the job reads for each byte that it writes, as two weights; not both are 0."""

    read: float = 1.0
    write: float = 1.0

    @property
    def directions(self) -> tuple[Direction, ...]:
        """The directions to measure, in order."""
        directions: list[Direction] = []
        if self.write:
            directions.append("write")
        if self.read:
            directions.append("read")
        return tuple(directions)

    @property
    def goals(self) -> tuple[Goal, ...]:
        """The goals of the search; the block is written for the last one."""
        return ("read", "write", "mix") if self.read and self.write else self.directions

    def speed(self, read: float, write: float) -> float:
        """Bytes per second of the mix: its parts run one after the other."""
        return (self.read + self.write) / (self.read / read + self.write / write)

    def __str__(self) -> str:
        return f"read={self.read:g},write={self.write:g}"


def parts(goal: Goal) -> tuple[Direction, ...]:
    """Directions that ``goal`` consists of."""
    return ("write", "read") if goal == "mix" else (goal,)


def parse_mix(text: str) -> Mix:
    """From ``read=1,write=1``. Raises ``UsageProblem``."""
    weights: dict[str, float] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(read|write)=([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*", part)
        if not match or match[1] in weights:
            raise UsageProblem(f"`--mix {text}` is not a mix", _HINT)
        weights[match[1]] = float(match[2])
    if not any(weights.values()):
        raise UsageProblem(f"`--mix {text}` moves nothing", _HINT)
    return Mix(weights.get("read", 0.0), weights.get("write", 0.0))
