"""A record as a file for the textfile collector of Prometheus' node exporter.

Format: Prometheus' text exposition format 0.0.4.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tunetool.record import Measurement, Record

_UNITS = {"B/s": "bytes_per_second", "s": "seconds", "1/s": "per_second", "B": "bytes", "1": "ratio"}
_STATUSES = ("pass", "fail", "unstable", "unproven", "error")
_CHECKS = {"pass": 0, "fail": 1, "unknown": 2, "skip": 3}


class _Page:
    """Metric families in the order in which they are first added; the format requires each one's lines together."""

    def __init__(self) -> None:
        self.families: dict[str, list[str]] = {}

    def add(self, name: str, help_text: str, labels: Mapping[str, str], value: float) -> None:
        head = [f"# HELP tunetool_{name} {help_text}", f"# TYPE tunetool_{name} gauge"]
        shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        self.families.setdefault(name, head).append(f"tunetool_{name}{{{shown}}} {value!r}")

    def text(self) -> str:
        return "".join(line + "\n" for family in self.families.values() for line in family)


class _Check(Protocol):
    """A check of a record, or of the reader of machines."""

    @property
    def id(self) -> str: ...
    @property
    def status(self) -> str: ...


def prometheus(record: Record) -> str:
    """The text of the file. Write it by rename, since the collector may read it at any moment."""
    page = _Page()
    base = {"kind": record.kind, "node": record.node.host}
    _ended(page, base, record.finished.timestamp(), record.verdict.status if record.verdict is not None else None)
    for measurement in record.measurements:
        _measurement(page, base, measurement)
    for wanted in record.expectations:
        labels = {**base, "measurement": wanted.name}
        page.add("expected_" + _UNITS[wanted.unit], "Expected value", labels, wanted.value)
    _checks(page, base, record.checks)
    for host in record.hosts or []:
        value = float(host.status == "pass")
        page.add("host_pass", "1 where the host passed", {**base, "host": host.host, "status": host.status}, value)
    return page.text()


def of_checks(
    kind: str,
    host: str,
    finished: float,
    status: str,
    checks: Iterable[_Check],
    cpu_seconds: float,
    more: Iterable[tuple[str, str, Mapping[str, str], float]] = (),
) -> str:
    """The text for checks that made no record. ``finished``: seconds since 1970; ``cpu_seconds``: what they cost.

    ``more``: further figures, each with its name, what it is, its labels and its value.
    """
    page, base = _Page(), {"kind": kind, "node": host}
    _ended(page, base, finished, status)
    _checks(page, base, checks)
    page.add("cpu_seconds", "CPU time of the run and of its programs", base, cpu_seconds)
    for name, help_text, labels, value in more:
        page.add(name, help_text, {**base, **labels}, value)
    return page.text()


def _ended(page: _Page, base: Mapping[str, str], finished: float, status: str | None) -> None:
    page.add("finished_timestamp_seconds", "Time of the end of the run; alert on its age", base, finished)
    for each in _STATUSES if status is not None else ():
        labels = {**base, "status": each}
        page.add("verdict", "1 for the verdict of the record, 0 for the others", labels, float(each == status))


def _checks(page: _Page, base: Mapping[str, str], checks: Iterable[_Check]) -> None:
    for check in checks:
        value = float(_CHECKS[check.status])
        page.add("check", "0 pass, 1 fail, 2 unknown, 3 skipped", {**base, "check": check.id}, value)


def _measurement(page: _Page, base: Mapping[str, str], measurement: Measurement) -> None:
    labels = {**base, "measurement": measurement.name, "figure": measurement.figure, "medium": measurement.medium}
    # As the record has them, but for one that the file's own labels have already.
    labels |= {key: value for key, value in measurement.labels.items() if key not in labels}
    for name, value in (("rank", measurement.rank), ("host", measurement.host)):
        if value is not None:
            labels[name] = str(value)
    unit = _UNITS[measurement.unit]
    page.add(f"{measurement.quantity}_{unit}", "Median of the samples", labels, measurement.value)
    if measurement.confidence is not None:
        page.add(f"{measurement.quantity}_low_{unit}", "Lower end of its interval", labels, measurement.confidence.low)
        page.add(
            f"{measurement.quantity}_high_{unit}", "Upper end of its interval", labels, measurement.confidence.high
        )
    for name, seconds in (measurement.percentiles or {}).items() if measurement.quantity == "rate" else ():
        page.add("latency_seconds", "Completion of a request", {**labels, "quantile": name}, seconds)
    if measurement.evidence is not None and measurement.evidence.ratio is not None:
        page.add(
            "evidence_ratio", "Bytes that the drives counted, for each claimed one", labels, measurement.evidence.ratio
        )


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
