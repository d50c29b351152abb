"""What a record says, as data: headings, tables, plots, notes and advice, in the order in which they are read.

A module of a kind makes the view; it decides and computes everything. The renderers (``render_terminal.py``,
``render_html.py``, ``render_markdown.py``) only lay it out, each for all kinds. A terminal shows no plots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tunetool.record import CheckStatus, Status


@dataclass(frozen=True)
class Cell:
    """A cell of a table. ``code`` in backticks is shown as such on pages."""

    text: str
    mark: CheckStatus | Status | None = None
    """In whose colour it stands."""
    number: float | None = None
    """What a column is sorted by, where that is not the text."""
    link: str = ""
    """A page, relative to that of the record."""
    aside: str = ""
    """What stands beside it, more quietly, and is not sorted by."""
    members: Sequence[Cell] = ()
    """What the text counts, such as the nodes of `40 nodes`; on a page only, behind the text."""

    @property
    def words(self) -> str:
        """The text with what stands beside it."""
        return f"{self.text} {self.aside}" if self.aside else self.text


Cells = Sequence[Cell | str]


@dataclass(frozen=True)
class Choice:
    """What a reader of a page can choose rows by; elsewhere all are shown."""

    name: str
    label: str
    options: Sequence[str]
    values: Sequence[Sequence[str]]
    """Of each row, which of the options it has."""


@dataclass(frozen=True)
class Table:
    """A table; the first column names the rows."""

    titles: Sequence[str]
    """Of the columns. A unit that all cells of one share stands here."""
    rows: Sequence[Cells]
    numbers: Sequence[str] | None = None
    """Titles of the columns that hold numbers; None: all but the first."""
    texts: Sequence[str] = ()
    """Titles of the columns that hold sentences, which a page folds."""
    lost: frozenset[int] = frozenset()
    """Numbers of rows that are marked as falling short."""
    sortable: bool = True
    folded: str = ""
    """On a page only, behind this summary."""
    name: str = ""
    """What the ``choices`` of a page call it."""
    choices: Sequence[Choice] = ()
    """With one or more, rows can be searched for a text too."""

    def is_number(self, title: str) -> bool:
        """Whether the column holds numbers."""
        return title in self.numbers if self.numbers is not None else title != self.titles[0]


@dataclass(frozen=True)
class Plot:
    """A drawing; on pages alone."""

    svg: str
    legend: Sequence[tuple[str, str, str]] = ()
    """Name, colour and dashes of each line."""


@dataclass(frozen=True)
class Notes:
    """Lines under what they are about."""

    lines: Sequence[str]
    on: str = ""
    """``page`` or ``terminal`` where the other has no use for them."""


@dataclass(frozen=True)
class Verbatim:
    """Text to copy: a configuration, a command."""

    text: str
    folded: str = ""
    """On a page only, behind this summary."""
    on: str = ""
    """``terminal`` where it names a path of this machine: pages and Markdown go to others."""


Block = Table | Plot | Notes | Verbatim


@dataclass(frozen=True)
class Section:
    """A part with its heading, which a terminal shows where it has more than one table to tell apart."""

    title: str
    blocks: Sequence[Block]
    on: str = ""
    """``page`` or ``terminal`` where it stands there alone."""


@dataclass(frozen=True)
class View:
    """All that is shown of a record beside its verdict, evidence, command and provenance, which all kinds share."""

    title: str
    """Of the page: ``Loading weights on node1``."""
    head: Sequence[str] = ()
    """Lines above everything: what was measured, and how."""
    sections: Sequence[Section] = ()
    curves: Callable[[], Sequence[Section]] = tuple
    """Sections of a page alone, read from files beside the record: a terminal does not wait for them."""
    advice: Sequence[str] = ()
    """What limits, and what to do."""
    advice_on: str = ""
    """``page`` where the tables of a terminal say it."""
    checks: bool = False
    """Whether a page lists all checks."""
    closing: Sequence[str] = field(default_factory=tuple)
    """Lines after the advice."""


def cell(each: Cell | str) -> Cell:
    """A text as a cell."""
    return Cell(each) if isinstance(each, str) else each
