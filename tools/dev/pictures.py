"""Draws what a command printed as an SVG: a terminal whose lines of a failure are coloured and named.

docs/pictures/NAME.txt is the output as a run printed it; tools/dev/docs.py writes NAME.svg from it. The picture needs
no font and no style sheet from elsewhere.
"""

from __future__ import annotations

import re
from html import escape

ADVANCE, LINE, MARGIN = 8.0, 18, 16
"""Pixels: width of a character, height of a line, distance to the edge."""
FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"
WIDTH, NOTES = 100, 12
"""Columns of the tool's pages, and right of them those of the notes."""
TEXT, DIM, RED, GREEN, BACK = "#d8dee9", "#8a94a6", "#ff7b72", "#7ee787", "#161b22"
MARKS = {"FAIL ": ("the cause", RED), "remedy:": ("the cure", GREEN)}
"""First words of a line, the note beside it, and their colour; lines that are indented deeper belong to it."""


def picture(printed: str, title: str) -> str:
    """An SVG of what a command printed; ``title`` is its text alternative."""
    lines = printed.rstrip("\n").splitlines()
    width = (WIDTH + NOTES) * ADVANCE + 2 * MARGIN
    height = len(lines) * LINE + 2 * MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}"'
        f' height="{height:g}" role="img" aria-labelledby="title">',
        f'<title id="title">{escape(title)}</title>',
        f'<rect width="100%" height="100%" rx="8" fill="{BACK}"/>',
        f'<g font-family="{FONTS}" font-size="13">',
    ]
    colour, depth = TEXT, 0
    for number, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if indent <= depth or not line.startswith(" "):
            colour, depth = TEXT, 0
        for words, (note, its_colour) in MARKS.items():
            if line.lstrip().startswith(words):
                colour, depth = its_colour, indent
                parts.append(text(note, number, WIDTH + NOTES - len(note), DIM))
        parts.append(text(line, number, 0, RED if line == "FAIL" else colour))
    return "\n".join([*parts, "</g>", "</svg>"]) + "\n"


def text(line: str, number: int, column: int, colour: str) -> str:
    """A line of text whose width does not depend on the font that draws it."""
    stripped = line.lstrip()
    if not stripped:
        return ""
    left = MARGIN + (column + len(line) - len(stripped)) * ADVANCE
    down = MARGIN + number * LINE + 13
    return (
        f'<text x="{left:g}" y="{down:g}" fill="{colour}" textLength="{len(stripped) * ADVANCE:g}"'
        f' lengthAdjust="spacingAndGlyphs">{escape(re.sub(" ", chr(0xA0), stripped))}</text>'
    )
