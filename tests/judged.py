"""Assertions about measurements on this machine's disk, which other programs may use at the same time.

Tests on a virtual node (tests/lab), which have a disk of their own, show that a quiet disk gets the verdict PASS.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from tunetool.record import Measurement, Record, read

OTHERS = (
    "something else uses the drives",
    "something else used the drives",
    "lies on both sides of",
    "samples are too few to judge by",
)


def undisturbed(code: int, record: Record) -> bool:
    """Whether the measurement passed. Otherwise the use of the disk by others must be the only reason."""
    assert record.verdict is not None
    if record.verdict.status == "pass":
        assert code == 0, record.verdict.reasons
        return True
    assert record.verdict.status in ("unproven", "unstable"), record.verdict
    assert code == 3
    others = [reason for reason in record.verdict.reasons if any(words in reason for words in OTHERS)]
    assert record.verdict.reasons == others
    return False


class Answer(Protocol):
    """What a command printed, and its exit code."""

    @property
    def code(self) -> int: ...

    @property
    def text(self) -> str: ...


def lied(answer: Answer, code: int, *fragments: str) -> None:
    """Assert that verify did not believe what it was shown, and that it says why."""
    assert answer.code == code, answer.text
    assert "PASS" not in answer.text.splitlines()
    flat = " ".join(answer.text.split())
    for words in fragments:
        assert words in flat, words


def interrupted(runs: Path) -> Record:
    """The only record, which a measurement keeps when Ctrl-C or SIGTERM ends it."""
    (kept,) = (path.parent for path in runs.glob("*/record.json"))
    record = read(kept)
    assert record.verdict is not None
    assert (record.verdict.status, record.verdict.reasons[0]) == ("error", "interrupted before it was done")
    return record


def proven(measurement: Measurement, alone: bool = False) -> None:
    """Assert that the drives moved every claimed byte; bytes of others may be added to them, unless ``alone``."""
    assert measurement.evidence is not None, measurement.name
    assert measurement.evidence.kind == "block", measurement.name
    assert (measurement.evidence.ratio or 0) >= 0.98, measurement.name
    assert not alone or (measurement.evidence.ratio or 0) <= 1.02, measurement.name
