"""What the rows and the timed transfers gave. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tunetool.bench.api.catalogue import Row
from tunetool.bench.api.preflight import Way
from tunetool.measure.aio import Outcome, Spec

Ending = Literal["pass", "fail", "skip", "raised", "died", "hung"]
"""As the call ended: as expected, otherwise, not made, with an exception, with its process, or not at all."""


@dataclass(frozen=True)
class Answer:
    """What a row found."""

    row: Row
    ending: Ending
    found: str


@dataclass
class Transfer:
    """The timed transfers of one way."""

    way: Way
    spec: Spec
    outcome: Outcome = field(default_factory=Outcome)


@dataclass
class Gathered:
    """Filled while measuring, so that what was there before a failure is kept."""

    answers: dict[str, Answer] = field(default_factory=dict)
    """By the check's name."""
    transfers: dict[str, Transfer] = field(default_factory=dict)
    """By the name of the way."""
    said: dict[str, str] = field(default_factory=dict)
    """What the processes of rows printed, by the check's name."""


def raw_text(said: Mapping[str, str]) -> str:
    """For the file beside the record."""
    return "".join(f"== {name}\n{text.rstrip()}\n" for name, text in said.items() if text.strip())
