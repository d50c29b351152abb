"""Build the documents as a site, build/site, strictly; then look whether each page needs nothing but the site itself.

Its home page is README.md; the pages that README names beside docs/ are pages of the site too, and so are those that
reference.py makes. The menu is the index in docs/README.md.

Ends with 1 where a link leads nowhere, a page asks another machine for something, or the search lacks a page.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection
from html.parser import HTMLParser
from pathlib import Path

import reference

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build/site"
STAGED = ROOT / "build/docs"
"""docs/ with the files of the clone's top beside it, in the places that they have on the site."""
TOP = ("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "README.md", "SECURITY.md")
"""Files of the clone's top that are on the site."""
INDEX = "documents.md"
"""docs/README.md on the site, whose own index is README.md."""
LOADING = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
"""Elements for which a browser fetches something by itself, with the attribute that names it."""
ERROR_PAGE = "404.html"
"""Shown by a server for any address, so its own addresses begin at the server's root."""
ELSEWHERE = re.compile(r"(?:[a-z][a-z0-9+.-]*:)?//", re.IGNORECASE)


FETCHED = re.compile(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", re.IGNORECASE)
"""What a style sheet fetches from another machine."""


class Loaded(HTMLParser):
    """Collects the addresses that a browser fetches when it opens a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        # rel=canonical, next and prev are read, not fetched; a script without an address has its text in the page.
        if LOADING.get(tag) in given and not (tag == "link" and given.get("rel") in ("canonical", "next", "prev")):
            self.addresses.append(given[LOADING[tag]] or "")


TITLED = re.compile(r"\[([^\]]+)\]\(([^)#\s]+\.md)\)")
"""A page in the index."""
LINKED = re.compile(r"(\]\()([^)#\s]+)(?=[)#])")
"""The file of a link in Markdown."""
RENAMED = {"docs/README.md": INDEX, "README.md": "index.md", "LICENSE": "LICENSE.txt"}


def placed(name: str) -> str:
    """Where a file of the clone lies on the site; empty for one that is not there."""
    known = name in TOP or name.startswith("docs/")
    return RENAMED.get(name, name.removeprefix("docs/")) if known else ""


def moved(text: str, name: str) -> str:
    """A page of the clone with its links as they are on the site; those to files that are not there become text."""

    def link(found: re.Match[str]) -> str:
        if ":" in found[2]:
            return found[0]
        there = placed(os.path.normpath(os.path.join(os.path.dirname(name), found[2])))  # noqa: PTH118, PTH120  (no file)
        here = os.path.dirname(placed(name))  # noqa: PTH120
        return found[1] + (os.path.relpath(there, here or ".") if there else found[2])

    return LINKED.sub(link, text)


def menu(index: str, pages: Collection[str]) -> str:
    """The sections and pages of the index, as mkdocs.yml has them. A page that the index lacks ends this program."""
    lines, listed = ["nav:", '  - "Home": index.md', f'  - "Documents": {INDEX}'], {"README.md"}
    for line in index[index.index("\n## ") :].splitlines():
        if line.startswith("## "):
            lines.append(f"  - {json.dumps(line[3:])}:")
        for title, page in TITLED.findall(line):
            if page not in listed:
                lines.append(f"      - {json.dumps(title)}: {page}")
                listed.add(page)
    if missing := set(pages) - listed:
        raise SystemExit(
            f"error: docs/README.md has no line for `{min(missing)}`\nhint: add one to the section where it belongs"
        )
    lines += [f'      - "{name.capitalize()}": {name}.md' for name in ("SECURITY", "CONTRIBUTING", "CHANGELOG")]
    return "\n".join(lines) + "\n"


def stage() -> Path:
    """Lay out what the site is made of; returns the settings file for it."""
    shutil.rmtree(STAGED, ignore_errors=True)
    # dist.py puts those that are made there for the time of a build, which may be this moment.
    made = {Path(name).name for name in reference.MADE}
    shutil.copytree(ROOT / "docs", STAGED, ignore=lambda _, names: made.intersection(names))
    (STAGED / "README.md").unlink()
    for name in ["docs/README.md", *TOP]:
        text = (ROOT / name).read_text()
        (STAGED / placed(name)).write_text(moved(text, name) if name.endswith(".md") else text)
    for page in STAGED.rglob("*.md"):
        name = f"docs/{page.relative_to(STAGED)}"
        if (ROOT / name).is_file():
            page.write_text(moved(page.read_text(), name))
    for name in reference.MADE:
        (STAGED / placed(name)).write_text(reference.page(name))
    pages = {str(page.relative_to(STAGED)) for page in STAGED.rglob("*.md")}
    pages -= {placed(name) for name in ("docs/README.md", *TOP)}
    settings = (ROOT / "mkdocs.yml").read_text()
    assert "site_dir: build/site" in settings
    file = ROOT / "build/mkdocs.yml"
    nav = menu((ROOT / "docs/README.md").read_text(), pages)
    file.write_text(settings.replace("site_dir: build/site", "site_dir: site") + nav)
    return file


def build() -> None:
    """Raises ``SystemExit`` where a link leads nowhere."""
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "-f", str(stage())]
    environment = {**os.environ, "NO_COLOR": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout.partition("Traceback")[0] + done.stderr.partition("Traceback")[0], file=sys.stderr)
        raise SystemExit("error: the documents cannot be built\nhint: the lines above name each link")


def problems(site: Path) -> list[str]:
    """What each page fetches from elsewhere or does not find, and what the search does not know."""
    pages = sorted(page for page in site.rglob("*.html") if page.name != ERROR_PAGE)
    styles = [style for style in sorted(site.rglob("*.css")) if FETCHED.search(style.read_text())]
    wrong = [f"`{style.relative_to(site)}` asks another machine for something" for style in styles]
    for page in pages:
        loaded = Loaded()
        loaded.feed(page.read_text())
        for address in loaded.addresses:
            file = page.parent / re.split(r"[?#]", address)[0]
            if ELSEWHERE.match(address):
                wrong.append(f"`{page.relative_to(site)}` asks for `{address}`")
            elif not address.startswith("data:") and not file.is_file():
                wrong.append(f"`{page.relative_to(site)}` asks for `{address}`, which is not there")
    searched = json.loads((site / "search.json").read_text())
    known = {item["location"].partition("#")[0] for item in searched["items"]}
    for page in pages:
        name = str(page.relative_to(site))
        if name not in known:
            wrong.append(f"the search does not know `{name}`")
    return wrong


def main() -> int:
    build()
    wrong = problems(SITE)
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    print(f"{SITE / 'index.html'}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
