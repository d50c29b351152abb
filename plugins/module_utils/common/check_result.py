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
