"""The result of fio: its JSON, read strictly."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tunetool.measure.claim import Claim
from tunetool.measure.direction import Direction
from tunetool.measure.worker import Failed
from tunetool.node.common import documents
from tunetool.system_packages import install_line

INSTALL_HINT = f"install it: {install_line('fio')}"


_NO_NUMBER = re.compile(r'("(?:[^"\\]|\\.)*")|-?\b(?:nan|inf(?:inity)?)\b', re.IGNORECASE)
"""A text of JSON, or what printf(3) makes of a quotient by 0, such as the share of a time that was none."""


class FioFailed(Failed):
    """fio did not do what it was asked to. ``raw`` is what it printed, for the record's directory."""


@dataclass(frozen=True)
class Fio:
    """The program that was found."""

    path: str
    version: str


@dataclass(frozen=True)
class Outcome(Claim):
    """The claim of one fio process; ``seconds`` are those of its longest-running job."""

    percentiles: dict[str, float]
    """Completion latency in seconds, by percentile (``p50``)."""
    raw: str
    requests: int = 0
    cores: float = 0.0
    """How many cores' worth of time the jobs spent."""

    @property
    def rate(self) -> float:
        """Requests per second."""
        return self.requests / self.seconds


def shares(
    fio: Fio, direction: Direction, stdout: str, stderr: str = "", *, by_name: bool = False
) -> dict[str, Outcome]:
    """The result of all jobs together or, by their name, of those that share one. Raises ``FioFailed``."""
    raw = stdout + stderr
    document = _json_of(fio, stdout, stderr)
    sides: dict[str, list[Mapping[str, Any]]] = {}
    try:
        if not document["jobs"]:
            raise FioFailed(f"`{fio.path}` reports no job", raw=raw)
        errors = [int(entry["error"]) for entry in document["jobs"] if entry["error"]]
        if errors:
            raise FioFailed(
                f"`{fio.path}` reports an error: {first_line(stderr, stdout) or os.strerror(errors[0])}", raw=raw
            )
        for entry in document["jobs"]:
            sides.setdefault(str(entry["jobname"]) if by_name else "", []).append(entry)
        return {name: _outcome(fio, direction, entries, stdout, stderr) for name, entries in sides.items()}
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise FioFailed(
            f"`{fio.path}` printed JSON without what a result needs ({error!r})", INSTALL_HINT, raw=raw
        ) from None


def _outcome(fio: Fio, direction: Direction, entries: Sequence[Mapping[str, Any]], stdout: str, stderr: str) -> Outcome:
    sides = [entry[direction] for entry in entries]
    claimed = sum(_whole(side["io_bytes"]) for side in sides)
    milliseconds = max(_whole(side["runtime"]) for side in sides)
    if claimed <= 0 or milliseconds <= 0:
        raise FioFailed(
            f"`{fio.path}` moved {claimed} bytes in {milliseconds} ms: {first_line(stderr, stdout) or 'no message'}",
            raw=stdout + stderr,
        )
    # Per cent of each thread's time; of a group, of all its threads' time together.
    shares_of_time = [(entry.get("usr_cpu", 0.0), entry.get("sys_cpu", 0.0)) for entry in entries]
    # A share of no time is no number: such a job spent none.
    spent = sum(
        sum(share or 0.0 for share in pair) / 100 * entry.get("job_runtime", 0)
        for pair, entry in zip(shares_of_time, entries, strict=True)
    )
    return Outcome(
        claimed,
        milliseconds / 1000,
        _percentiles(sides[0]),
        stdout,
        requests=sum(_whole(side.get("total_ios", 0)) for side in sides),
        cores=spent / milliseconds,
    )


def _json_of(fio: Fio, stdout: str, stderr: str) -> dict[str, Any]:
    # Warnings precede the JSON on stdout; nothing may follow it.
    start = 0 if stdout.startswith("{") else stdout.find("\n{") + 1
    text = _NO_NUMBER.sub(lambda found: found[1] or "null", stdout[start:])
    try:
        document = documents.parse(text, repeated=True)
    except ValueError as error:
        if stdout[start : start + 1] == "{":
            why = f"`{fio.path}` printed a result that is no JSON: {error}"
            raise FioFailed(why, INSTALL_HINT, stdout + stderr) from None
        message = first_line(stderr, stdout) or "nothing"
        raise FioFailed(f"`{fio.path}` did not print a result: {message}", INSTALL_HINT, stdout + stderr) from None
    if not isinstance(document, dict):
        raise FioFailed(f"`{fio.path}` did not print a result", INSTALL_HINT, stdout + stderr)
    return document


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TypeError(f"{value!r} is not a count")
    return value


def _percentiles(side: Mapping[str, Any]) -> dict[str, float]:
    # Nanoseconds, keyed "50.000000"; without group_reporting's merge the first group stands for all.
    wanted = {"50.000000": "p50", "95.000000": "p95", "99.000000": "p99", "99.900000": "p99.9"}
    percentiles = side.get("clat_ns", {}).get("percentile", {})
    return {name: _whole(percentiles[key]) / 1e9 for key, name in wanted.items() if key in percentiles}


def first_line(*texts: str) -> str | None:
    """The line of fio's output that says most: the first that begins with ``fio:``, else the first."""
    lines = [line.strip() for text in texts for line in text.splitlines() if line.strip() not in ("", "{", "}")]
    telling = [line for line in lines if line.startswith("fio:")]
    return next(iter(telling or lines), None)
