"""Lines of a screen: sections beside their names, long ones folded, at a fixed width."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

WIDTH = 120
MARGIN = 12
"""Every line of a section begins with its name, or as many blanks."""


def section(name: str, lines: Sequence[str]) -> Iterator[str]:
    """Lines beside their name; a line that is too long goes on below itself."""
    for index, line in enumerate(lines):
        head = f"{name:{MARGIN}}" if index == 0 else " " * MARGIN
        indent = len(line) - len(line.lstrip()) + 2
        parts = textwrap.wrap(
            line,
            WIDTH - MARGIN,
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
            replace_whitespace=False,
        ) or [""]
        # A table's own blanks must stay: only what does not fit is wrapped.
        parts = [line] if len(line) <= WIDTH - MARGIN else parts
        yield head + parts[0]
        for part in parts[1:]:
            yield " " * MARGIN + part


def wrapped(text: str, indent: int) -> list[str]:
    start = text[: len(text) - len(text.lstrip())]
    return textwrap.wrap(
        text.lstrip(),
        WIDTH,
        initial_indent=start,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
