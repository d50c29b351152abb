"""The collection's changelogs/changelog.yaml, in the form of antsibull-changelog, from CHANGELOG.md: the one source."""

from __future__ import annotations

import re
from typing import Any

KIND = "major_changes"
"""antsibull's section of all entries: the headings of CHANGELOG.md are subjects."""
_RELEASE = re.compile(r"^## (\S+)(?: \((.*)\))?$")
_DATE = re.compile(r"\d{4}-\d\d-\d\d")


def as_rst(text: str) -> str:
    """Markdown of one entry as reStructuredText: code, and links by their text."""
    without_links = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"`([^`]*)`", r"``\1``", without_links)


def changelog(text: str, today: str) -> dict[str, Any]:
    """antsibull's document of a CHANGELOG.md.

    ``today``: the date of a version that has none yet, since antsibull wants one of each.
    """
    releases: dict[str, Any] = {}
    entries: list[str] = []
    for line in text.splitlines():
        if match := _RELEASE.match(line):
            dated = match[2] is not None and _DATE.fullmatch(match[2])
            entries = []
            releases[match[1]] = {"changes": {KIND: entries}, "release_date": match[2] if dated else today}
        elif line.startswith("- "):
            entries.append(line[2:])
        elif line.startswith("  ") and entries:
            entries[-1] += f" {line.strip()}"
    for release in releases.values():
        release["changes"][KIND] = [as_rst(each) for each in release["changes"][KIND]]
    return {"ancestor": None, "releases": releases}
