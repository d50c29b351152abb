"""The result of a check."""

from __future__ import annotations

from dataclasses import dataclass

PASS, FAIL, SKIP, UNKNOWN = "pass", "fail", "skip", "unknown"


@dataclass(frozen=True)
class Check:
    """One question with its answer. ``remedy`` is empty unless there is something to do."""

    id: str
    status: str
    expected: str
    found: str
    remedy: str = ""

    @property
    def warns(self) -> bool:
        """Whether nothing is wrong, and there is something to do all the same."""
        return self.status == PASS and bool(self.remedy)

    def __str__(self) -> str:
        return "%s: %s, expected %s: %s" % (self.id, self.found, self.expected, self.remedy)


def judged(identity: str, holds: bool, expected: str, found: str, remedy: str) -> Check:
    """A check that passes or fails; ``remedy`` is that of a failure."""
    return Check(identity, PASS if holds else FAIL, expected, found, "" if holds else remedy)
