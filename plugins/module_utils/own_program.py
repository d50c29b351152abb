"""Running ``tunetool`` on a node, for modules that bring its record back."""

from __future__ import annotations

import json
from typing import Any, Mapping, Sequence

TAIL_LINES = 20


def read_record(stdout: str) -> dict[str, Any] | None:
    """The record on standard output, or None."""
    try:
        document = json.loads(stdout)
    except ValueError:
        return None
    return document if isinstance(document, dict) and "verdict" in document else None


def summary(record: Mapping[str, Any]) -> str:
    """One line: the verdict and its first reason."""
    verdict = record["verdict"]
    return ": ".join([verdict["status"].upper()] + verdict["reasons"][:1])


def last_words(tail: Sequence[str]) -> str:
    """Why there is no record, from the last lines of what it said."""
    told = [line for line in tail if line.startswith(("error: ", "hint: "))] or list(tail[-1:]) or ["it said nothing"]
    return "; ".join(told)
