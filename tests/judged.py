"""Assertions about measurements on this machine's disk, which other programs may use at the same time.

Tests on a virtual node (tests/lab), which have a disk of their own, show that a quiet disk gets the verdict PASS.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from tunetool.measure.marked_processes import marked
from tunetool.record import Measurement, Record, read
from waiting import PATIENCE, until

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


@contextlib.contextmanager
def leaves_nothing(
    command: Sequence[str], number: int, directory: Path, runs: Path
) -> Iterator[tuple[subprocess.Popen[str], Callable[[], list[int]]]]:
    """Run a measurement in ``directory`` and send it SIGINT or SIGKILL at the end of the block, which gets the process
    and a function for the ids of all that it started. Nothing of it may be left but the record of an interrupted run.
    """
    name, value = "TUNETOOL_TEST_MARK", str(runs)
    with subprocess.Popen(
        command, env={**os.environ, name: value}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        yield process, lambda: marked(name, value)
        process.send_signal(number)
        said = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL), said
    until(lambda: not marked(name, value) and not list(directory.iterdir()), "the end of all that the run had")
    if number == signal.SIGKILL:
        assert list(runs.glob("*")) == []
    else:
        interrupted(runs)


def proven(measurement: Measurement, alone: bool = False) -> None:
    """Assert that the drives moved every claimed byte; bytes of others may be added to them, unless ``alone``."""
    assert measurement.evidence is not None, measurement.name
    assert measurement.evidence.kind == "block", measurement.name
    assert (measurement.evidence.ratio or 0) >= 0.98, measurement.name
    assert not alone or (measurement.evidence.ratio or 0) <= 1.02, measurement.name
