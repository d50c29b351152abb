"""What every HTML page shares: its templates, evidence and provenance, and bars with whiskers as SVG.

A page is one file: its style and its script are in it, nothing is fetched, and it is complete without the script. Texts
of a record are escaped; the page's policy lets a browser run this script alone, should markup get through all the same.
"""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup  # what jinja2 marks safe texts with

from tunetool.node.units import format_count, format_size, format_size_binary
from tunetool.record import Measurement, Record, Tool, to_document
from tunetool.report.lines import without_commands
from tunetool.view.figures import label
from tunetool.view.model import cell
from tunetool.view.text import counted, quoted

_TEMPLATES = Path(__file__).resolve().parents[1] / "templates/report"
_MOST_EVIDENCE = 200
"""Rows of evidence on a page; the record has all."""


def render(template: str, **values: object) -> str:
    """The text of a page; ``template`` extends ``base.html.j2``, and all values are escaped unless marked safe."""
    record = values.get("record")
    if isinstance(record, Record):
        named = [(label(figure), figure) for figure in record.measurements]
        shared = {"evidence": evidence(named), "command": shlex.join(record.command), "provenance": provenance(record)}
        values = {**shared, **values}
    return without_commands(_environment().get_template(template).render(**{**_shell(), **values}))


@cache
def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(_TEMPLATES), undefined=StrictUndefined, autoescape=True, keep_trailing_newline=True
    )
    made.filters |= {"code": code, "cell": cell, "quoted": quoted, "kind": lambda block: type(block).__name__}
    return made


def code(text: object) -> Markup:
    """The text, escaped, with what stands between backticks as code; without a pair for each backtick as it is."""
    parts = str(text).split("`")
    if len(parts) % 2 == 0:
        return Markup.escape(str(text))
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if number % 2 else part for number, part in enumerate(parts)
    )


@cache
def _shell() -> Mapping[str, object]:
    """What a page is without its content."""
    script = (_TEMPLATES / "page.js").read_text()
    # The browser hashes what is between the tags, the line break of the template included.
    digest = base64.b64encode(hashlib.sha256(f"\n{script}".encode()).digest()).decode()
    sources = f"style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    policy = f"default-src 'none'; {sources}; base-uri 'none'; form-action 'none'"
    return {
        "style": (_TEMPLATES / "page.css").read_text(),
        "script": script,
        "policy": policy,
        "limits": (),
        "evidence": {"summary": "", "rows": ()},
        "command": "",
        "provenance": (),
    }


def evidence(named: Sequence[tuple[str, Measurement]]) -> dict[str, Any]:
    """One line about all these figures, and a row for each whose bytes were counted."""
    counted = [(name, each) for name, each in named if each.evidence is not None and each.evidence.ratio is not None]
    if not named:
        return {"summary": "", "rows": ()}
    figures = format_count(len(named), "figure")
    if not counted:
        return {"summary": f"No counter was read beside what was measured ({figures}).", "rows": ()}
    name, worst = max(counted, key=lambda each: abs(_ratio(each[1]) - 1))
    summary = (
        f"Counters were read for {len(counted)} of {figures}. Furthest from what was claimed: "
        f"{_ratio(worst):.4f} of the bytes of {name}."
    )
    left_out = len(counted) - _MOST_EVIDENCE
    summary += f" {left_out} rows more are in the record." if left_out > 0 else ""
    return {"summary": summary, "rows": [_evidence_row(*each) for each in counted[:_MOST_EVIDENCE]]}


def _ratio(figure: Measurement) -> float:
    return (figure.evidence.ratio if figure.evidence else None) or 0.0


def _evidence_row(name: str, figure: Measurement) -> dict[str, Any]:
    proof = figure.evidence
    claimed, seen = (proof.claimed_bytes, proof.counted_bytes) if proof else (None, None)
    return {
        "name": name,
        "samples": len(figure.samples or []),
        "claimed": format_size(claimed) if claimed is not None else "-",
        "claimed_bytes": claimed if claimed is not None else "",
        "counted": format_size(seen) if seen is not None else "-",
        "counted_bytes": seen if seen is not None else "",
        "ratio": f"{_ratio(figure):.4f}",
        "by": " ".join(part for part in (proof.kind, proof.device) if part) if proof else "",
        "engine": figure.engine,
    }


def checks(record: Record) -> dict[str, Any]:
    """The values of ``checks.html.j2``: the checks, the failed ones first, and how many have which status."""
    order = ("fail", "unknown", "skip", "pass")
    ranked = sorted(record.checks, key=lambda check: order.index(check.status))
    return {"checks": ranked, "counts": {each: sum(check.status == each for check in ranked) for each in order}}


def provenance(record: Record) -> list[tuple[str, str]]:
    """What made the record, and where: names and values."""
    return [(name, value) for name, value in _provenance(record) if value]


def of_tool(tool: Tool) -> Iterator[tuple[str, str]]:
    """The provenance of what was made by this tunetool."""
    yield "tunetool", " ".join([tool.version, *([f"commit {tool.commit}"] if tool.commit else [])])
    yield "hash of what ran", f"sha256 {tool.source_sha256}" if tool.source_sha256 else ""


def _provenance(record: Record) -> Iterator[tuple[str, str]]:
    node = record.node
    if record.tool is not None:
        yield from of_tool(record.tool)
    yield "programs", ", ".join(sorted({each.engine for each in record.measurements})[:12])
    yield "record", record.id
    yield "hash of the record", f"sha256 {record.sha256 or to_document(record)['sha256']}"
    seconds = (record.finished - record.started).total_seconds()
    yield "run", f"{record.started.isoformat(timespec='seconds')}, {seconds:.0f} s"
    yield "machine", ", ".join(part for part in (node.host, node.machine) if part)
    yield "CPU", ", ".join(part for part in (node.cpu, f"{node.cpu_count} cores" if node.cpu_count else None) if part)
    yield "memory", format_size_binary(node.memory_bytes) if node.memory_bytes else ""
    yield "kernel", node.kernel or ""
    yield "GPUs", counted(node.gpus or [])
    yield "NVIDIA driver", node.driver or ""
    yield "drives", counted([" ".join(filter(None, [each.model, each.firmware])) for each in node.drives or []])
    yield "hash of what affects speed", node.speed_hash or ""
