"""A view as one HTML page."""

from __future__ import annotations

from tunetool.record import Record
from tunetool.report.html import checks, render
from tunetool.view.model import View


def page(view: View, record: Record) -> str:
    """The text of the page, complete in itself; empty where the view has nothing for it."""
    sections = [each for each in (*view.sections, *view.curves()) if each.on != "terminal"]
    if not sections and not view.checks:
        return ""
    return render("view.html.j2", record=record, view=view, sections=sections, limits=view.advice, **checks(record))
