"""Lines of fixed-width text: sections with their names in the margin, long lines folded."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence

WIDTH = 120
MARGIN = 12
"""Width of the margin, which holds a section's name or blanks."""


_COMMANDS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters other than blanks and ends of lines, and those that turn the order in which letters are shown."""


def without_commands(text: str) -> str:
    """A document whose lines and tabs stay, and where no name or value hides what it says, or moves a terminal."""
    return _COMMANDS.sub(lambda found: ascii(found[0])[1:-1], text)


def section(name: str, lines: Sequence[str]) -> Iterator[str]:
    """The lines with their section's name in the margin; a line that is too long is folded and indented."""
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
        # Wrapping would collapse a table's blanks: only lines that do not fit are wrapped.
        parts = [line] if len(line) <= WIDTH - MARGIN else parts
        yield head + parts[0]
        for part in parts[1:]:
            yield " " * MARGIN + part


def wrapped(text: str, indent: int) -> list[str]:
    """``text`` folded to the width; the first line keeps its indentation, further lines get ``indent`` blanks."""
    start = text[: len(text) - len(text.lstrip())]
    return textwrap.wrap(
        text.lstrip(),
        WIDTH,
        initial_indent=start,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
