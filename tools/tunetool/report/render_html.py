"""A view as one HTML page."""

from __future__ import annotations

from tunetool.record import Record
from tunetool.report.html import checks, render
from tunetool.view.model import View


def page(view: View, record: Record) -> str:
    """The text of the page, complete in itself."""
    return render("view.html.j2", record=record, view=view, limits=view.advice, **checks(record))
