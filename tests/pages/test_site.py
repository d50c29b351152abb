"""The documents' site in a real Chromium, from the disk: its home, its code, its search.

`TUNETOOL_SCREENSHOTS=DIR` keeps pictures of some pages, at a desk's and at a phone's width.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import website
from browser import Browser

DESK, PHONE = 1280, 390
CODE = re.compile(r"<pre[^>]*>.*?</pre>", re.DOTALL)
CUT = """(blocks => {
  const article = document.querySelector("article");
  article.innerHTML = blocks.map(block => `<div class="highlight">${block}</div>`).join("");
  const all = [...article.querySelectorAll("pre > code")];
  const cut = all.filter(each => each.scrollWidth > each.clientWidth || each.getBoundingClientRect().right > innerWidth);
  return [all.length, cut.map(each => each.innerText.slice(0, 80)), document.documentElement.scrollWidth];
})"""
FOUND = """(async words => {
  const wait = () => new Promise(done => setTimeout(done, 100));
  const shadow = () => [...document.querySelectorAll("*")].find(each => each.shadowRoot?.querySelector("[role=combobox]"));
  if (!shadow()) document.querySelector(".md-search__button").click();
  while (!shadow()) await wait();
  const root = shadow().shadowRoot, box = root.querySelector("[role=combobox]");
  box.focus();
  box.value = words;
  box.dispatchEvent(new Event("input", {bubbles: true}));
  while (!root.querySelector("ol a[href]")) await wait();
  return [...root.querySelectorAll("ol a[href]")].map(each => each.getAttribute("href"));
})"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    website.build()
    folder = tmp_path_factory.mktemp("site") / "site"
    shutil.copytree(website.SITE, folder)
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    made = Browser(tmp_path_factory.mktemp("browser"))
    yield made
    made.close()


def test_no_code_is_cut_at_a_desk(browser: Browser, site: Path) -> None:
    blocks = [block for page in sorted(site.rglob("*.html")) for block in CODE.findall(page.read_text())]
    browser.open(site / "guides/verify.html", width=DESK)
    number, cut, width = browser.evaluate(f"{CUT}({json.dumps(blocks)})")
    assert number > 200
    assert not cut, f"{len(cut)} of {number}"
    assert width <= DESK


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("replace a dead drive", "guides/replace-a-drive.html"),
        ("nodes already have RAID", "guides/your-inventory.html"),
        ("nodes already have RAID", "guides/adopt-an-array.html"),
        ("install", "guides/install.html"),
        ("upgrade", "guides/install.html"),
        ("remove", "guides/install.html"),
        ("inventory", "guides/your-inventory.html"),
    ],
)
def test_the_search_finds_what_a_user_would_ask_for(browser: Browser, site: Path, words: str, page: str) -> None:
    browser.open(site / "index.html", width=DESK)
    found = browser.evaluate(f"{FOUND}({json.dumps(words)})")
    pages = list(dict.fromkeys(address.partition("#")[0].partition("?")[0] for address in found))
    assert [each for each in pages[:3] if each.endswith(page)], pages[:6]


@pytest.mark.parametrize("width", [DESK, PHONE])
def test_the_home_page_is_the_readme(browser: Browser, site: Path, width: int) -> None:
    browser.open(site / "index.html", width=width)
    assert browser.evaluate("document.querySelector('h1').innerText").startswith("tunetool")
    assert browser.evaluate("[...document.images].every(each => each.complete && each.naturalWidth > 0)")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    links = browser.evaluate("[...document.querySelectorAll('article a[href]')].map(each => each.getAttribute('href'))")
    for page in ("guides/install.html", "documents.html", "SECURITY.html"):
        assert page in [link.partition("#")[0] for link in links]
    assert not browser.complaints
    assert [each for each in browser.requests if not each.startswith(("file:", "data:", "blob:"))] == []
    if folder := os.environ.get("TUNETOOL_SCREENSHOTS"):
        browser.picture(Path(folder) / f"site-{width}.png")
