"""The collection's changelogs/changelog.yaml, in the form of antsibull-changelog, from CHANGELOG.md: the one source."""

from __future__ import annotations

import re
from typing import Any

KINDS = {
    "Commands and options renamed": "breaking_changes",
    "What users notice": "minor_changes",
    "What there is": "major_changes",
}
"""antsibull's section of each heading."""
_RELEASE = re.compile(r"^## (\S+)(?: \((.*)\))?$")
_HEADING = re.compile(r"^### (.*)$")
_DATE = re.compile(r"\d{4}-\d\d-\d\d")


def as_rst(text: str) -> str:
    """Markdown of one entry as reStructuredText: code, and links by their text."""
    without_links = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"`([^`]*)`", r"``\1``", without_links)


def changelog(text: str, today: str) -> dict[str, Any]:
    """antsibull's document of a CHANGELOG.md. A heading that is not in ``KINDS`` ends this program.

    ``today``: the date of a version that has none yet, since antsibull wants one of each.
    """
    releases: dict[str, Any] = {}
    entries: list[str] = []
    for line in text.splitlines():
        if match := _RELEASE.match(line):
            dated = match[2] is not None and _DATE.fullmatch(match[2])
            release: dict[str, Any] = {"changes": {}, "release_date": match[2] if dated else today}
            releases[match[1]] = release
            entries = []
        elif match := _HEADING.match(line):
            if match[1] not in KINDS:
                raise SystemExit(f"error: `{line}` of CHANGELOG.md has no kind\nhint: add it to tools/dev/changelog.py")
            entries = release["changes"].setdefault(KINDS[match[1]], [])
        elif line.startswith("- "):
            entries.append(line[2:])
        elif line.startswith("  ") and entries:
            entries[-1] += f" {line.strip()}"
    for release in releases.values():
        for kind, listed in release["changes"].items():
            release["changes"][kind] = [as_rst(each) for each in listed]
    return {"ancestor": None, "releases": releases}
