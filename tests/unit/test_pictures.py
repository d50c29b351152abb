"""The documents' pictures show what the tool prints; their site needs nothing from elsewhere, and its search is whole."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import printed
from builders import PROVEN, measurement, record, sampled
from shown_records import on_screen
from tunetool.record import CheckResult, Expectation, Measurement, Node, Verdict

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools/dev"))
import pictures  # noqa: E402  (tools/dev is no package)
import website  # noqa: E402

sys.path.remove(str(ROOT / "tools/dev"))

PRINTED = ROOT / "docs/pictures/verify-slow-drive.txt"
FOUND = "`LAB3NV2` 1058.3x slower to write than the median of the other 7"
EXPECTED = "no member over 3x slower than the median of the others"
REMEDY = (
    "look at `/dev/nvme2n1`: `nvme smart-log` for wear, temperature and media errors, `lspci -vv` for its link; "
    "replace it if it stays slow"
)


TORCH = "torch is not installed in `/opt/tunetool/venv-7976ef55fbd79a33/bin/python`, and this node has no training environment"
TRAINING = "set the role `training_environment` on and run `tunetool provision`, or name a Python that has torch with `--python`"


def figure(direction: str, ratio: float, without_storage: float, *samples: float) -> Measurement:
    proof = PROVEN.model_copy(update={"ratio": ratio})
    asked = {
        "direction": direction,
        "sample_seconds": 2.0,
        "tester_cpu_share": 0.06,
        "tester_ceiling": without_storage * 1e9,
    }
    values = [sample * 1e9 for sample in samples]
    return sampled(f"sequential.{direction}", *values, medium="md RAID0 (8 x nvme)", parameters=asked, evidence=proof)


def page() -> str:
    """The page of a record with the figures of the picture."""
    passed = [CheckResult(id=f"c{n}", status="pass", expected="", found="", remedy="") for n in range(31)]
    skipped = [CheckResult(id=f"s{n}", status="skip", expected="", found="", remedy="") for n in range(2)]
    deepspeed = CheckResult(id="deepspeed.io", status="skip", expected="", found=TORCH, remedy=TRAINING)
    slow = CheckResult(
        id="drives.balance",
        status="fail",
        expected=EXPECTED,
        found=FOUND,
        remedy=REMEDY,
    )
    shown = record(
        figure("read", 1.0, 187.93, 0.159, 0.1604, 0.161, 0.1603, 0.1609, 0.1582),
        figure("write", 1.00028, 76.3246, 0.1683, 0.1609, 0.1633, 0.1609, 0.1601, 0.164),
        measurement("ceiling.link", 2e9, parameters={"drives": 8}),
        node=Node(host="node3"),
        target="/mnt/nvme_raid0",
        expectations=[Expectation(name="sequential.read", value=5e7, source="--expect", status="pass")],
        checks=[*passed, *skipped, deepspeed, slow],
        verdict=Verdict(status="fail", reasons=[f"drives.balance: {FOUND}"]),
    )
    path = Path("/var/lib/tunetool/runs/20261123T144535Z-fleet-vm/hosts/node3.json")
    return on_screen(shown, path)


def test_verify_prints_the_failure_as_the_picture_shows_it() -> None:
    assert [line.rstrip() for line in page().splitlines()] == PRINTED.read_text().splitlines()


@pytest.mark.parametrize(
    "message",
    [
        FOUND.replace("`LAB3NV2` 1058.3", "...").replace("write", "...").replace("7", "..."),
        EXPECTED.replace("3", "..."),
        REMEDY.replace("`/dev/nvme2n1`", "..."),
    ],
)
def test_its_cause_and_its_cure_are_the_tool_s_own_words(message: str) -> None:
    assert printed.can_be_printed(message)


def test_a_picture_has_every_line_and_fetches_nothing() -> None:
    drawn = ElementTree.fromstring(pictures.picture(PRINTED.read_text(), "a & b"))
    texts = [(each.text or "").replace("\xa0", " ") for each in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert [text for text in texts if not text.startswith("the c")] == [
        line.strip() for line in PRINTED.read_text().splitlines()
    ]
    assert {text for text in texts if text.startswith("the c")} == {"the cause", "the cure"}
    assert next(drawn.iter("{http://www.w3.org/2000/svg}title")).text == "a & b"
    ends = [float(each.attrib["x"]) + float(each.attrib["textLength"]) for each in drawn.iter() if "x" in each.attrib]
    assert max(ends) <= float(drawn.attrib["width"])
    notes = [float(each.attrib["x"]) for each in drawn.iter() if (each.text or "").startswith("the\xa0c")]
    assert min(notes) > pictures.MARGIN + pictures.WIDTH * pictures.ADVANCE
    values = [value for each in drawn.iter() for value in each.attrib.values()]
    assert not [value for value in values if "//" in value or "url(" in value]


@pytest.mark.parametrize(
    ("head", "said"),
    [
        ('<script src="assets/a.js"></script>', None),
        ('<link rel="next" href="https://example.org/b.html">', None),
        ('<script src="https://example.org/a.js"></script>', "`index.html` asks for `https://example.org/a.js`"),
        ('<link rel="stylesheet" href="//example.org/a.css">', "`index.html` asks for `//example.org/a.css`"),
        ("<script>let inline;</script>", None),
        ('<script src="assets">', "`index.html` asks for `assets`, which is not there"),
        ('<img src="gone.svg">', "`index.html` asks for `gone.svg`, which is not there"),
        ('<img src="assets/a.js?v=1#x">', None),
    ],
)
def test_a_page_that_asks_for_something_else_is_seen(head: str, said: str | None, tmp_path: Path) -> None:
    made_site(tmp_path, head, ["index.html"])
    assert website.problems(tmp_path) == ([said] if said else [])


def test_a_lost_page_and_a_style_sheet_that_fetches_are_seen(tmp_path: Path) -> None:
    made_site(tmp_path, "", [])
    (tmp_path / "assets/a.css").write_text("@import 'https://example.org/font.css';")
    assert website.problems(tmp_path) == [
        "`assets/a.css` asks another machine for something",
        "the search does not know `index.html`",
    ]


def made_site(folder: Path, head: str, known: list[str]) -> None:
    (folder / "assets").mkdir()
    (folder / "assets/a.js").write_text("")
    (folder / "index.html").write_text(f"<html><head>{head}</head></html>")
    (folder / "404.html").write_text('<script src="/assets/a.js"></script>')
    (folder / "search.json").write_text(json.dumps({"items": [{"location": f"{name}#top"} for name in known]}))
