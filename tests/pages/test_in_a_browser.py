"""Pages in a real Chromium: they open without a request and a complaint, sort, filter, and serve keyboard and phone.

`TUNETOOL_SCREENSHOTS=DIR` keeps pictures of all of them, in both themes and at a phone's width, and those of the guide.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shown_records
from browser import Browser
from tunetool import record as records
from tunetool.fleet.view import view_of_nodes
from tunetool.inspect.collect import inspect
from tunetool.inspect.source import opened
from tunetool.report import inspection_page, render_html, trend_page
from tunetool.report.kinds import write_any_page
from tunetool.report.runs import Kept
from tunetool.report.trend import points
from tunetool.tune.settings import AioSettings
from tunetool.view.curves import Line, plot

DESK, PHONE, PAPER = 1280, 390, 688
"""Widths in CSS pixels: of a window, of a phone, and of A4 between its margins."""
NODES = 24
NEWER = ("tune", "stage", "ds-io", "trend", "inspect", "acceptance")
GUIDE = [
    ("verify", 900, "svg"),
    ("fleet", 900, "#nodes tbody tr:nth-child(2)"),
    ("tune", 900, "section:nth-of-type(2) details"),
]
"""Pictures of docs/guides/pages.md: the page, the width of the window, and what is the last in the picture."""
SPACE = [
    AioSettings(2**20, depth, 2**n, False, overlap)
    for depth in (8, 32, 128)
    for n in range(4)
    for overlap in (True, False)
]
MACHINE = Path(__file__).parents[2] / "docs/machines/h200-cloud-made.json"
HOSTILE = "'\"></text></style><script>alert(1)</script><img src=x onerror=alert(2)><svg onload=alert(3)>"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    for other in (shown_records.handled(128, 8, 24.0), shown_records.handled(64, 4, 30.0, "read")):
        records.write(other, folder)
    made = {
        "verify": shown_records.verified(),
        "pass": shown_records.verified(slow=7.0),
        "tune": shown_records.tuned(*SPACE),
        "stage": shown_records.staged(),
        "ds-io": shown_records.handled(),
        "acceptance": shown_records.accepted(),
        "hostile": shown_records.hostile(shown_records.verified(), HOSTILE),
    }
    paths = {name: write_any_page(record, records.write(record, folder)) for name, record in made.items()}
    kept = [Kept(f"{each.started:%Y%m%dT%H%M%SZ}-verify-node1", each) for each in shown_records.over_time()]
    trend = trend_page.page(points(kept, "sequential.read"), "sequential.read", ["tunetool", "report", "trend"])
    with opened(MACHINE) as source:
        inspection = inspection_page.page(inspect(source), ["tunetool", "inspect"], records.utc_now())
    whole, nodes, groups = shown_records.fleet(NODES)
    fleet = render_html.page(view_of_nodes(whole, nodes, groups), whole)
    for name, text in (("fleet", fleet), ("trend", trend), ("inspect", inspection)):
        paths[name] = folder / f"{name}.html"
        paths[name].write_text(text)
    return paths


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    started = Browser(tmp_path_factory.mktemp("browser"))
    yield started
    started.close()


@pytest.fixture(scope="module")
def axe() -> str:
    """axe-core's own script, which a Python package brings."""
    found = importlib.util.find_spec("axe_core_python")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).with_name("axe.min.js").read_text()


def keep(browser: Browser, name: str) -> None:
    if "TUNETOOL_SCREENSHOTS" in os.environ:
        browser.picture(Path(os.environ["TUNETOOL_SCREENSHOTS"]) / f"{name}.png")


@pytest.mark.parametrize(
    ("name", "dark", "width"),
    [
        *(("verify", dark, width) for dark in (False, True) for width in (DESK, PHONE)),
        *(("fleet", dark, width) for dark in (False, True) for width in (DESK, PHONE)),
        *(("tune", False, PHONE), ("tune", True, DESK), ("inspect", False, PHONE), ("inspect", True, DESK)),
        *(("stage", False, PHONE), ("ds-io", True, PHONE), ("trend", True, DESK), ("trend", False, PHONE)),
        *(("pass", True, DESK), ("hostile", False, DESK)),
    ],
)
def test_a_page_opens_alone_and_everybody_can_read_it(
    browser: Browser, axe: str, pages: dict[str, Path], name: str, dark: bool, width: int
) -> None:
    browser.open(pages[name], dark=dark, width=width)
    keep(browser, f"{name}-{'dark' if dark else 'light'}-{width}")
    assert browser.requests == [pages[name].as_uri()]
    assert browser.complaints == []
    assert browser.evaluate("document.documentElement.scrollWidth") <= width, "the page itself scrolls sideways"
    browser.evaluate(axe)
    # Folded parts are looked at too.
    browser.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    found = browser.evaluate("axe.run().then((found) => found.violations)")
    assert [(each["id"], [node["html"][:200] for node in each["nodes"][:3]]) for each in found] == []


def column(browser: Browser, table: str, number: int) -> list[str]:
    rows = f"[...document.getElementById('{table}').tBodies[0].rows]"
    cells: list[str] = browser.evaluate(f"{rows}.filter((r) => r.offsetHeight).map((r) => r.cells[{number}].innerText)")
    return cells


def click(browser: Browser, expression: str) -> Any:
    return browser.evaluate(f"{expression}.click()")


def choose(browser: Browser, name: str, value: str) -> None:
    field = f"document.forms[0].elements['{name}']"
    browser.evaluate(f"{field}.value = {value!r}; {field}.dispatchEvent(new Event('input', {{bubbles: true}}))")


def test_the_nodes_are_sorted_and_filtered(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["fleet"])
    first = column(browser, "nodes", 0)
    assert len(first) == NODES
    assert set(column(browser, "nodes", 1)[:2]) == {"FAIL", "ERROR"}
    head = "document.querySelectorAll('#nodes th button')"
    click(browser, f"{head}[2]")
    speeds = column(browser, "nodes", 2)
    values = [float(each.split()[0]) for each in speeds if each != "-"]
    assert values == sorted(values)
    assert speeds[-1] == "-", "what was not measured is below"
    click(browser, f"{head}[2]")
    speeds = column(browser, "nodes", 2)
    assert [float(each.split()[0]) for each in speeds[:-1]] == values[::-1]
    assert speeds[-1] == "-"
    assert browser.evaluate("document.querySelector('#nodes th[aria-sort]').ariaSort") == "descending"
    click(browser, f"{head}[0]")
    assert column(browser, "nodes", 0) == sorted(first)
    choose(browser, "group", "rack3")
    assert column(browser, "nodes", 4) == ["rack3"] * 6
    assert browser.evaluate("document.querySelector('output').value") == "6 of 24"
    choose(browser, "slow", "slow among the others")
    assert column(browser, "nodes", 0) == ["node0007", "node0023"]
    browser.evaluate("document.forms[0].reset()")
    browser.evaluate("new Promise((done) => setTimeout(done, 50))")
    assert len(column(browser, "nodes", 0)) == NODES
    choose(browser, "differs", "kernel")
    assert column(browser, "nodes", 0) == ["node0005"]
    choose(browser, "differs", "")
    choose(browser, "text", "NODE001")
    assert column(browser, "nodes", 0) == [f"node00{number}" for number in range(10, 20)]
    assert browser.complaints == []


def test_a_table_is_sorted_by_the_keyboard_alone(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["fleet"])
    seen = []
    for _ in range(20):
        browser.press("Tab")
        seen.append(browser.evaluate("document.activeElement.textContent.trim().slice(0, 20)"))
        if seen[-1] == "node":
            break
    assert seen[-1] == "node", seen
    assert browser.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    browser.press("Enter", "\r")
    names = column(browser, "nodes", 0)
    assert names == sorted(names)


def test_a_page_is_whole_without_its_script(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["fleet"], scripts=False)
    answer = browser.call("DOM.getDocument", depth=-1)["root"]["nodeId"]
    rows = browser.call("DOM.querySelectorAll", nodeId=answer, selector="#nodes tbody tr")["nodeIds"]
    assert len(rows) == NODES
    assert browser.call("DOM.querySelectorAll", nodeId=answer, selector="th button")["nodeIds"] == []
    form = browser.call("DOM.querySelector", nodeId=answer, selector="form[hidden]")["nodeId"]
    assert form, "controls that do nothing are not shown"


@pytest.mark.parametrize(("name", "width", "last"), GUIDE, ids=[name for name, _, _ in GUIDE])
def test_a_picture_of_the_guide_is_whole(
    browser: Browser, pages: dict[str, Path], name: str, width: int, last: str
) -> None:
    browser.open(pages[name], width=width)
    browser.call("Emulation.setScrollbarsHidden", hidden=True)
    bottom = browser.evaluate(f"document.querySelector({last!r}).getBoundingClientRect().bottom + 1")
    cut = "[...document.querySelectorAll('.scroll')].filter((e) => e.checkVisibility() && e.getBoundingClientRect().top < BOTTOM && e.scrollWidth > e.clientWidth)"
    assert browser.evaluate(f"{cut.replace('BOTTOM', str(bottom))}.length") == 0, "something is cut at its right"
    if "TUNETOOL_SCREENSHOTS" in os.environ:
        clip = {"x": 0, "y": 0, "width": width, "height": bottom, "scale": 1}
        browser.picture(Path(os.environ["TUNETOOL_SCREENSHOTS"]) / f"page-{name}.png", clip)


@pytest.mark.parametrize("name", ["verify", "fleet", *NEWER])
def test_nothing_is_cut_off_on_paper(browser: Browser, pages: dict[str, Path], name: str) -> None:
    browser.open(pages[name], dark=True, width=PAPER)
    browser.call("Emulation.setEmulatedMedia", media="print", features=[])
    browser.evaluate("dispatchEvent(new Event('beforeprint'))")
    keep(browser, f"{name}-print")
    wide = "[...document.querySelectorAll('table, svg, pre')].filter((e) => e.getBoundingClientRect().right > innerWidth + 1)"
    assert browser.evaluate(f"{wide}.map((e) => e.outerHTML.slice(0, 80))") == []
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.evaluate("[...document.querySelectorAll('details')].every((e) => e.open)")
    printed = browser.call("Page.printToPDF", paperWidth=8.27, paperHeight=11.69, preferCSSPageSize=True)
    assert len(printed["data"]) > 10_000


def test_a_script_that_got_into_a_page_does_not_run(browser: Browser, pages: dict[str, Path], tmp_path: Path) -> None:
    """Should escaping ever fail, the page's policy is the second wall."""
    broken = tmp_path / "broken.html"
    text = pages["verify"].read_text().replace("<main>", "<main><script>document.title = 'taken'</script>", 1)
    broken.write_text(text.replace("<h2>", "<img src='x.png' onerror='document.title = 1'><h2>", 1))
    browser.open(broken)
    assert browser.evaluate("document.title") == "Storage of node1"
    assert browser.complaints, "the browser says what it refused"
    assert browser.evaluate("document.querySelectorAll('th button').length") > 0, "our own script runs"


def test_curves_are_readable_on_the_dark_theme(browser: Browser, pages: dict[str, Path], tmp_path: Path) -> None:
    lines = [Line(f"rank {rank}", [(0.0, rank), (1.0, rank + 1.0)]) for rank in range(8)]
    drawn = tmp_path / "curves.html"
    drawn.write_text(pages["verify"].read_text().replace("<main>", f"<main>{plot('Loss', '1', lines, 1.0)}", 1))
    browser.open(drawn, dark=True)
    strokes = browser.evaluate("[...document.querySelectorAll('polyline')].map((e) => getComputedStyle(e).stroke)")
    assert len(set(strokes)) == 8
    paper = brightness(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert min((brightness(each) + 0.05) / (paper + 0.05) for each in strokes) >= 3


def brightness(colour: str) -> float:
    """WCAG's relative luminance of `rgb(r, g, b)`."""
    shares = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
