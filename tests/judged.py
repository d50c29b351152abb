"""What a test may claim of a measurement on this machine's disk, which others may use at the same time.

That a verdict is PASS on a quiet disk is shown where the disk is the test's own: on a virtual node (tests/lab).
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
    """Whether it passed. If not, that must be for what others did with the disk, and for nothing else."""
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
    """The one record that a measurement keeps which Ctrl-C or SIGTERM ended."""
    (kept,) = (path.parent for path in runs.glob("*/record.json"))
    record = read(kept)
    assert record.verdict is not None
    assert (record.verdict.status, record.verdict.reasons[0]) == ("error", "interrupted before it was done")
    return record


def proven(measurement: Measurement, alone: bool = False) -> None:
    """Every byte that it claims came from the disk or reached it; what others moved comes on top, unless ``alone``."""
    assert measurement.evidence is not None, measurement.name
    assert measurement.evidence.kind == "block", measurement.name
    assert (measurement.evidence.ratio or 0) >= 0.98, measurement.name
    assert not alone or (measurement.evidence.ratio or 0) <= 1.02, measurement.name
