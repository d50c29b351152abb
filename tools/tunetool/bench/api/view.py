"""What `bench api` shows: a table of calls, one of wrong uses, one of speeds, and what to do about what is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tunetool.node.units import format_size_binary
from tunetool.record import CheckResult, Measurement, Record
from tunetool.view.figures import figures
from tunetool.view.model import Cell, Cells, Notes, Section, Table, View
from tunetool.view.text import number

_MISUSE = "misuse"
_WORDS = {"pass": "PASS", "fail": "FAIL", "skip": "skip", "unknown": "unknown"}
_MISUSE_WORDS = {**_WORDS, "pass": "refused", "fail": "HARM"}
_FIGURES = ("call", "threads", "in flight", "GB/s", "from, GB/s", "to, GB/s", "evidence", "medium")


def view(record: Record, _: Path | None = None) -> View:
    """What is shown: what each call and each wrong use does, and the speeds. A page has all checks in one list."""
    misuses = [check for check in record.checks if check.labels.get("group") == _MISUSE]
    calls = [check for check in record.checks if check not in misuses]
    if all(check.status == "skip" for check in record.checks):
        calls, misuses = calls[:1], []
    sections = [*_of_checks("call", calls, _WORDS), *_of_checks("wrong use", misuses, _MISUSE_WORDS)]
    speeds = Table(_FIGURES, [_row(figure) for figure in record.measurements], _FIGURES[1:-1])
    if speeds.rows:
        sections.append(Section("calls, one file", [speeds]))
    return View(
        f"DeepSpeed's calls on {record.node.host}",
        sections=[*sections, *figures(record)],
        checks=True,
    )


def _of_checks(title: str, checks: Sequence[CheckResult], words: Mapping[str, str]) -> Iterator[Section]:
    rows = [(_name(check), Cell(words[check.status], mark=check.status), check.found or "") for check in checks]
    remedies = [
        f"{_name(check)}: {check.remedy}"
        for check in checks
        if check.remedy and check.status in ("fail", "unknown", "skip")
    ]
    if rows:
        table = Table((title, "", "what it does"), rows, numbers=())
        yield Section(title, [table, Notes(remedies)], on="terminal")


def _name(check: CheckResult) -> str:
    group = "" if check.labels.get("group") == _MISUSE else f"{check.labels.get('group')}."
    return f"{group}{check.labels['call']}" if "call" in check.labels else "version"


def _row(figure: Measurement) -> Cells:
    interval, proof, parameters = figure.confidence, figure.evidence, figure.parameters
    size = format_size_binary(float(parameters["file_bytes"]))
    return [
        f"{figure.labels['way']}, {figure.labels['direction']}, {size}",
        str(parameters["intra_op_parallelism"]),
        str(parameters["pending"]),
        number(figure.value / 1e9),
        *((number(edge / 1e9) for edge in (interval.low, interval.high)) if interval else ("-", "-")),
        f"{proof.kind} {proof.ratio:.4f}" if proof and proof.ratio is not None else "none",
        figure.medium,
    ]
