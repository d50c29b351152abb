"""The result of a check."""

from __future__ import annotations

from dataclasses import dataclass

PASS, FAIL, SKIP, UNKNOWN = "pass", "fail", "skip", "unknown"


@dataclass(frozen=True)
class Check:
    """One question with its answer. ``remedy`` is empty unless the check failed or could not be answered."""

    id: str
    status: str
    expected: str
    found: str
    remedy: str = ""


def judged(identity: str, holds: bool, expected: str, found: str, remedy: str) -> Check:
    """A check that passes or fails; ``remedy`` is that of a failure."""
    return Check(identity, PASS if holds else FAIL, expected, found, "" if holds else remedy)
