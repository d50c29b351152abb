"""A short ``verify`` of an idle node. It ends when a job of Slurm begins."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

from tunetool.health import results
from tunetool.health.results import publish
from tunetool.node.common.files import replace_file
from tunetool.node.health.health_units import METRICS
from tunetool.node.health.settings import load
from tunetool.node.machine.busy import scheduler_jobs
from tunetool.record import Record
from tunetool.report.prometheus import prometheus

COMMAND = (sys.executable, "-I", "-m", "tunetool", "verify", "--level", "quick", "--json", "-")
LOOK = 1.0
"""Seconds between two looks for a job."""


def main() -> int:
    """Measure this node."""
    print(measure(load()))
    return 0


def measure(
    settings: Mapping[str, Any],
    command: Sequence[str] = COMMAND,
    jobs: Callable[[], Sequence[str]] = lambda: scheduler_jobs({}),
    files: results.Files = results.NODE,
) -> str:
    """Verify, and keep the verdict and its metrics. Returns what it ended with, in a line."""
    document = {**results.read_document(files.measured), "tried": time.time()}
    results.write_document(files.measured, document)
    text, job = _run(command, jobs)
    if job is not None:
        return f"ended before it was done: {job}"
    try:
        record = _record(text)
    except ValueError as error:
        return f"no record: {error}"
    status, reasons = _judged(record, settings["ignored_checks"])
    document["recorded"] = time.time()
    if status in ("pass", "fail"):
        document |= asdict(results.Result(document["recorded"], status, reasons if status == "fail" else ()))
    # Another verdict proves neither health nor a fault: what was known before stays.
    results.write_document(files.measured, document)
    publish(files)
    if settings["textfile_directory"]:
        # As for the metrics of the checks, a link there is not followed.
        path = f"{settings['textfile_directory']}/{METRICS[1]}"
        replace_file(path, prometheus(record), sync=False, follow=False)
    return ": ".join([status, *reasons[:1]])


def _run(command: Sequence[str], jobs: Callable[[], Sequence[str]]) -> tuple[str, str | None]:
    """The output, and the job for which it was ended. What it says for people goes into the journal."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    job = None
    while True:
        try:
            text, _ = child.communicate(timeout=LOOK)
        except subprocess.TimeoutExpired:
            if job is None:
                job = next(iter(jobs()), None)
                if job is not None:
                    # It removes what it wrote.
                    child.send_signal(signal.SIGTERM)
            continue
        # A job that began since the last look disturbed the figures too.
        return text, job or next(iter(jobs()), None)


def _record(text: str) -> Record:
    """The record that `verify` printed. Raises ``ValueError``."""
    if not text.strip():
        raise ValueError("`verify` printed none")
    return Record.model_validate(json.loads(text))


def _judged(record: Record, ignored: Sequence[str]) -> tuple[str, list[str]]:
    """Status and reasons, without the checks that the owner ignores."""
    if record.verdict is None:
        return "error", ["the record has no verdict"]
    status, kinds = record.verdict.status, record.verdict.kinds or []
    reasons = [line for line, kind in zip_longest(record.verdict.reasons, kinds) if kind != "note"]
    failed = {check.id for check in record.checks if check.status == "fail"}
    passed_over = {name for name in failed if results.is_ignored(name, ignored)}
    figures = {wanted.status for wanted in record.expectations}
    if status == "fail" and passed_over and failed == passed_over and "fail" not in figures:
        # Nothing else falls short: the figures decide, if nothing else is in doubt.
        doubted = {check.id for check in record.checks if check.status == "unknown"}
        said = {line.partition(":")[0] for line in reasons}
        others = [name for name in doubted | said if not results.is_ignored(name, ignored)]
        return ("pass" if figures == {"pass"} and not others else "unproven"), []
    return status, [line for line in reasons if line.partition(":")[0] not in passed_over]
