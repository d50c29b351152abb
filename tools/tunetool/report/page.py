"""What every page for people shares: its width, its lines, and how it writes a number."""

from __future__ import annotations

import textwrap

from rich.console import Console
from rich.text import Text

WIDTH = 100


def number(value: float) -> str:
    """Four digits that count, never in powers of ten."""
    if value >= 100:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 1 else f"{value:.3g}"


def line_of(text: str) -> Text:
    """A line that is never wrapped."""
    return Text(text, overflow="ignore", no_wrap=True)


def print_block(console: Console, text: str, indent: int) -> None:
    """Text as wide as the page, its further lines indented."""
    for line in textwrap.wrap(
        text, WIDTH, subsequent_indent=" " * indent, break_long_words=False, drop_whitespace=True
    ):
        console.print(line_of(line))
