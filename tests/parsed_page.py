"""A page of the reports as a test reads it: its tags, its texts, and the rows of its tables."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser
from xml.etree import ElementTree


class Parsed(HTMLParser):
    """The tags of a page with their attributes, its texts, and the rows of its tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.rows: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append("")

    def handle_data(self, data: str) -> None:
        self.words += data
        if self.rows:
            self.rows[-1] += f"{data} "

    def shape(self) -> Counter[str]:
        """How often each tag and each of its attributes occurs."""
        return Counter(part for tag, given in self.tags for part in (tag, *(f"{tag} {name}" for name in given)))


def pictures(text: str) -> list[ElementTree.Element]:
    """The pictures of a page."""
    return [ElementTree.fromstring(svg) for svg in re.findall("<svg.*?</svg>", text, re.DOTALL)]


def limits_of(text: str) -> str:
    """What a page says about what limits."""
    rest = text[text.index("What limits") :]
    return rest[: rest.index("<h2>", 1)]
