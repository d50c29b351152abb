"""A record as JUnit XML: one test case for each check, expectation and goal, and one for the verdict itself."""

from __future__ import annotations

from xml.etree.ElementTree import Element, SubElement, indent, tostring

from tunetool.accept.judge import HELD, MISSED, SKIPPED, title
from tunetool.node.units import format_figure
from tunetool.record import Record, Status
from tunetool.view.text import format_value


def junit(record: Record) -> str:
    """The XML text. A case is a failure where something falls short, and an error where it could not be judged."""
    suite = Element("testsuite", name=_clean(f"tunetool {record.kind} {record.node.host}"), timestamp=_time(record))
    suite.set("time", f"{(record.finished - record.started).total_seconds():.3f}")
    for check in record.checks:
        case = _case(suite, "checks", check.id)
        message = f"found {check.found}, expected {check.expected}"
        if check.status == "fail":
            _mark(case, "failure", message, check.remedy)
        elif check.status == "unknown":
            _mark(case, "error", message, check.remedy)
        elif check.status == "skip":
            SubElement(case, "skipped", message=_clean(check.found))
    figures = {measurement.name: measurement for measurement in record.measurements}
    for wanted in record.expectations:
        figure = figures.get(wanted.name)
        value = format_figure(figure.value, figure.unit) if figure else "not measured"
        _judge(
            _case(suite, "expectations", wanted.name),
            wanted.status,
            f"found {value}, expected at least {format_figure(wanted.value, wanted.unit)} ({wanted.source})",
        )
    for goal in record.goals or []:
        case = _case(suite, "goals", f"{title(goal)} {goal.sense} {format_value(goal.bound, goal.unit)}")
        found = format_value(goal.value, goal.unit) if goal.value is not None else "not measured"
        if goal.verdict == SKIPPED:
            SubElement(case, "skipped", message=_clean(goal.reason))
        elif goal.verdict != HELD:
            _mark(case, "failure" if goal.verdict == MISSED else "error", f"found {found}", goal.reason)
    _ladder(suite, record)
    for host in record.hosts or []:
        _judge(_case(suite, "hosts", host.host), host.status, "; ".join(host.reasons))
    verdict = record.verdict
    if verdict is not None:
        _judge(_case(suite, "verdict", record.target or record.node.host), verdict.status, "; ".join(verdict.reasons))
    for name, tag in (("tests", "testcase"), ("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(name, str(len(list(suite.iter(tag)))))
    root = Element("testsuites")
    root.append(suite)
    indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + tostring(root, encoding="unicode") + "\n"


def _ladder(suite: Element, record: Record) -> None:
    if record.ladder is None:
        return
    for rung in record.ladder.rungs:
        # A rung's loss is a hint where to look, not a verdict: it is reported, but fails no case.
        case = _case(suite, "ladder", rung.title)
        if rung.skipped is not None:
            SubElement(case, "skipped", message=_clean(rung.skipped))
        elif rung.share is not None:
            SubElement(case, "system-out").text = _clean(f"{rung.share:.1%} of {rung.below}")
    loss = record.ladder.loss
    if loss is not None:
        case = _case(suite, "ladder", f"first loss: {loss.cause}")
        SubElement(case, "system-out").text = _clean(f"{loss.found}\nremedy: {loss.remedy}")


def _case(suite: Element, group: str, name: str) -> Element:
    return SubElement(suite, "testcase", classname=f"tunetool.{group}", name=_clean(name))


def _judge(case: Element, status: Status | None, reason: str) -> None:
    if status == "fail":
        _mark(case, "failure", reason, "")
    elif status not in ("pass", None):
        _mark(case, "error", f"{status}: {reason}", "")


def _mark(case: Element, tag: str, message: str, text: str) -> None:
    SubElement(case, tag, message=_clean(message)).text = _clean(text) or None


def _time(record: Record) -> str:
    return record.started.isoformat(timespec="seconds")


def _clean(text: str) -> str:
    """The text without the characters that XML 1.0 forbids (section 2.2)."""
    return "".join(
        letter
        for letter in text
        if letter in "\t\n\r" or " " <= letter <= "\ud7ff" or "\ue000" <= letter <= "\ufffd" or letter > "\uffff"
    )
